"""Adapters are merged in a basis of their factors, whatever becomes of them."""

import json
import shutil
from copy import deepcopy

import pytest
import torch
from peft import PeftModel
from transformers import LlamaConfig, LlamaForCausalLM

from fusion_bench_nufilt.methods import METHODS
from fusion_bench_nufilt.methods.options import Settings
from tests.cli.helpers import nufilt
from tests.merge.helpers import (
    change_json,
    hashes,
    interrupt,
    manifest,
    merge,
    save_stream,
    tensors,
)
from tests.merge.test_heads import save_bert_adapter
from tests.models.test_adapters import random_adapter
from tests.models.test_experts import fused, qwen3_moe
from tests.models.test_experts import save_adapter as save_adapter_of_experts
from tests.tiny_models import SMALL, build, llama

BOTH = ("math", "code")


def save_adapters(folder, dtype=torch.float64, tasks=3, **config):
    """A base, adapters of it, and what peft makes of each."""
    save_stream(folder, llama(tie_word_embeddings=False), tasks=0, dtype=dtype)
    for number, name in enumerate(("math", "code", "chat")[:tasks]):
        base = type(llama()).from_pretrained(folder / "base", dtype=dtype)
        options = {"r": 2 + number, "target_modules": "all-linear", **config}
        random_adapter(folder / name, folder / f"{name}_whole", base, number, **options)


def test_a_method_is_given_no_more_than_the_directions_of_the_adapters(tmp_path, note_calls):
    save_adapters(tmp_path, tasks=2)
    updates = note_calls(METHODS["nufilt"], "update")
    merge(tmp_path, BOTH, target_modules="all-linear")
    assert {tuple(base.shape[1:]) for _, _, base, *_ in updates} == {(5, 32), (5, 64)}


ALL = ("math", "code", "chat")


def adapter_of(folder, tasks=ALL, out="adapter", merged=None, rank=None, **options):
    """Merge adapters into one, without their base."""
    options = {"target_modules": "all-linear", **options}
    settings = {"adapter": True, "rank": rank, **options.pop("settings", {})}
    return merge(folder, tasks, out, merged, settings=settings, **options)


def on_base(folder, adapter):
    """What peft makes of an adapter, and its updates, by the names of the weights."""
    base = type(llama()).from_pretrained(folder / "base", dtype=torch.float64)
    model = PeftModel.from_pretrained(deepcopy(base), adapter).merge_and_unload()
    before = base.state_dict()
    return {key: value - before[key] for key, value in model.state_dict().items()}


def updates(folder, out):
    """The updates of a merged model."""
    before = tensors(folder / "base")
    return {key: value - before[key] for key, value in tensors(folder / out).items()}


def assert_close(found, expected, tolerance=2e-5):
    """Equal to the digits of float32, of each tensor's update."""
    assert found.keys() == expected.keys()
    for key, update in expected.items():
        assert (found[key] - update).norm() <= tolerance * update.norm(), key


def whole_models(tasks):
    return [f"{task}_whole" for task in tasks]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """A base in float64, which rounds nothing, and three adapters of different ranks."""
    folder = tmp_path_factory.mktemp("adapters")
    save_adapters(folder)
    return folder


def test_nufilt_goes_on_from_an_adapter_of_sums_as_from_a_model_of_sums(adapters, tmp_path):
    """It has no use for the sums, and goes on from the merged update."""
    shutil.copytree(adapters, tmp_path, dirs_exist_ok=True)
    adapter_of(tmp_path, ["math"], "one", method="best")
    two = adapter_of(tmp_path, ["code"], "two", "one")
    options = {"target_modules": "all-linear", "other_params": "pretrained"}
    merge(tmp_path, ["math_whole"], "one_whole", method="best", **options)
    merge(tmp_path, ["code_whole"], "two_whole", "one_whole", **options)
    assert_close(on_base(tmp_path, two), updates(tmp_path, "two_whole"))


