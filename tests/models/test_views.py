"""Views are tested against oracles without them: the same models with plain linear layers in place
of the others.
"""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from fusion_bench_nufilt import FusionConfig, NufiltContinualMergingAlgorithm, fuse_layers
from fusion_bench_nufilt.continual import layerwise
from fusion_bench_nufilt.methods.options import TargetConfig
from fusion_bench_nufilt.models import select_layers
from fusion_bench_nufilt.models.architecture import Architecture
from fusion_bench_nufilt.models.layers import coverage, unsupported_modules, views
from fusion_bench_nufilt.models.model import ModelWeights
from fusion_bench_nufilt.models.source import module_source
from tests.families import CONVERTED, FAMILIES, OpenClipBlock, openclip
from tests.tiny_models import clip, finetuned, full_clip, tower

OPTIONS = {"null_rank": 3, "lora_rank": 4, "task_rank": 2, "max_steps": 5, "first_task": "release"}


def merge(base, tasks, target_modules):
    """Return the merged model."""
    models = {"_pretrained_": base} | {str(number): task for number, task in enumerate(tasks)}
    return NufiltContinualMergingAlgorithm(
        **OPTIONS, shuffle_order=False, target_modules=target_modules
    ).run(models)


def merged_as_linear(name, weights):
    """Return what the stream gives for a plain matrix of the same name; ``weights`` are the base's
    and the tasks'.
    """
    base, *tasks = [{name: weight.contiguous()} for weight in weights]
    config = FusionConfig(**OPTIONS)
    merged = base
    for step, task in enumerate(tasks, 1):
        merged, _ = fuse_layers(base, merged, task, config, seed=42, step=step)
    return merged[name]


def stream(module):
    """Return a base with the module in a block, and two tasks."""
    torch.manual_seed(1)
    base = nn.ModuleDict({"blocks": nn.ModuleList([module])})
    for parameter in base.parameters():
        nn.init.normal_(parameter, std=0.3)
    return [base, finetuned(base, 1, 0.1), finetuned(base, 2, 0.1)]


def test_conv1d_is_the_linear_layer_with_the_transposed_weight():
    models = stream(Conv1D(10, 6))
    merged = merge(models[0], models[1:], "all-linear").blocks[0].weight
    expected = merged_as_linear("blocks.0", [model.blocks[0].weight.T for model in models])
    assert torch.equal(merged, expected.T)


@pytest.mark.parametrize("separate", [False, True], ids=["packed", "separate"])
def test_multihead_attention_is_three_linear_layers_and_its_output(separate):
    def rows(attention, letter):
        if separate:
            return getattr(attention, f"{letter}_proj_weight")
        return attention.in_proj_weight.chunk(3)["qkv".index(letter)]

    sizes = {}
    name = "blocks.0.in_proj.{}"
    if separate:
        sizes = {"kdim": 6, "vdim": 7}
        name = "blocks.0.{}_proj"
    models = stream(nn.MultiheadAttention(8, 2, **sizes))
    merged = merge(models[0], models[1:], "all-linear").blocks[0]
    for letter in "qkv":
        weights = [rows(model.blocks[0], letter) for model in models]
        expected = merged_as_linear(name.format(letter), weights)
        assert torch.equal(rows(merged, letter), expected)
    out = [model.blocks[0].out_proj.weight for model in models]
    assert torch.equal(merged.out_proj.weight, merged_as_linear("blocks.0.out_proj", out))


@pytest.mark.parametrize(
    ("kind", "size"),
    [(nn.Conv1d, (3,)), (nn.Conv2d, (1, 1)), (nn.Conv2d, (3, 2)), (nn.Conv3d, (2, 1, 2))],
)
def test_a_convolution_is_the_linear_layer_on_its_unfolded_input(kind, size):
    models = stream(kind(4, 6, size))
    merged = merge(models[0], models[1:], ["blocks.0"]).blocks[0]
    expected = merged_as_linear("blocks.0", [model.blocks[0].weight.flatten(1) for model in models])
    assert torch.equal(merged.weight.flatten(1), expected)
    if kind is nn.Conv2d:  # the matrix acts on patches as the convolution does on the picture
        picture = torch.randn(1, 4, 5, 5)
        outputs = expected @ functional.unfold(picture, size)[0] + merged.bias[:, None]
        torch.testing.assert_close(outputs.flatten(), merged(picture).flatten())


def test_a_convolution_in_another_memory_format_gives_the_same():
    models = stream(nn.Conv2d(4, 6, 3))
    expected = merge(models[0], models[1:], ["0"]).blocks[0].weight
    last = [deepcopy(model).to(memory_format=torch.channels_last) for model in models]
    assert torch.equal(merge(last[0], last[1:], ["0"]).blocks[0].weight, expected)


