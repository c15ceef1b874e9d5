"""A model pool is analysed only if its weights are those of its checkpoints."""

from types import SimpleNamespace

import pytest
from fusion_bench import BaseModelPool

from fusion_bench_nufilt.analysis.pool import PoolAnalysis
from fusion_bench_nufilt.analysis.settings import AnalysisConfig
from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.compare.experiment import Experiment
from tests.analysis.helpers import pictures, pool_of
from tests.tiny_models import clip, damaged_clip


@pytest.mark.parametrize("damaged", ["_pretrained_", "a"])
def test_a_layer_that_was_drawn_at_random_is_refused_by_name(tmp_path, damaged):
    entry, key = damaged_clip(tmp_path / "damaged")
    experiment = Experiment(compose_run(["modelpool=nufilt_demo"]))
    experiment.modelpool = BaseModelPool({"_pretrained_": clip(), "a": clip(1), damaged: entry})
    experiment.evaluator = SimpleNamespace(taskpool=pool_of({"a": pictures(10)}))
    with pytest.raises(ValueError, match=rf"model '{damaged}'.* lacks (layer )?'{key}'"):
        PoolAnalysis(experiment, "pool", AnalysisConfig(), tmp_path / "out", "auto").run()
