"""Scores of an earlier run are this run's only if the same task pool gave them on the same data."""

import json

import pytest
from datasets import Dataset
from fusion_bench.compat.taskpool import TaskPool as V01TaskPool
from omegaconf import OmegaConf

from tests.continual.helpers import logging_to
from tests.continual.test_evaluation import Counter, Counting

TASKS = ["a", "b"]


class Pool(V01TaskPool):
    """A pool whose scores are the share of its items that are below the number of merged tasks."""

    def __init__(self, numbers=(0, 1, 2, 3), **config):
        config["tasks"] = [{"name": task} for task in TASKS]
        super().__init__(OmegaConf.create({"batch_size": 2, **config}))
        self.numbers = list(numbers)
        self.scored = 0

    def load_task(self, name):
        return Task(self, Dataset.from_dict({"number": self.numbers}))


class Task:
    def __init__(self, pool, test_dataset):
        self.pool = pool
        self.test_dataset = test_dataset

    def evaluate(self, model):
        self.pool.scored += 1
        below = [number for number in self.test_dataset["number"] if number < model.weight.item()]
        return {"accuracy": len(below) / len(self.test_dataset)}


def run(folder, taskpool, **options):
    algorithm = logging_to(folder, Counting(shuffle_order=False, **options))
    algorithm.run({name: Counter() for name in ("_pretrained_", *TASKS)}, taskpool)
    return algorithm.matrix.rows()


OTHERS = {
    r"test_data\.a\.sha256 is not the same": {"numbers": (0, 1, 2, 4)},
    r"test_data\.a\.items is 4 there and 3 here": {"numbers": (0, 1, 2)},
    r"taskpool\.batch_size is 2 there and 3 here": {"batch_size": 3},
}


@pytest.mark.parametrize("difference", OTHERS)
def test_scores_of_another_task_pool_or_other_data_are_refused(tmp_path, difference):
    run(tmp_path, Pool())
    with pytest.raises(ValueError, match=rf"holds another run: {difference}.*path\.log_dir"):
        run(tmp_path, Pool(**OTHERS[difference]))


def test_a_pool_that_is_told_so_scores_one_batch(tmp_path):
    rows = run(tmp_path, Pool(fast_dev_run=True))
    assert rows == [[1 / 2, None], [1, 1]]


def test_a_run_without_scores_is_scored_later_and_keeps_what_was_scored(tmp_path):
    run(tmp_path, None)
    rows = run(tmp_path, Pool())
    assert all(value is not None for value in rows[-1])
    run(tmp_path, None)
    with pytest.raises(ValueError, match="holds another run"):
        run(tmp_path, Pool(range(5)))
    again = Pool()
    assert run(tmp_path, again) == rows
    assert again.scored == 0


@pytest.mark.parametrize("described", ["nowhere", "without its scores"])
def test_scores_of_which_nothing_says_what_they_are_of_are_made_again(tmp_path, described, caplog):
    rows = run(tmp_path, Pool())
    file = tmp_path / "run.json"
    if described == "nowhere":
        file.unlink()
    else:
        content = json.loads(file.read_text())
        del content["scoring"]
        file.write_text(json.dumps(content))
    other = Pool(range(1, 5))
    assert run(tmp_path, other) != rows
    assert other.scored == 3
    assert "they are made again" in caplog.text


class Trained(Counting):
    """A method that trains on data."""

    items = (1, 2)

    def training_data(self):
        return {"a": self.items}


def test_a_merge_that_was_trained_on_other_data_is_refused(tmp_path):
    models = {name: Counter() for name in ("_pretrained_", *TASKS)}
    for _ in range(2):
        logging_to(tmp_path, Trained()).run(models)
    other = logging_to(tmp_path, Trained())
    other.items = (1, 3)
    with pytest.raises(ValueError, match=r"training_data\.a\.sha256 is not the same"):
        other.run(models)
