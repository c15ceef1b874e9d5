"""The pictures: the same bits every time, balanced, and never both trained on and tested on."""

from itertools import chain

import numpy as np
import pytest

from fusion_bench_nufilt.demo.tasks import TASKS, _handwriting, render

every_task = pytest.mark.parametrize("task", TASKS)


def test_there_are_eight_tasks_and_no_two_prompts_are_alike():
    prompts = list(chain.from_iterable(task.prompts() for task in TASKS.values()))
    assert len(TASKS) == 8
    assert len(set(prompts)) == len(prompts)


@every_task
def test_pictures_depend_on_the_seed_alone(task):
    pictures, _ = render(task, 40, held_out=False, seed=3)
    again, _ = render(task, 40, held_out=False, seed=3)
    others, _ = render(task, 40, held_out=False, seed=4)
    np.testing.assert_array_equal(pictures, again)
    assert (pictures != others).any(axis=(1, 2, 3)).all()


@every_task
def test_pictures_are_rgb_and_show_something_and_classes_are_balanced(task):
    images, labels = render(task, 101, held_out=True, seed=0)
    assert images.shape == (101, 32, 32, 3)
    assert images.dtype == np.uint8
    assert images.std(axis=(1, 2, 3)).min() > 10
    counts = np.bincount(labels)
    assert len(counts) == len(TASKS[task].classes)
    assert np.ptp(counts) <= 1 <= counts.min()


@every_task
def test_no_test_picture_is_a_training_picture(task):
    train, _ = render(task, 200, held_out=False, seed=0)
    test, _ = render(task, 100, held_out=True, seed=0)
    assert {x.tobytes() for x in train}.isdisjoint(x.tobytes() for x in test)


def test_no_handwriting_is_on_both_sides():
    train = [stamp.tobytes() for stamp in chain(*_handwriting(held_out=False).values())]
    test = [stamp.tobytes() for stamp in chain(*_handwriting(held_out=True).values())]
    assert len(train) + len(test) == 1797
    assert set(train).isdisjoint(test)
