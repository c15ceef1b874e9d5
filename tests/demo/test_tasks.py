"""The pictures: the same bits every time, balanced, and never both trained on and tested on."""

from itertools import chain

import numpy as np
import pytest

from fusion_bench_nufilt.demo.tasks import TASKS, _handwriting, render


def test_there_are_eight_tasks_and_no_two_prompts_are_alike():
    prompts = list(chain.from_iterable(task.prompts() for task in TASKS.values()))
    assert len(TASKS) == 8
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize("task", TASKS)
def test_pictures_show_something_in_balanced_classes_and_depend_on_the_seed_alone(task):
    images, labels = render(task, 101, held_out=True, seed=0)
    assert images.shape == (101, 32, 32, 3)
    assert images.dtype == np.uint8
    assert images.std(axis=(1, 2, 3)).min() > 10
    counts = np.bincount(labels)
    assert len(counts) == len(TASKS[task].classes)
    assert np.ptp(counts) <= 1 <= counts.min()
    again, _ = render(task, 101, held_out=True, seed=0)
    others, _ = render(task, 101, held_out=True, seed=4)
    np.testing.assert_array_equal(images, again)
    assert (images != others).any(axis=(1, 2, 3)).all()
    trained_on, _ = render(task, 200, held_out=False, seed=0)
    assert {x.tobytes() for x in trained_on}.isdisjoint(x.tobytes() for x in images)


def test_no_handwriting_is_on_both_sides():
    train = [stamp.tobytes() for stamp in chain(*_handwriting(held_out=False).values())]
    test = [stamp.tobytes() for stamp in chain(*_handwriting(held_out=True).values())]
    assert len(train) + len(test) == 1797
    assert set(train).isdisjoint(test)