def without_weights(folder, target, *, with_config=True):
    """A folder with adapters of a base that has no weights, or not even a configuration."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*_whole", "base"))
    base = target / "base"
    base.mkdir()
    if with_config:
        shutil.copy(folder / "base" / "config.json", base)
    for name in ALL:
        change_json(target / name / "adapter_config.json", base_model_name_or_path=str(base))
    return target


@pytest.mark.parametrize(("method", "with_config"), [("nufilt", True), ("best", False)])
def test_no_weight_of_the_base_is_needed(adapters, tmp_path, method, with_config):
    folder = without_weights(adapters, tmp_path / "without", with_config=with_config)
    out = adapter_of(folder, method=method)
    expected = adapter_of(adapters, out=tmp_path / "expected", method=method)
    assert_close(on_base(adapters, out), on_base(adapters, expected), tolerance=1e-6)
    messages = manifest(out)["warnings"]
    is_guessed = any("last block" in message for message in messages)
    assert is_guessed == (not with_config)
    # No adapter changes what is outside the layers, so that nothing there is averaged.
    assert "averaged" not in (out / "README.md").read_text()


def test_layers_of_other_ranks_and_embeddings_are_what_peft_reads(tmp_path):
    """The mean of what adapters change outside the merged layers is in the adapter, too."""
    patterns = {"rank_pattern": {"q_proj": 3, "layers.0.mlp.up_proj": 1}, "lora_alpha": 5}
    targets = ["q_proj", "up_proj", "embed_tokens"]
    save_adapters(tmp_path, tasks=2, target_modules=targets, **patterns)
    options = {"target_modules": ["q_proj", "up_proj"], "other_params": "mean"}
    weights = (0.5, 1.5)
    merge(tmp_path, whole_models(BOTH), "model", settings={"weights": weights}, **options)
    expected = updates(tmp_path, "model")
    assert expected["model.embed_tokens.weight"].norm() > 0
    at_once = adapter_of(tmp_path, BOTH, settings={"weights": weights}, **options)
    assert_close(on_base(tmp_path, at_once), expected)
    config = json.loads((at_once / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 6
    assert config["rank_pattern"]["model.layers.0.mlp.up_proj"] == 2
    one_by_one = None
    for task, weight in zip(BOTH, weights, strict=True):
        options["settings"] = {"weights": [weight]}
        one_by_one = adapter_of(tmp_path, [task], f"after_{task}", one_by_one, **options)
    assert_close(on_base(tmp_path, one_by_one), expected)


def save_with_full_tensors(folder, *, tie_word_embeddings=False, bias="all"):
    """A base, two adapters that hold tensors in full, not all the same ones, and one that holds
    none.
    """
    configs = {
        "math": {"trainable_token_indices": [1, 4], "bias": bias},
        "code": {"trainable_token_indices": [4, 7, 2], "bias": bias},
        "chat": {},
    }
    if not tie_word_embeddings:
        configs["math"]["modules_to_save"] = ["lm_head", "norm"]
        configs["code"]["modules_to_save"] = ["lm_head"]
    base = build(
        LlamaForCausalLM,
        LlamaConfig(
            **SMALL,
            vocab_size=50,
            attention_bias=True,
            tie_word_embeddings=tie_word_embeddings,
        ),
        seed=0,
    )
    save_stream(folder, base, tasks=0, dtype=torch.float64)
    for number, name in enumerate(ALL):
        model = LlamaForCausalLM.from_pretrained(folder / "base", dtype=torch.float64)
        options = {"r": 2, "target_modules": ["q_proj", "up_proj"], **configs[name]}
        random_adapter(folder / name, folder / f"{name}_whole", model, number, **options)


MEAN = {"target_modules": ["q_proj", "up_proj"], "other_params": "mean"}


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_what_adapters_hold_in_full_is_kept_in_full_with_the_base_given(tmp_path, bias):
    """As the mean, of which a model that leaves a tensor alone has the base's part."""
    save_with_full_tensors(tmp_path, bias=bias)
    merge(tmp_path, whole_models(ALL), "model", **MEAN)
    expected = updates(tmp_path, "model")
    options = {**MEAN, "base": "base"}
    at_once = adapter_of(tmp_path, out="at_once", **options)
    assert_close(on_base(tmp_path, at_once), expected)
    one_by_one = None
    for task in ALL:
        one_by_one = adapter_of(tmp_path, [task], f"after_{task}", one_by_one, **options)
    assert_close(on_base(tmp_path, one_by_one), expected)
    # Without a weight that is the base's own.
    kept = [key for key in tensors(at_once) if "lora_" not in key]
    held = [key for key in tensors(tmp_path / "math") if "lora_" not in key]
    assert len(kept) == len(held) > 0


