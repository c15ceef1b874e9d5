"""The choice of the layers that are merged, and what happens to the rest."""

import logging
import re

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn

from fusion_bench_nufilt.methods.options import TargetConfig
from fusion_bench_nufilt.models import select_layers
from fusion_bench_nufilt.models.architecture import from_names
from fusion_bench_nufilt.utils.tensors import TensorInfo
from tests.released import released
from tests.tiny_models import TOWER, Shared, clip, llama, llava, t5, tower

pytestmark = pytest.mark.oldest


def names(model, *args):
    return [view.name for view in select_layers(model, *args).values()]


def keys(model, *args):
    return [view.key for view in select_layers(model, *args).values()]


ATTENTION = "k_proj out_proj q_proj v_proj"
T5 = "k o q v wi_0 wi_1 wo"


@pytest.mark.parametrize(
    ("make", "args", "count", "ends"),
    [
        (clip, [], 2 * 5, f"fc1 {ATTENTION}"),
        (clip, [["q_proj", "mlp.fc1"]], 2 * 2, "fc1 q_proj"),
        (clip, ["all-linear"], 2 * 6, f"fc1 fc2 {ATTENTION}"),
        (clip, [["1.mlp.fc2", "fc1"]], 1 + 2, "fc1 fc2"),
        (clip, ["auto", ["fc1"]], 2 * 4, ATTENTION),
        (clip, ["auto", r".*layers\.0.*"], 5, f"fc1 {ATTENTION}"),
        (t5, [], 2 * (4 + 3) + 2 * (4 + 4 + 3), T5),
        (t5, [r".*(SelfAttention|EncDecAttention|DenseReluDense).*"], 36, T5),
        (t5, ["all-linear"], 36, T5),  # without the head, as in peft
        (t5, [["q"]], 2 + 2 * 2, "q"),
        (
            llama,
            ["auto", ["up_proj", "self_attn.o_proj"]],
            2 * 5,
            "q_proj k_proj v_proj gate_proj down_proj",
        ),
    ],
)
def test_what_is_chosen_by_name(make, args, count, ends):
    found = names(make(), *args)
    assert len(found) == count
    assert {name.rsplit(".", 1)[-1] for name in found} == set(ends.split())


def test_auto_is_every_projection_of_a_decoder_and_says_so(caplog):
    with caplog.at_level(logging.INFO):
        ends = {name.rsplit(".", 1)[-1] for name in names(llama())}
    assert ends == {"down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"}
    assert "target_modules=auto: transformer, 14 layers" in caplog.text


def test_auto_is_the_projections_of_a_vision_language_model_s_language_model_and_says_so(caplog):
    with caplog.at_level(logging.INFO):
        assert len(names(llava())) == 14
    assert all(name.startswith("model.language_model.layers.") for name in names(llava()))
    assert "vision tower and projector count as other parameters" in caplog.text


def test_auto_finds_the_language_model_also_where_the_model_does_not_name_it():
    """LLaVA's original code has `model.layers` beside `model.vision_tower`."""
    model = nn.ModuleDict({"model": llama().model})
    model.model.vision_tower = clip()
    model.model.mm_projector = nn.Sequential(nn.Linear(4, 4))
    assert len(names(model)) == 14
    assert all(name.startswith("model.layers.") for name in names(model))


@pytest.mark.parametrize(("family", "count"), [("SmolVLM", 14), ("Phi-4-multimodal", 8)])
def test_auto_finds_the_language_model_beside_an_encoder_named_as_clip_s(family, count):
    found = names(released(family))
    assert len(found) == count
    assert all(re.match(r"model\.(text_model\.)?layers\.", name) for name in found)


def test_a_string_is_one_regular_expression_for_the_whole_name():
    prefix = f"{TOWER}encoder.layers.0.mlp"
    assert names(clip(), r".*layers\.0\.mlp\.fc[12]") == [f"{prefix}.fc1", f"{prefix}.fc2"]
    with pytest.raises(ValueError, match="no layer"):
        select_layers(clip(), "fc1")


@pytest.mark.parametrize(
    "patterns",
    [
        ["q_proj"],
        ["0.mlp.gate_proj", "v_proj"],
        ["proj"],
        ["self_attn"],
        ["layers.0"],
        r".*q_proj",
        "q",
    ],
)
def test_patterns_match_the_names_that_they_match_in_peft(patterns):
    """A part within a name, such as `proj` or `self_attn`, matches none; a list with such an entry
    is refused.
    """
    config = LoraConfig(target_modules=patterns)
    expected = [
        name for name in names(llama(), "all-linear") if check_target_module_exists(config, name)
    ]
    if expected:
        assert names(llama(), patterns) == expected
        rest = [name for name in names(llama()) if name not in expected]
        assert names(llama(), "auto", patterns) == rest
    else:
        with pytest.raises(ValueError, match="no layer"):
            names(llama(), patterns)


@pytest.mark.parametrize(
    ("model", "target", "exclude", "message"),
    [
        (
            clip(),
            ["q_proj", "gate"],
            None,
            r"'gate' of .* names no layer; .* '\.\*gate\.\*'; its layers: .*q_proj",
        ),
        (
            clip(),
            "nothing",
            None,
            "target_modules='nothing', .* leave no layer of CLIPVisionModel to merge",
        ),
        (clip(), "auto", "all-linear", "leave no layer"),
        (clip(), "auto", ["typo"], "'typo' of .* names no layer"),
        (
            Shared(),
            "auto",
            None,
            "this model is none: name its layers, or say all-linear; its layers: first",
        ),
        (nn.LayerNorm(3), "auto", None, "it has no layer"),
    ],
)
def test_a_target_that_matches_nothing_is_refused_and_told_what_there_is(
    model, target, exclude, message
):
    with pytest.raises(ValueError, match=message):
        select_layers(model, target, exclude)


def test_a_weight_shared_by_modules_comes_once():
    assert names(Shared(), "all-linear") == ["first", "head"]


def test_the_name_of_a_layer_does_not_depend_on_the_wrapper_of_a_clip_tower():
    layers = select_layers(nn.ModuleDict({"vision_model": tower(clip())}), ["fc1"])
    assert list(layers) == list(select_layers(tower(clip()), ["fc1"]))
    assert "encoder.layers.0.mlp.fc1" in layers


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("target_modules", ["", [], ["q_proj", 3], None]),
        ("exclude_modules", [[""]]),
        ("other_params", ["median"]),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(key, values):
    for value in values:
        with pytest.raises(ValueError, match=key):
            TargetConfig(**{key: value})


def test_what_is_named_as_an_output_head_in_a_block_is_a_layer():
    """As in an RWKV, whose layers are told by the names of its tensors."""
    layers = [f"blocks.{block}.att.{part}" for block in range(2) for part in ("key", "output")]
    info = TensorInfo("model.safetensors", "F32", (8, 8), 0, 256)
    told = from_names({f"{name}.weight": info for name in [*layers, "head"]})
    assert names(told, "all-linear") == [*layers, "head"]
    told = from_names({f"{name}.weight": info for name in [*layers, "output"]})
    assert names(told, "all-linear") == layers
