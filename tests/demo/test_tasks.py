"""The pictures: the same bits every time, balanced, and never both trained on and tested on."""

import numpy as np
import pytest

from fusion_bench_nufilt.demo.tasks import TASKS, _handwriting, render

every_task = pytest.mark.parametrize("task", TASKS)


def test_there_are_eight_tasks_and_no_two_prompts_are_alike():
    prompts = [prompt for task in TASKS.values() for prompt in task.prompts()]
    assert len(TASKS) == 8
    assert len(set(prompts)) == len(prompts)


@every_task
def test_rendering_twice_gives_the_same_bits(task):
    one, two = (render(task, 40, held_out=False, seed=3) for _ in range(2))
    np.testing.assert_array_equal(one[0], two[0])
    np.testing.assert_array_equal(one[1], two[1])


@every_task
def test_another_seed_gives_other_pictures(task):
    one, two = (render(task, 40, held_out=False, seed=seed)[0] for seed in (3, 4))
    assert (one != two).any(axis=(1, 2, 3)).all()


@every_task
def test_pictures_are_rgb_and_show_something(task):
    images, _ = render(task, 40, held_out=False, seed=0)
    assert images.shape == (40, 32, 32, 3)
    assert images.dtype == np.uint8
    assert images.std(axis=(1, 2, 3)).min() > 10


@every_task
def test_classes_are_balanced_and_cover_the_labels(task):
    classes = len(TASKS[task].classes)
    _, labels = render(task, 101, held_out=True, seed=0)
    counts = np.bincount(labels, minlength=classes)
    assert len(counts) == classes
    assert counts.min() >= 1
    assert np.ptp(counts) <= 1


@every_task
def test_no_test_picture_is_a_training_picture(task):
    train, _ = render(task, 200, held_out=False, seed=0)
    test, _ = render(task, 100, held_out=True, seed=0)
    assert {x.tobytes() for x in train}.isdisjoint(x.tobytes() for x in test)


def test_no_handwriting_is_on_both_sides():
    train, test = (
        [stamp.tobytes() for stamps in _handwriting(held_out).values() for stamp in stamps]
        for held_out in (False, True)
    )
    assert len(train) + len(test) == 1797
    assert set(train).isdisjoint(test)