def test_tokens_that_were_trained_are_those_of_a_tied_head_too(tmp_path):
    save_with_full_tensors(tmp_path, tie_word_embeddings=True)
    merge(tmp_path, whole_models(ALL), "model", **MEAN)
    adapter = adapter_of(tmp_path, out="adapter", base="base", **MEAN)
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["trainable_token_indices"] == {"model.embed_tokens": [1, 2, 4, 7]}
    words = torch.tensor([[1, 2, 3, 4, 5, 7]])
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    with torch.no_grad():
        expected = model(words).logits
        logits = PeftModel.from_pretrained(base, adapter)(words).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)


def test_a_mean_of_full_tensors_needs_the_base_or_is_left_to_it(tmp_path):
    """Both ways that the refusal names are gone."""
    save_with_full_tensors(tmp_path)
    with pytest.raises(ValueError, match=r"adapter '.*math' holds 'lm_head.weight', ") as no:
        adapter_of(tmp_path, **MEAN)
    assert "name the folder of the base with --base, or leave them" in str(no.value)
    with_base = adapter_of(tmp_path, BOTH, out="with_base", base="base", **MEAN)
    # What the merged adapter holds already is not left to the base.
    with pytest.raises(ValueError, match=r"with_base' holds .* name the folder .* --base$"):
        adapter_of(tmp_path, ["chat"], "refused", with_base, **MEAN)
    left = {**MEAN, "other_params": "pretrained"}
    out = adapter_of(tmp_path, out="left", **left)
    assert not [key for key in tensors(out) if "lora_" not in key]
    assert any("also changes" in warning for warning in manifest(out)["warnings"])
    merge(tmp_path, whole_models(ALL), "model", **left)
    assert_close(on_base(tmp_path, out), updates(tmp_path, "model"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_going_on_from_a_mean_of_full_tensors_in_16_bits_says_so(tmp_path, dtype):
    """And float32, which the warning asks for, is none."""
    save_with_full_tensors(tmp_path)
    options = {**MEAN, "base": "base", "settings": {"dtype": dtype}}
    first = adapter_of(tmp_path, ["math"], "first", **options)
    assert not any("the means" in warning for warning in manifest(first)["warnings"])
    second = adapter_of(tmp_path, ["code"], "second", first, **options)
    of_means = [warning for warning in manifest(second)["warnings"] if "the means" in warning]
    if dtype == "float32":
        assert not of_means
    else:
        assert "or float32 from the first merge on, avoid that" in of_means[0]


def test_an_update_outside_the_layers_that_is_not_merged_is_left_out_of_the_next_merge(tmp_path):
    save_adapters(tmp_path, tasks=2, target_modules=["q_proj", "embed_tokens"])
    first = adapter_of(tmp_path, ["math"], "first", target_modules=["q_proj"])
    second = adapter_of(tmp_path, ["code"], "second", first, target_modules=["q_proj"])
    assert not [key for key in tensors(second) if "embed" in key]


def test_another_tokenizer_than_that_of_the_adapter_merged_so_far_is_said(tmp_path):
    save_adapters(tmp_path, tasks=2)
    file = "tokenizer_config.json"
    for name in BOTH:
        (tmp_path / name / file).write_text(f'{{"name": "{name}"}}')
    first = adapter_of(tmp_path, ["math"], "first")
    second = adapter_of(tmp_path, ["code"], "second", first)
    assert (second / file).read_text() == (first / file).read_text() == '{"name": "math"}'
    for out, is_said in ((first, False), (second, True)):
        assert is_said == any("different tokenizer" in text for text in manifest(out)["warnings"])


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"use_dora": True}, "is a DoRA"),
        ({"modules_to_save": ["up_proj"], "target_modules": ["q_proj"]}, "is merged as a layer"),
    ],
)
def test_what_no_adapter_holds_is_refused_and_merged_into_a_full_model(tmp_path, config, part):
    targets = ["q_proj", "up_proj"]
    save_adapters(tmp_path, tasks=1, **{"target_modules": targets, **config})
    with pytest.raises(ValueError, match=f"adapter '.*math' .*{part}.*leave --adapter out"):
        adapter_of(tmp_path, ["math"], target_modules=targets)
    merge(tmp_path, ["math"], target_modules=targets)


