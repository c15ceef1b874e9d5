"""An adapter of peft's `target_parameters` on fused experts is the model that peft makes of it."""

from functools import partial

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, __version__

from fusion_bench_nufilt.merge import merge_folders, plan_merge
from fusion_bench_nufilt.merge.checks import kept_from_base
from tests.families import FAMILIES, WIDE
from tests.merge.helpers import (
    SHARDED,
    change,
    change_json,
    merge,
    plan,
    save_stream,
    tensors,
    transpose_experts,
)
from tests.released import released
from tests.tiny_models import SMALL, adapt_at_random

QWEN = {**WIDE, "num_key_value_heads": 2, "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 8}


def qwen3_moe(**settings):
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**{**QWEN, "moe_intermediate_size": 24, **settings})
    ).eval()


def one_expert():
    return qwen3_moe(num_experts=1, num_experts_per_tok=1)


def without_gates():
    torch.manual_seed(0)
    size = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50}
    experts = {
        "layers_block_type": ["attention", "moe"],
        "n_routed_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
    }
    size.pop("num_hidden_layers")
    return transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**size, **experts)).eval()


MAKE = {"gpt_oss": FAMILIES["gpt_oss"], "mixtral": FAMILIES["mixtral"], "qwen3_moe": qwen3_moe}
BOTH = {
    "target_modules": ["q_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}
fused = pytest.mark.skipif(__version__ < "5", reason="transformers 4 has a module for every expert")


def save_adapter(folder, make, shards=SHARDED, **config):
    """Folders `base` and `task1`; `adapter` and `task9`, the same model as peft's adapter and
    merged by peft.
    """
    models = save_stream(folder, make(), tasks=1, dtype=torch.float64, shards=shards)
    base = type(models["_pretrained_"]).from_pretrained(folder / "base", dtype=torch.float64)
    model = get_peft_model(base, LoraConfig(**{"r": 4, "lora_alpha": 8, **BOTH, **config}))
    adapt_at_random(model, 3)
    model.save_pretrained(folder / "adapter")
    model.merge_and_unload().save_pretrained(folder / "task9")


def added(folder, *tasks, method="sum"):
    options = {"method": method, "other_params": "mean"}
    if method == "sum":
        options["scale"] = 1.0
    return tensors(merge(folder, tasks, f"{method}_{'_'.join(tasks)}", **options))


def assert_merged_as_peft_merges(folder, method="sum"):
    result = added(folder, "adapter", method=method)
    expected = tensors(folder / "task9")
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-14)


RANKS = {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {".*layers.0.*gate_up_proj": 32}}


@fused
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("gpt_oss", RANKS),
        ("mixtral", {"target_parameters": ["down_proj"], **RANKS}),
        ("qwen3_moe", {"use_rslora": True, "bias": "all"}),
    ],
)
def test_an_adapter_on_fused_experts_is_the_model_that_peft_merges_it_into(
    tmp_path, family, config
):
    save_adapter(tmp_path, MAKE[family], **config)
    assert_merged_as_peft_merges(tmp_path)
    base = tensors(tmp_path / "base")
    result = tensors(tmp_path / "sum_adapter")
    changed = {key for key, value in result.items() if not torch.equal(value, base[key])}
    experts = {key for key in base if ".experts." in key and "bias" not in key}
    assert (changed & experts == experts) == ("target_parameters" not in config)


@fused
def test_its_factors_are_merged_as_the_whole_model_is(tmp_path):
    save_adapter(tmp_path, MAKE["gpt_oss"])
    expected = added(tmp_path, "task1", "task9", method="nufilt")
    torch.testing.assert_close(
        added(tmp_path, "task1", "adapter", method="nufilt"), expected, rtol=0, atol=1e-9
    )


@fused
@pytest.mark.parametrize("transposed", [False, True])
def test_an_adapter_on_experts_that_a_checkpoint_may_store_transposed(tmp_path, transposed):
    save_adapter(tmp_path, partial(released, "Qwen3-VL-MoE"), shards="5GB")
    if transposed:
        for name in ("base", "task9"):
            transpose_experts(tmp_path / name)
    assert_merged_as_peft_merges(tmp_path)


