"""FusionBench's own pools and methods on the demo: the same results through our protocol as through theirs."""

from copy import deepcopy

import pytest
import torch
from fusion_bench.models.hf_clip import HFCLIPClassifier
from fusion_bench.utils import instantiate
from lightning import Fabric

from fusion_bench_nufilt.continual import Evaluator, run_observed
from fusion_bench_nufilt.demo.__main__ import compose_run


@pytest.fixture
def pools(demo):
    config = compose_run(["modelpool=nufilt_demo", "taskpool=nufilt_demo"])
    modelpool, taskpool = instantiate(config.modelpool), instantiate(config.taskpool)
    taskpool._fabric_instance = Fabric(devices=1, accelerator="cpu")
    return modelpool, taskpool


def test_our_report_is_the_one_of_fusionbench(pools):
    modelpool, taskpool = pools
    model = modelpool.load_model("digits")
    report = Evaluator(taskpool).report(model, modelpool.model_names)
    expected = taskpool.evaluate(deepcopy(model))
    assert report.keys() == expected.keys()
    for name in modelpool.model_names:
        assert report[name] == expected[name]
    assert report["average"] == pytest.approx(expected["average"])


def test_prompts_are_encoded_once_for_all_steps(pools, monkeypatch):
    modelpool, taskpool = pools
    encoded = []
    encode = HFCLIPClassifier.set_classification_task
    monkeypatch.setattr(
        HFCLIPClassifier, "set_classification_task", lambda *args: encoded.append(args[1]) or encode(*args)
    )
    evaluator = Evaluator(taskpool)
    model = modelpool.load_pretrained_model()
    first = evaluator.report(model, ["digits", "shapes"])
    evaluator.report(modelpool.load_model("shapes"), ["shapes", "letters"])
    assert len(encoded) == 3
    assert evaluator.report(model, ["digits", "shapes"]) == first


@pytest.mark.parametrize("method", ["opcm", "task_arithmetic", "weight_average"])
def test_a_continual_method_of_fusionbench_gives_what_it_gives_by_itself(pools, method):
    modelpool, taskpool = pools

    def algorithm():
        made = instantiate(compose_run([f"method=opcm/{method}", "method.seed=42"]).method)
        made._fabric_instance = taskpool.fabric
        return made

    evaluator, steps = Evaluator(taskpool), []
    matrix, seconds = run_observed(
        algorithm(), modelpool, evaluator, evaluate="diagonal", progress=lambda step: steps.append(step)
    )
    assert steps == list(range(1, 9))
    assert seconds > 0

    alone = algorithm()
    alone.save_on_every_step = alone.evaluate_on_every_step = False
    alone._program = type("Program", (), {"taskpool": taskpool})()
    report = evaluator.report(alone.run(modelpool), matrix.tasks)
    assert matrix.values[-1].tolist() == [report[name]["accuracy"] for name in matrix.tasks]
    assert not torch.isnan(torch.tensor(matrix.bwt))