def test_an_adapter_with_a_head_is_refused_and_merged_into_a_full_model(tmp_path):
    save_bert_adapter(tmp_path / "bert")
    with pytest.raises(ValueError, match=r"has a head of its own \('classifier.*leave --adapter"):
        adapter_of(tmp_path / "bert", ["adapter"])
    out = merge(tmp_path / "bert", ["adapter"], "whole", target_modules="all-linear")
    assert list(manifest(out)["heads"]) == ["adapter"]


@fused
def test_factors_of_fused_experts_are_refused_and_merged_into_a_full_model(tmp_path):
    save_adapter_of_experts(tmp_path, qwen3_moe)
    with pytest.raises(ValueError, match=r"is of fused experts .*leave --adapter out"):
        adapter_of(tmp_path, ["adapter"])
    merge(tmp_path, ["adapter"], "whole", target_modules="all-linear")


def test_whole_models_and_adapters_of_other_bases_are_refused(adapters, tmp_path):
    with pytest.raises(ValueError, match=r"'.*math_whole' is a whole model"):
        adapter_of(adapters, ["math_whole", "code"], tmp_path / "out")
    folder = without_weights(adapters, tmp_path / "without")
    change_json(folder / "code" / "adapter_config.json", base_model_name_or_path="someone/else")
    with pytest.raises(ValueError, match=r"was trained on .*base' and '.*code' on 'someone/else'"):
        adapter_of(folder)
    with pytest.raises(ValueError, match=r"rank 4 is for an adapter"):
        Settings(rank=4)


def test_an_adapter_that_was_interrupted_goes_on_and_is_the_same(adapters, tmp_path):
    options = {"method": "best", "target_modules": "all-linear", "settings": {"adapter": True}}
    expected = merge(adapters, ALL, tmp_path / "expected", **options)
    out = tmp_path / "out"
    assert interrupt(adapters, after=5, out=out, tasks=ALL, **options) >= 5
    assert hashes(merge(adapters, ALL, out, **options)) == hashes(expected)


def test_the_command_line_goes_on_with_the_base_of_full_tensors(tmp_path):
    save_with_full_tensors(tmp_path)
    merge(tmp_path, whole_models(["math", "code"]), "model", method="sum")
    names = {name: str(tmp_path / name) for name in ("math", "code", "base", "first", "second")}
    words = ["--task", names["math"], "--base", names["base"], "--adapter", "--method", "sum"]
    code, text = nufilt("merge", *words, "--out", names["first"])
    assert code == 0, text
    words = ["--merged", names["first"], "--task", names["code"], "--out", names["second"]]
    code, text = nufilt("merge", *words)
    assert code == 0, text
    assert_close(on_base(tmp_path, tmp_path / "second"), updates(tmp_path, "model"))
