"""Numbers of experiments that nobody thought of, by plain formulas: accuracy, backward transfer,
zero-shot, deviations, and ranks, of random scores of which some are missing, and of runs of which
some failed or were killed.
"""

import dataclasses
import math
import statistics
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_bench_nufilt.compare import run as compare_run
from fusion_bench_nufilt.compare.run import compare
from fusion_bench_nufilt.compare.specs import RunSpec
from fusion_bench_nufilt.continual import task_order
from fusion_bench_nufilt.pages.comparison_tables import task_table
from fusion_bench_nufilt.pages.content import SeedRun
from fusion_bench_nufilt.pages.metrics import AccuracyMatrix, Mean
from tests.compare.helpers import comparison, failed, final
from tests.compare.helpers import mean_of as measured_mean

scores = st.one_of(st.none(), st.floats(0, 1, allow_nan=False))


@st.composite
def matrices(draw):
    """The tasks and the rows of an accuracy matrix."""
    count = draw(st.integers(1, 6))
    rows = draw(
        st.lists(st.lists(scores, min_size=count, max_size=count), min_size=count, max_size=count)
    )
    return [f"task {number}" for number in range(count)], rows


def mean_of(values):
    numbers = [value for value in values if value is not None]
    if not numbers:
        return math.nan
    return math.fsum(numbers) / len(numbers)


def is_same(value, expected):
    if math.isnan(expected):
        return math.isnan(value)
    return math.isclose(value, expected, rel_tol=1e-12, abs_tol=1e-12)


@given(matrix=matrices())
def test_metrics_are_their_formulas_over_the_scores_that_there_are(matrix):
    tasks, rows = matrix
    metrics = AccuracyMatrix.from_rows(tasks, rows).metrics()
    last = rows[-1]
    own = [rows[number][number] for number in range(len(tasks))]
    changes = []
    for number in range(len(tasks) - 1):
        if last[number] is not None and own[number] is not None:
            changes.append(last[number] - own[number])
    assert is_same(metrics["ACC"], mean_of(last))
    assert is_same(metrics["plasticity"], mean_of(own))
    assert is_same(metrics["BWT"], mean_of(changes))
    ahead = [mean_of(rows[step - 1][step:]) for step in range(1, len(tasks))]
    if ahead and not any(map(math.isnan, ahead)):
        assert is_same(metrics["zero_shot"], mean_of(ahead))
    else:
        assert math.isnan(metrics["zero_shot"])


@given(matrix=matrices())
def test_counts_of_tasks_are_those_with_the_scores_that_a_metric_needs(matrix):
    tasks, rows = matrix
    counts = AccuracyMatrix.from_rows(tasks, rows).task_counts()
    last = rows[-1]
    own = [rows[number][number] for number in range(len(tasks))]
    both = [pair for pair in list(zip(last, own, strict=True))[:-1] if None not in pair]
    assert counts["ACC"] == (len(tasks) - last.count(None), len(tasks))
    assert counts["plasticity"] == (len(tasks) - own.count(None), len(tasks))
    assert counts["BWT"] == (len(both), len(tasks) - 1)
    scored_ahead = []
    for number in range(1, len(tasks)):
        if None not in [rows[step][number] for step in range(number)]:
            scored_ahead.append(tasks[number])
    assert counts["zero_shot"] == (len(scored_ahead), len(tasks) - 1)


@given(values=st.lists(scores, max_size=8))
def test_a_mean_has_the_deviation_of_a_sample_of_what_is_not_missing(values):
    numbers = [value for value in values if value is not None]
    mean = Mean.of(values)
    assert mean.count == len(numbers)
    assert is_same(mean.mean, mean_of(values))
    expected = math.nan
    if len(numbers) > 1:
        expected = statistics.stdev(numbers)
    assert math.isnan(mean.std) == math.isnan(expected)
    if not math.isnan(expected):
        assert math.isclose(mean.std, expected, rel_tol=1e-9, abs_tol=1e-12)


TASKS = ["a", "b", "c"]
#: So that some of them read the same.
coarse = st.one_of(st.none(), st.sampled_from((0.5, 0.5002, 0.51, 0.6, 0.75)))


@st.composite
def experiments(draw):
    """Methods on seeds, each with the scores of a seed by step and task, or None if it failed."""
    seeds = draw(st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True))
    labels = draw(st.sets(st.sampled_from(("one", "two", "three", "four")), min_size=1))
    table = {}
    for label in sorted(labels):
        table[label] = {}
        for seed in seeds:
            rows = [[draw(coarse) for _ in TASKS] for _ in TASKS]
            table[label][seed] = rows if draw(st.integers(0, 7)) else None
    return table


def runs_of(table):
    runs = {}
    for label, by_seed in table.items():
        runs[label] = []
        for seed, rows in by_seed.items():
            order = task_order(TASKS, shuffle=True, seed=seed)
            run = failed(seed)
            if rows is not None:
                run = SeedRun({"seed": seed}, order, rows, [1.0, 1.0, 1.0])
            runs[label].append(run)
    return runs


def last_scores(by_seed, task):
    """The scores of a task after the last step, of the seeds that finished."""
    values = []
    for seed, rows in by_seed.items():
        if rows is not None:
            values.append(rows[-1][task_order(TASKS, shuffle=True, seed=seed).index(task)])
    return values


