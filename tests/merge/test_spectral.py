"""A method that keeps sums merges folders as it merges loaded models, and goes on from its state
alone.
"""

import pickle
from functools import partial

import pytest
import torch
from lightning import Fabric
from lightning.fabric.loggers import TensorBoardLogger
from safetensors.torch import load_file, save_file
from transformers import CLIPVisionModel

from fusion_bench_nufilt import LayerwiseMergingAlgorithm
from fusion_bench_nufilt.merge import merge_folders
from fusion_bench_nufilt.merge.basis import resize_lists
from fusion_bench_nufilt.methods import ORDER_FREE
from tests.cli.helpers import nufilt
from tests.merge import helpers
from tests.merge.helpers import RANKS, STATE, hashes, manifest, same, save_stream, tensors
from tests.models.test_adapters import save_all
from tests.tiny_models import clip, llama

plan = partial(helpers.plan, method="spectral")
merge = partial(helpers.merge, method="spectral")


def test_lists_of_directions_are_cut_or_filled_with_zeros():
    value = torch.arange(1.0, 7).reshape(2, 3)
    assert resize_lists(value, "ko", 1).tolist() == [[1, 2, 3]]
    assert resize_lists(value, "ok", 4).tolist() == [[1, 2, 3, 0], [4, 5, 6, 0]]


def algorithm(method="spectral", **config):
    targets = {"target_modules": "all-linear", "other_params": "mean"}
    return LayerwiseMergingAlgorithm(method, **targets, shuffle_order=False, **config)


def layers(folder):
    """The tensors of the merged layers."""
    return {key: value for key, value in tensors(folder).items() if "proj" in key}


@pytest.mark.parametrize(
    ("method", "dtype"),
    [(name, torch.bfloat16 if name == "spectral" else torch.float32) for name in ORDER_FREE],
)
def test_a_stream_at_once_is_the_stream_one_by_one(tmp_path, method, dtype):
    def merge(*args, **options):
        return helpers.merge(tmp_path, *args, method=method, **options)

    save_stream(tmp_path, llama(), dtype=dtype)
    whole = merge()
    merge(["task1"], "one")
    merge(["task2"], "two", merged="one")
    last = merge(["task3"], "three", merged="two")
    assert same(layers(last), layers(whole))
    assert same(load_file(last / STATE), load_file(whole / STATE))
    assert manifest(last)["files"][STATE] == manifest(whole)["files"][STATE]
    assert manifest(last)["warnings"] == []


@pytest.mark.parametrize(("method", "options"), [("spectral", {}), ("nufilt", RANKS)])
def test_a_step_that_fusion_bench_saved_goes_on_as_a_folder(tmp_path, method, options):
    models = save_stream(tmp_path, clip())
    first = algorithm(method, **options)
    logger = TensorBoardLogger(tmp_path / "run", "", "")
    first._fabric_instance = Fabric(devices=1, accelerator="cpu", loggers=logger)
    first.run({name: models[name] for name in ("_pretrained_", "task1", "task2")})
    targets = {"target_modules": "all-linear", "other_params": "mean"}
    saved = "run/checkpoints/merged_model_1"
    out = helpers.merge(tmp_path, ["task3"], merged=saved, method=method, **targets, **options)
    expected = algorithm(method, **options).run(models).state_dict()
    assert same(CLIPVisionModel.from_pretrained(out).state_dict(), expected)
    assert manifest(out)["step"] == 3
    assert manifest(out)["tasks"] == ["task1", "task2", "task3"]


def test_a_plan_that_went_to_another_machine_knows_the_state(stream):
    merge(stream, ["task1"], "one")
    sent = pickle.loads(pickle.dumps(plan(stream, ["task2"], merged="one")))
    expected = merge(stream, ["task2"], "expected", merged="one")
    assert hashes(merge_folders(sent, stream / "out")) == hashes(expected)


def test_an_adapter_counts_where_it_changes_a_layer(tmp_path):
    save_all(tmp_path, llama(tie_word_embeddings=False))
    out = merge(tmp_path, ["task1", "adapter"])
    expected = tensors(merge(tmp_path, ["task1", "task9"], "full"))
    torch.testing.assert_close(tensors(out), expected, rtol=0, atol=1e-4)
    state = load_file(out / STATE)
    assert state["model.layers.0.self_attn.q_proj.state.count"] == 2
    assert state["model.layers.0.self_attn.k_proj.state.count"] == 1


VOTES = "model.layers.0.mlp.up_proj.state.votes"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: {key: state[key] for key in state if key != VOTES},
            f"has no '{VOTES}' in {STATE}",
        ),
        (
            lambda state: {**state, VOTES: torch.zeros(3, 3)},
            r"F32 \(3, 3\) is not F32 \(\d+, \d+\)",
        ),
    ],
)
def test_a_state_that_was_changed_is_refused(stream, change, message):
    one = merge(stream, ["task1"], "one")
    save_file(change(load_file(one / STATE)), one / STATE)
    with pytest.raises(ValueError, match=message):
        merge(stream, ["task2"], merged="one")


def test_what_has_no_state_or_that_of_other_layers_or_of_another_method_is_refused(stream):
    helpers.merge(stream, ["task1"], "other", target_modules="all-linear")
    by_nufilt = (
        "other' was merged by NUFILT, which keeps no sums that spectral voting goes on "
        "from: merge all of its tasks again with spectral"
    )
    with pytest.raises(ValueError, match=by_nufilt):
        plan(stream, ["task2"], "other")
    merge(stream, ["task1"], "one")
    of_other_layers = r"one' has 'model\.layers\.0\.mlp.*of the same layers only"
    with pytest.raises(ValueError, match=of_other_layers):
        plan(stream, ["task2"], "one", target_modules=r".*self_attn.*")
    helpers.merge(stream, ["task1"], "sum", method="sum")
    by_a_sum = "was merged by task arithmetic .*, which keeps no sums that spectral voting"
    with pytest.raises(ValueError, match=by_a_sum):
        plan(stream, ["task2"], "sum")


def test_nufilt_on_top_of_it_deserves_a_warning(stream):
    merge(stream, ["task1"], "one")
    planned = helpers.plan(stream, ["task2"], "one", target_modules="all-linear")
    assert any('method is "spectral" there and "nufilt" here' in text for text in planned.warnings)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--method", "spectral", "null_rank=6"],
            "'null_rank' is not an option of method=spectral",
        ),
        (["--kappa", "0.8"], "'kappa' is not an option of method=nufilt"),
        (["method=opcm"], "there is no layer-wise method 'opcm'; there are best"),
        (["--method", "spectral", "--damp", "0"], "damp must be a number > 0"),
    ],
)
def test_options_of_another_method_are_refused(tmp_path, words, message):
    models = ("--base", "base", "--task", "task1", "--out", tmp_path / "out")
    code, text = nufilt("merge", *models, *words)
    assert code == 1, text
    assert message in text