@fused
def test_experts_whose_up_and_down_projections_have_the_same_sides_are_told_by_peft(tmp_path):
    parameters = ["experts.up_proj", "experts.down_proj"]
    save_adapter(tmp_path, without_gates, target_parameters=parameters)
    result = added(tmp_path, "adapter")
    expected = tensors(tmp_path / "task9")  # transformers keeps a bias of the router in float32
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-14, check_dtype=False)


@fused
def test_a_router_is_merged_as_the_parameter_that_it_is(tmp_path):
    # The alpha is of modules named gate.
    config = {"target_parameters": ["gate.weight"], "alpha_pattern": {"gate": 32}}
    save_adapter(tmp_path, qwen3_moe, **config)
    assert_merged_as_peft_merges(tmp_path)


@fused
def test_experts_left_out_of_the_layers_are_averaged_with_the_adapters(tmp_path):
    save_adapter(tmp_path, FAMILIES["gpt_oss"])
    result = merge(
        tmp_path,
        ["adapter"],
        method="sum",
        scale=1.0,
        target_modules=["q_proj"],
        other_params="mean",
    )
    torch.testing.assert_close(tensors(result), tensors(tmp_path / "task9"), rtol=0, atol=1e-14)


SAVED = {"target_parameters": None, "modules_to_save": ["experts"]}


@fused
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_experts_that_an_adapter_saves_whole_are_merged_as_those_of_a_model(tmp_path, family):
    save_adapter(tmp_path, MAKE[family], **SAVED)
    assert_merged_as_peft_merges(tmp_path)
    base = tensors(tmp_path / "base")
    result = tensors(tmp_path / "sum_adapter")
    experts = {key for key in base if ".experts." in key}
    assert experts
    assert not [key for key in experts if torch.equal(result[key], base[key])]


@fused
def test_saved_experts_of_a_checkpoint_that_stores_them_transposed(tmp_path):
    save_adapter(tmp_path, partial(released, "Qwen3-VL-MoE"), shards="5GB", **SAVED)
    for name in ("base", "task9"):
        transpose_experts(tmp_path / name)
    assert_merged_as_peft_merges(tmp_path)


@fused
def test_saved_experts_outside_the_layers_are_averaged_and_said_to_be_left_out(tmp_path):
    save_adapter(tmp_path, qwen3_moe, **SAVED)
    options = {"target_modules": ["q_proj"], "method": "sum", "scale": 1.0}
    averaged = plan(tmp_path, ["adapter"], other_params="mean", **options)
    result = tensors(merge_folders(averaged, tmp_path / "mean"))
    torch.testing.assert_close(result, tensors(tmp_path / "task9"), rtol=0, atol=1e-14)
    kept = kept_from_base(plan(tmp_path, ["adapter"], **{**options, "other_params": "pretrained"}))
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in kept


@fused
def test_saved_experts_of_another_size_are_refused_by_name_and_shape(tmp_path):
    save_adapter(tmp_path, qwen3_moe, **SAVED)
    key = "base_model.model.model.layers.0.mlp.experts.down_proj"
    change(tmp_path / "adapter", key, lambda value: value[:2].contiguous())
    with pytest.raises(ValueError, match=rf"'{key}': shape \(2, 32, 24\) differs from \(3, 32, 24"):
        plan(tmp_path, ["adapter"])


# --- other versions of peft, and unsloth ---


def rewrite(folder, function):
    """Rewrite the pairs of factors of the experts, given as A and B."""
    path = folder / "adapter" / "adapter_model.safetensors"
    state = load_file(path)
    for key in [key for key in state if ".experts." in key and ".lora_A." in key]:
        partner = key.replace("lora_A", "lora_B")
        a, b = function(state[key], state[partner])
        state[key] = a.contiguous()
        state[partner] = b.contiguous()
    save_file(state, path)


def swap(a, b, count=3):
    """The factors of the transposed update, as peft 0.18 has them where later versions have the
    update's.
    """
    experts = b.unflatten(1, (-1, count)).permute(2, 1, 0)  # (experts, rank, outputs)
    return experts.flatten(0, 1), a.unflatten(0, (count, -1)).permute(2, 1, 0).flatten(1)