@settings(max_examples=8)
@given(table=experiments())
def test_a_comparison_has_the_means_and_ranks_of_its_scores(table):
    results = comparison(runs_of(table))
    shown = task_table(results)
    for task in TASKS:
        printed = {}
        for label, by_seed in table.items():
            values = last_scores(by_seed, task)
            mean = final(results, label, task)
            assert is_same(mean.mean, mean_of(values))
            if None not in by_seed.values() and None not in values:
                printed[label] = float(f"{100 * mean_of(values):.1f}")
        places = sorted(set(printed.values()), reverse=True)
        if len(places) < 2:
            assert task not in shown.ranks
            continue
        for label, value in printed.items():
            assert shown.ranks.loc[label, task] == 1 + places.index(value)
        assert shown.ranks[task].count() == len(printed)


@settings(max_examples=8)
@given(table=experiments())
def test_a_comparison_has_the_mean_accuracy_and_transfer_of_its_seeds(table):
    results = comparison(runs_of(table))
    for label, by_seed in table.items():
        accuracies = []
        transfers = []
        for rows in by_seed.values():
            if rows is None:
                continue
            accuracies.append(mean_of(rows[-1]))
            pairs = zip(rows[-1][:-1], [rows[0][0], rows[1][1]], strict=True)
            transfers.append(
                mean_of([last - own for last, own in pairs if None not in (last, own)])
            )
        for metric, values in (("ACC", accuracies), ("BWT", transfers)):
            numbers = [value for value in values if not math.isnan(value)]
            mean = measured_mean(results, label, metric)
            assert is_same(mean.mean, mean_of(numbers))
            assert math.isnan(mean.std) == (len(numbers) < 2)
            if len(numbers) > 1:
                deviation = statistics.stdev(numbers)
                assert math.isclose(mean.std, deviation, rel_tol=1e-9, abs_tol=1e-12)


class MadeUpExperiment:
    """Stands in for models and data: a run has the scores of a table, fails where these are None,
    and is killed after a number of others.
    """

    def __init__(self, table, runs_until_killed):
        self.tasks = TASKS
        self.settings = {"test_data": "some"}
        self.composed = {}
        self.digests = dict.fromkeys(["_pretrained_", *TASKS], "0")
        self.evaluator = None
        self.table = table
        self.runs_until_killed = runs_until_killed
        self.started = []

    def make_method(self, config):
        pass

    def score_single_models(self, on_step):
        return {"pretrained": dict.fromkeys(TASKS, 0.25), "individual": dict.fromkeys(TASKS, 0.95)}

    def run(self, config, on_step):
        if len(self.started) == self.runs_until_killed:
            raise KeyboardInterrupt
        self.started.append((config["label"], config["seed"]))
        (run,) = runs_of({"": {config["seed"]: self.table[config["label"]][config["seed"]]}})[""]
        return dataclasses.replace(run, config=config)


def compare_on(folder, table, labels, seeds, runs_until_killed=None):
    """Compare methods on seeds, and return the results, None if killed, and the runs started."""
    experiment = MadeUpExperiment(table, runs_until_killed)
    specs = [RunSpec(label, (f"method={label}",), label) for label in labels]

    def compose(overrides):
        label = overrides[-1].removeprefix("method=")
        return SimpleNamespace(method={"label": label, "shuffle_order": True})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_run, "Experiment", lambda *_: experiment)
        patch.setattr(compare_run, "compose_run", compose)
        patch.setattr(compare_run, "plain", dict)
        try:
            results = compare("some_pool", specs, seeds, folder)
        except KeyboardInterrupt:
            results = None
    return results, experiment.started


@settings(max_examples=8)
@given(data=st.data(), table=experiments())
def test_a_comparison_in_several_goes_is_that_of_one_whatever_was_killed(data, table):
    labels = sorted(table)
    seeds = sorted(table[labels[0]])
    with tempfile.TemporaryDirectory() as name:
        expected, started = compare_on(Path(name) / "one go", table, labels, seeds)
        assert sorted(started) == sorted((label, seed) for label in labels for seed in seeds)
        finished = set()
        for _ in range(data.draw(st.integers(0, 3), label="goes")):
            part = {
                "labels": sorted(data.draw(st.sets(st.sampled_from(labels), min_size=1))),
                "seeds": sorted(data.draw(st.sets(st.sampled_from(seeds), min_size=1))),
            }
            killed_after = data.draw(st.one_of(st.none(), st.integers(0, 4)), label="killed after")
            results, started = compare_on(
                Path(name) / "goes", table, **part, runs_until_killed=killed_after
            )
            wanted = {(label, seed) for label in part["labels"] for seed in part["seeds"]}
            # What failed is run again, and nothing that finished.
            assert finished.isdisjoint(started)
            if results is not None:
                assert set(started) == wanted - finished
            for label, seed in started:
                if table[label][seed] is not None:
                    finished.add((label, seed))
        results, started = compare_on(Path(name) / "goes", table, labels, seeds)
    assert finished.isdisjoint(started)
    assert results.as_json() == expected.as_json()