class Experts(nn.Module):
    """Two fused experts in either orientation."""

    def __init__(self, transposed, inputs=5, hidden=3):
        super().__init__()
        shapes = [(2 * hidden, inputs), (inputs, hidden)]
        if transposed:
            shapes = [shape[::-1] for shape in shapes]
        self.gate_up_proj = nn.Parameter(torch.empty(2, *shapes[0]))
        self.down_proj = nn.Parameter(torch.empty(2, *shapes[1]))


@pytest.mark.parametrize("transposed", [False, True])
def test_each_fused_expert_is_merged_as_it_is_alone(transposed):
    models = stream(Experts(transposed))
    merged_model = merge(models[0], models[1:], "all-linear")
    for part in ("gate_up_proj", "down_proj"):
        for expert in range(2):
            weights = [getattr(model.blocks[0], part)[expert] for model in [*models, merged_model]]
            if transposed:
                weights = [weight.T for weight in weights]
            *alone, merged = weights
            expected = merged_as_linear(f"blocks.0.{expert}.{part}", alone)
            assert torch.equal(merged, expected)


@pytest.mark.parametrize("sizes", [(8, 8), (8, 4), (4, 8)])
def test_the_orientation_of_fused_experts_is_told_by_the_two_shapes(sizes):
    inputs, hidden = sizes
    shapes = {(2 * hidden, inputs), (inputs, hidden)}
    for transposed in (False, True):
        found = views(Experts(transposed, inputs, hidden))
        assert {view.transposed for view in found} == {transposed}
        assert {view.shape for view in found} == shapes


@pytest.mark.parametrize("make", [*FAMILIES.values(), openclip], ids=[*FAMILIES, "openclip"])
def test_what_is_written_through_a_view_is_read_again_and_nothing_else_changes(make):
    model = make()
    found = views(model)
    before = deepcopy(model.state_dict())
    values = {view.name: torch.full(view.shape, float(number)) for number, view in enumerate(found)}
    for view in found:
        assert view.read(model).shape == view.shape
        with torch.no_grad():
            view.write(model, values[view.name])
    assert all(torch.equal(view.read(model), values[view.name]) for view in found)
    touched = {id(model.get_parameter(view.key)) for view in found}
    for key, parameter in model.named_parameters():
        assert id(parameter) in touched or torch.equal(parameter, before[key])


# --- which are merged ---