@fused
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_the_factors_of_an_earlier_peft_are_told_by_their_sides(tmp_path, family):
    save_adapter(tmp_path, MAKE[family])
    rewrite(tmp_path, swap)
    assert_merged_as_peft_merges(tmp_path)


def square(**settings):
    return qwen3_moe(moe_intermediate_size=32, **settings)  # its down_proj is 32 x 32


@fused
@pytest.mark.parametrize("earlier", [False, True])
def test_the_factors_of_square_experts_are_as_those_beside_them(tmp_path, earlier):
    save_adapter(tmp_path, square)
    if earlier:
        rewrite(tmp_path, swap)
    assert_merged_as_peft_merges(tmp_path)


@fused
@pytest.mark.parametrize("earlier", [False, True])
def test_the_version_of_peft_tells_the_factors_of_square_experts_alone(tmp_path, earlier):
    save_adapter(tmp_path, square, target_parameters=["down_proj"])
    if earlier:
        rewrite(tmp_path, swap)
        change_json(tmp_path / "adapter" / "adapter_config.json", peft_version="0.18.1")
    assert_merged_as_peft_merges(tmp_path)


@fused
def test_an_adapter_of_unsloth_that_names_the_order_of_peft_is_read_as_one_of_peft(tmp_path):
    save_adapter(tmp_path, qwen3_moe)
    config = {"auto_mapping": {"unsloth_fixed": True}, "lora_B_layout": "rank_major"}
    change_json(tmp_path / "adapter" / "adapter_config.json", **config)
    assert_merged_as_peft_merges(tmp_path)


UNSLOTH = {"auto_mapping": {"base_model_class": "Qwen3MoeForCausalLM", "unsloth_fixed": True}}


@fused
@pytest.mark.parametrize("make", [qwen3_moe, one_expert])
def test_one_expert_and_rank_one_have_one_order(tmp_path, make):
    rank = 4
    if make is qwen3_moe:
        rank = 1
    save_adapter(tmp_path, make, r=rank)
    change_json(tmp_path / "adapter" / "adapter_config.json", **UNSLOTH)
    assert_merged_as_peft_merges(tmp_path)


@fused
@pytest.mark.parametrize(
    ("make", "saved", "written", "message"),
    [
        (qwen3_moe, {}, UNSLOTH, "adapter' has lora_B_layout None, and only rank_major can be"),
        (
            qwen3_moe,
            {},
            {"base_model_name_or_path": "unsloth/Qwen3-30B-A3B"},
            "has lora_B_layout None, and only rank_major",
        ),
        (
            qwen3_moe,
            {},
            {"lora_B_layout": "grouped_by_expert"},
            "has lora_B_layout grouped_by_expert, and only rank_major",
        ),
        (
            square,
            {"target_parameters": ["down_proj"]},
            {"peft_version": None},
            r"square experts of 'model.layers.\d.mlp.experts.down_proj'",
        ),
        (
            qwen3_moe,
            {},
            {"rank_pattern": {"down_proj": 8}},
            r"adapter', 'model.layers.0.mlp.experts': .*they do not belong together",
        ),
    ],
)
def test_an_adapter_that_can_be_read_in_two_ways_or_none_is_refused(
    tmp_path, make, saved, written, message
):
    save_adapter(tmp_path, make, **saved)
    change_json(tmp_path / "adapter" / "adapter_config.json", **written)
    with pytest.raises(ValueError, match=message):
        plan_merge(str(tmp_path / "base"), [str(tmp_path / "adapter")])


@fused
@pytest.mark.parametrize(
    ("spoil", "shapes"),
    [
        (lambda a, b: (a, b[:-1]), r".*\(47, 12\).*\(48, 12\)"),
        (lambda a, b: (a[:-1], b), r".*\(11, 32\).*\(12, 32\)"),
    ],
    ids=["sides", "experts"],
)
def test_factors_that_fit_no_parameter_are_refused_by_name(tmp_path, spoil, shapes):
    save_adapter(tmp_path, qwen3_moe)
    rewrite(tmp_path, spoil)
    with pytest.raises(ValueError, match=rf"adapter', 'model.layers.0.mlp.experts.*{shapes}.* for"):
        plan_merge(str(tmp_path / "base"), [str(tmp_path / "adapter")])
