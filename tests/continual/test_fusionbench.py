"""FusionBench's own pools and methods on the demo: the same results through our protocol as through
theirs.
"""

from copy import deepcopy

import pytest
from fusion_bench.utils import instantiate
from lightning import Fabric

from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.continual import Evaluator


@pytest.fixture
def pools(demo):
    config = compose_run(["modelpool=nufilt_demo", "taskpool=nufilt_demo"])
    modelpool = instantiate(config.modelpool)
    taskpool = instantiate(config.taskpool)
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
