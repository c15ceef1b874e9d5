"""What NUFILT says of its own options, and which layers it takes for changed."""

import pytest
import torch
from fusion_bench.utils import instantiate

from fusion_bench_nufilt import FusionConfig, NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.continual import layerwise
from fusion_bench_nufilt.merge import plan_merge
from fusion_bench_nufilt.methods.nufilt import is_changed
from fusion_bench_nufilt.methods.options import Settings, TargetConfig
from tests.cli.helpers import nufilt
from tests.merge.helpers import save_stream
from tests.merge.test_adapters import save_adapters
from tests.tiny_models import clip, finetuned, llama


@pytest.mark.parametrize(
    ("tasks", "options", "warns"),
    [
        (2, {}, True),
        (2, {"null_rank": 16}, False),
        (2, {"null_space": False}, False),
        (1, {}, False),  # the first task of all is taken whole
    ],
)
def test_nufilt_says_once_that_its_filter_covers_the_layers(
    tasks, options, warns, caplog, tmp_path
):
    layerwise._warn_once.cache_clear()
    models = save_stream(tmp_path, llama(), tasks=tasks)
    for _ in range(2):
        NufiltContinualMergingAlgorithm(max_steps=1, **options).run(models)
    said = [record.getMessage() for record in caplog.records if "null_rank" in record.getMessage()]
    layers = "null_rank=128 covers more than half of the inputs of 14 of 14 layers"
    assert [layers in text for text in said] == [True] * warns
    folders = [str(tmp_path / f"task{number}") for number in range(1, tasks + 1)]
    planned = plan_merge(str(tmp_path / "base"), folders, None, FusionConfig(**options))
    assert [layers in text for text in planned.warnings if "null_rank" in text] == [True] * warns


def test_the_ranks_that_are_advised_are_words_of_a_merge_after_which_nothing_is_said(tmp_path):
    save_stream(tmp_path, llama(), tasks=2)
    base = str(tmp_path / "base")
    tasks = [str(tmp_path / "task1"), str(tmp_path / "task2")]
    for targets, is_conditional in ((["q_proj"], True), ("all-linear", False)):
        planned = plan_merge(base, tasks, targets=TargetConfig(target_modules=targets))
        (warning,) = [text for text in planned.warnings if "null_rank" in text]
        assert ("Unless all linear layers are merged" in warning) == is_conditional
        words = warning.split()[-2:]
        assert words == ["null_rank=0.1667", "lora_rank=0.0833"]
    merge = ["merge", "--base", base, "--out", tmp_path / "out", "--dry-run"]
    for task in tasks:
        merge += ["--task", task]
    code, text = nufilt(*merge, *words)
    assert code == 0, text
    assert "covers more than half" not in text


def test_the_layers_that_adapters_change_are_counted_into_their_base_and_into_an_adapter(tmp_path):
    save_adapters(tmp_path, tasks=2, target_modules=["q_proj", "v_proj"])
    tasks = [str(tmp_path / "math"), str(tmp_path / "code")]
    for base, settings in ((None, Settings(adapter=True)), (str(tmp_path / "base"), Settings())):
        planned = plan_merge(base, tasks, settings=settings)
        (text,) = [text for text in planned.warnings if "null_rank" in text]
        assert "of 4 of 4 layers" in text


@pytest.mark.parametrize(
    ("method", "other_params"),
    [("nufilt", None), ("nufilt", "first"), ("nufilt/all_linear", "pretrained")],
)
def test_after_the_first_step_it_is_the_first_model_where_all_else_is_taken_too(
    method, other_params, caplog
):
    base = clip()
    task = finetuned(base, seed=1)
    words = [f"method={method}"]
    if other_params is not None:
        words.append(f"method.other_params={other_params}")
    algorithm = instantiate(compose_run(words).method)
    with caplog.at_level("INFO"):
        merged = algorithm.run({"_pretrained_": base, "one": task}).state_dict()
    same = all(
        torch.allclose(merged[key], value, atol=1e-6) for key, value in task.state_dict().items()
    )
    stays_pretrained = algorithm.targets.other_params == "pretrained"
    assert same is not stays_pretrained
    assert ("'one' is taken whole in the merged layers alone" in caplog.text) is stays_pretrained


def test_a_layer_is_changed_wherever_a_value_is():
    base = torch.zeros(2, 700, 300)
    for row in (0, 699):
        weight = base.clone()
        weight[1, row, 299] = 1
        assert is_changed(weight, base.bfloat16()).tolist() == [False, True]
