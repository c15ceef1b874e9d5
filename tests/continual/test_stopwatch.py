"""One definition of seconds for all methods: merging, without data, loading, saving and scoring."""

import time

import pytest
from fusion_bench import BaseModelPool
from fusion_bench.utils import instantiate

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.continual import algorithm as algorithm_module
from fusion_bench_nufilt.continual.evaluation import Evaluator
from fusion_bench_nufilt.continual.run_folder import RunFolder, finished_step
from fusion_bench_nufilt.continual.stopwatch import DATA, LOADING, MERGING, Stopwatch
from fusion_bench_nufilt.demo import load_vision_model
from tests.continual.baselines.helpers import STEPS, configured, demo_images, on_cpu
from tests.continual.helpers import InterruptedRunError, interrupt_after, logging_to, pool
from tests.continual.test_resume import algorithm_in
from tests.tiny_models import finetuned

PAUSE = 1000.0
TICK = 1e-6  # others divide by how long they took


class Clock:
    """Time that passes while something slow is called, and hardly otherwise."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += TICK
        return self.now

    def slow(self, function, seconds=PAUSE):
        def slowed(*args, **kwargs):
            self.now += seconds
            return function(*args, **kwargs)

        return slowed


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def test_a_part_within_another_counts_for_itself_alone(clock):
    stopwatch = Stopwatch()
    clock.now = 5
    with stopwatch.part("outer"):
        clock.now += 1
        with stopwatch.part("inner"):
            clock.now += 10
            assert stopwatch.seconds == pytest.approx({"outer": 1, "inner": 10}, abs=1e-3)
        clock.now += 2
    clock.now += 100
    with stopwatch.part("outer"):
        clock.now += 4
    assert stopwatch.seconds == pytest.approx({"outer": 7, "inner": 10}, abs=1e-3)


#: FusionBench's own loops, batch methods, our own, and those that need data.
METHODS = ["opcm", "nufilt", "adamerging"]
for name in ("weight_average", "dop", "task_arithmetic", "knots_ties", *STEPS):
    if name not in METHODS:
        METHODS.append(pytest.param(name, marks=pytest.mark.slow))


@pytest.mark.parametrize("name", METHODS)
def test_the_seconds_of_a_method_are_those_of_merging_alone(
    name, demo, tmp_path, clock, monkeypatch
):
    """Loading, checking, scoring, saving and the set-up of data take a thousand seconds each."""
    base = load_vision_model("_pretrained_")
    models = {"_pretrained_": base, "shapes": finetuned(base, 1), "counts": finetuned(base, 2)}
    images = compose_run(["modelpool=nufilt_demo"]).modelpool.train_datasets
    modelpool = BaseModelPool(models, train_datasets=images)
    taskpool = demo_images()
    for owner, function in (
        (algorithm_module, "load_model"),
        (algorithm_module, "check_module"),
        (Evaluator, "report"),
        (RunFolder, "save_step"),
    ):
        monkeypatch.setattr(owner, function, clock.slow(getattr(owner, function)))
    monkeypatch.setattr(
        BaseModelPool, "load_train_dataset", clock.slow(BaseModelPool.load_train_dataset, 7.0)
    )
    method = name if name == "nufilt" else f"continual/{name}"
    options = [f"method.{STEPS[name]}=1"] if name in STEPS else []
    algorithm = logging_to(tmp_path, instantiate(configured(method, *options)))
    algorithm.run(modelpool, on_cpu(taskpool))
    assert len(algorithm.merge_seconds) == 2
    assert max(algorithm.merge_seconds) < 1
    seconds = algorithm.stopwatch.seconds
    assert seconds[MERGING] == pytest.approx(sum(algorithm.merge_seconds), abs=1e-3)
    assert seconds[LOADING] >= 2 * PAUSE
    needs_data = name in ("adamerging", "lora_wemoe", "sequential_finetuning")
    assert seconds.get(DATA, 0.0) == pytest.approx(14.0 if needs_data else 0.0, abs=1e-3)


def test_the_seconds_of_a_run_that_goes_on_are_those_of_all_its_processes(
    tmp_path, clock, monkeypatch
):
    merge_step = NufiltContinualMergingAlgorithm.merge_step

    def with_data(self, *models):
        with self.stopwatch.part(DATA):
            clock.now += 7
        return merge_step(self, *models)

    monkeypatch.setattr(NufiltContinualMergingAlgorithm, "merge_step", with_data)
    with pytest.raises(InterruptedRunError):
        algorithm_in(tmp_path).run(pool(3), on_step=interrupt_after(2))
    algorithm = algorithm_in(tmp_path)
    algorithm.run(pool(3))
    assert algorithm.data_seconds == pytest.approx(21, abs=1e-3)
    manifest = finished_step(tmp_path / "checkpoints" / "merged_model_2").whole()
    assert manifest["data_seconds"] == pytest.approx(21, abs=1e-3)


def test_a_method_that_needs_no_data_took_no_seconds_for_them(tmp_path):
    algorithm = algorithm_in(tmp_path)
    algorithm.run(pool(2))
    assert algorithm.data_seconds is None
    manifest = finished_step(tmp_path / "checkpoints" / "merged_model_1").whole()
    assert "data_seconds" not in manifest