PATTERNS = {
    "gpt2": {"c_attn", "c_fc", "c_proj"},
    "gpt_neox": {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
    "phi3": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
    "mixtral": {"q_proj", "k_proj", "v_proj", "o_proj", "gate", "w1", "w2", "w3"},
    "gpt_oss": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"},
    "resnet": {"convolution"},
    "convnext": {"pwconv1", "pwconv2", "1"},  # 1: the convolution that halves the picture
}


def has_any(name, words):
    return any(word in name for word in words)


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_is_every_projection_in_blocks_and_no_head_or_embedding(family):
    model = FAMILIES[family]()
    layers = select_layers(model)
    if family in PATTERNS and family not in CONVERTED:
        assert {name.rsplit(".", 1)[-1] for name in layers} == PATTERNS[family]
    heads = ("embed", "lm_head", "classifier", "score")
    assert not [name for name in layers if has_any(name, heads)]
    left_out = set(coverage(model, layers, TargetConfig()).left_out)
    assert all(has_any(name, ("dwconv", "router", "gate.weight")) for name in left_out)


def test_auto_in_openclip_is_attention_and_the_first_layer_of_the_mlp_as_in_clip():
    names = {name.split(".", 4)[-1] for name in select_layers(openclip())}
    attention = {"attn.in_proj.q", "attn.in_proj.k", "attn.in_proj.v", "attn.out_proj"}
    assert names == attention | {"mlp.c_fc"}


def test_patterns_see_the_module_and_its_parts():
    block = nn.ModuleDict({"block": OpenClipBlock(8)})
    assert list(select_layers(block, ["in_proj.q", "c_fc"])) == [
        "block.attn.in_proj.q",
        "block.mlp.c_fc",
    ]
    packed = [f"block.attn.in_proj.{part}" for part in "qkv"]
    assert list(select_layers(block, r"block\.attn")) == packed
    assert list(select_layers(block, ["attn"])) == packed
    assert "block.attn.in_proj.k" not in select_layers(block, "all-linear", ["in_proj.k"])


# --- what is said ---


def test_coverage_counts_parameters_and_elements_and_names_what_is_left_out():
    model = openclip()
    layers = select_layers(model)
    covered = coverage(model, layers, TargetConfig(other_params="mean"))
    merged = sum(view.shape[0] * view.shape[1] for view in layers.values())
    total = sum(parameter.numel() for parameter in model.parameters())
    assert covered.layers == 10
    assert covered.merged == (6, merged / total)
    assert covered.other_params == (len(list(model.parameters())) - 6, 1 - merged / total)
    assert covered.as_dict()["averaged"]["parameters"] == covered.other_params[0]
    assert covered.as_dict()["kept"] == {"parameters": 0, "share": 0.0}
    blocks = sum(parameter.numel() for parameter in model.visual.transformer.parameters())
    assert covered.merged_share_of_blocks == merged / blocks
    assert "mlp.c_proj.weight (2)" in str(covered)
    assert covered.warning is None


def test_auto_that_merges_less_than_half_of_the_blocks_warns():
    model = full_clip()  # whose text tower stays
    layers = select_layers(model)
    covered = coverage(model, layers, TargetConfig())
    assert covered.warning is not None
    assert "merges only 3" in covered.warning
    assert coverage(model, layers, TargetConfig(target_modules=["fc1"])).warning is None
    assert coverage(clip(), select_layers(clip()), TargetConfig()).warning is None


# --- what is refused ---


def test_a_grouped_convolution_that_is_named_is_refused_unless_it_is_left_out():
    model = FAMILIES["convnext"]()
    with pytest.raises(
        ValueError, match=r"dwconv.weight' of shape \(8, 1, 7, 7\) is a convolution in 8 groups"
    ):
        select_layers(model, ["dwconv"])
    with pytest.raises(ValueError, match="exclude_modules can leave it out"):
        select_layers(model, r".*stages\.0\..*")
    assert set(select_layers(model, r".*stages\.0\..*", ["dwconv"])) == {
        f"convnext.encoder.stages.0.layers.0.pwconv{number}" for number in (1, 2)
    }


def test_a_parameter_that_no_view_understands_is_refused_where_it_is_named():
    model = nn.ModuleDict({"experts": nn.Module(), "proj": nn.Linear(3, 3)})
    model.experts.weight = nn.Parameter(torch.ones(4, 5, 6))
    with pytest.raises(
        ValueError, match=r"'experts.weight' of shape \(4, 5, 6\) of Module is no matrix or stack"
    ):
        select_layers(model, ["experts"])
    assert list(select_layers(model, "all-linear")) == ["proj"]
    uneven = Experts(transposed=True)
    uneven.down_proj = nn.Parameter(torch.ones(3, 3, 5))  # gate_up_proj has two experts
    assert views(uneven) == []
    assert has_any(unsupported_modules(uneven)[""], ("down_proj", "gate_up_proj"))


@pytest.mark.parametrize(
    ("target", "dtype"),
    [("auto", torch.uint8), ("all-linear", torch.int8), (["fc1"], torch.float8_e4m3fn)],
)
def test_quantised_modules_are_refused_by_name(target, dtype):
    model = clip()
    linear = tower(model).encoder.layers[1].mlp.fc1
    packed = torch.zeros(64 * 32, 1).to(dtype)  # as bitsandbytes packs it
    linear.weight = nn.Parameter(packed, requires_grad=False)
    with pytest.raises(
        ValueError, match=rf"layers.1.mlp.fc1.weight' .* is stored as {dtype}: quantised weights"
    ):
        select_layers(model, target)


# --- through the algorithm ---


def test_a_run_says_what_it_covers_and_warns_where_that_is_little(caplog):
    layerwise._warn_once.cache_clear()
    base = full_clip()  # of which auto takes the vision tower alone
    algorithm = NufiltContinualMergingAlgorithm(**OPTIONS)
    with caplog.at_level("INFO"):
        algorithm.run({"_pretrained_": base, "one": finetuned(base, 1)})
    assert "merging 10 layers in 10 parameters, " in caplog.text
    assert "text_model.encoder.layers.*.mlp.fc1.weight (2)" in caplog.text
    assert [r.levelname for r in caplog.records if "merges only" in r.message] == ["WARNING"]
    described = algorithm.describe()["coverage"]
    assert described["merged"]["parameters"] == 10
    assert described["kept"]["parameters"] == len(list(base.parameters())) - 10


def test_a_parameter_without_elements_holds_no_matrix():
    module = nn.Module()
    module.register_parameter("in_proj_weight", nn.Parameter(torch.empty(0, 4)))
    module.register_parameter("gate_up_proj", nn.Parameter(torch.empty(0, 4, 4)))
    module.register_parameter("down_proj", nn.Parameter(torch.empty(0, 2, 4)))
    assert views(module) == []


def test_a_source_that_was_split_is_split_alike_for_another_reader():
    model = nn.MultiheadAttention(8, 2)
    architecture = Architecture(model)
    source = module_source("attention", model)
    first = ModelWeights(source, architecture)
    again = ModelWeights(source, architecture)
    assert again.shapes == first.shapes
    for param, shape in again.shapes.items():
        assert again.source.read(param).shape == shape
