"""FP8 checkpoints are merged as the same models dequantised by hand are, and no other quantisation
is touched.
"""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fusion_bench_nufilt.merge.kept_state import KeptState
from fusion_bench_nufilt.merge.layer_jobs import task_strengths
from fusion_bench_nufilt.models.checkpoint import Checkpoint
from tests.families import FAMILIES
from tests.merge.helpers import (
    change,
    change_json,
    merge,
    plan,
    same,
    save_stream,
    tensors,
)
from tests.models.test_adapters import save_adapter, save_all
from tests.tiny_models import llama

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest value of FP8
LAYERS = r"model\.layers\..*_proj\.weight"
UP = "model.layers.0.mlp.up_proj.weight"
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
# The sides of a block, of which None is all; the name and the dtype of the scales; config.json.
SCHEMES = {
    "block": (
        (12, 20),
        "_scale_inv",
        torch.float32,
        {"quant_method": "fp8", "weight_block_size": [12, 20]},
    ),
    "row": ((1, None), "_scale", torch.bfloat16, COMPRESSED),
    "tensor": (
        (None, None),
        "_scale",
        torch.float32,
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
    "ModelOpt": (
        (None, None),
        "_scale",
        torch.float32,
        {"quant_method": "modelopt", "quant_algo": "FP8"},
    ),
    "compressed block": (
        (16, 16),
        "_scale",
        torch.float32,
        {
            **COMPRESSED,
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "block_structure": [16, 16]}}},
        },
    ),
}


def blocks(shape, sides):
    """Yield the place of each block's scale, and the rows and columns of the block."""
    height = sides[0] or shape[0]
    width = sides[1] or shape[1]
    for i in range(-(-shape[0] // height)):
        rows = slice(i * height, (i + 1) * height)
        for j in range(-(-shape[1] // width)):
            yield (i, j), (rows, slice(j * width, (j + 1) * width))


def by_hand(weight, sides, dtype):
    """FP8 and scales of a float32 matrix."""
    places = list(blocks(weight.shape, sides))
    last_place, _ = places[-1]
    stored = torch.empty(weight.shape, dtype=FP8)
    scales = torch.empty([number + 1 for number in last_place], dtype=dtype)
    for place, block in places:
        scales[place] = weight[block].abs().max() / LARGEST
        stored[block] = (weight[block] / scales[place].float()).clamp(-LARGEST, LARGEST).to(FP8)
    return stored, scales


def back_by_hand(stored, scales, sides):
    values = stored.float()
    for place, block in blocks(stored.shape, sides):
        values[block] *= scales[place].float()
    return values


def quantise(folder, scheme="block", layers=LAYERS):
    """Store a folder's layers in FP8; its copy `<name>_wide` has them dequantised to float32."""
    sides, suffix, dtype, config = SCHEMES[scheme]
    wide = folder.with_name(f"{folder.name}_wide")
    shutil.copytree(folder, wide)
    files = list(folder.glob("*.safetensors"))
    for file in files:
        state = load_file(file)
        copy = load_file(file)
        for key in [key for key in state if re.fullmatch(layers, key)]:
            state[key], scales = by_hand(state[key].float(), sides, dtype)
            copy[key] = back_by_hand(state[key], scales, sides)
            if sides == (None, None):
                scales = scales.reshape(())
            state[key + suffix] = scales
        save_file(state, file, metadata={"format": "pt"})
        save_file(copy, wide / file.name, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = {}
        for file in files:
            weight_map |= dict.fromkeys(load_file(file), file.name)
        index.write_text(json.dumps({"weight_map": weight_map}))
    change_json(folder / "config.json", quantization_config=config)


@pytest.fixture
def stream(tmp_path):
    """A base in FP8, in several files, with two tasks in bfloat16."""
    save_stream(tmp_path, llama(), tasks=2, dtype=torch.bfloat16)
    quantise(tmp_path / "base")
    return tmp_path


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("method", ["nufilt", "spectral"])
def test_fp8_is_merged_to_the_bits_of_models_dequantised_by_hand(stream, scheme, method):
    quantise(stream / "task1", scheme)
    options = {"method": method, "other_params": "mean"}
    wide = tensors(merge(stream, ["task1_wide", "task2"], "wide", base="base_wide", **options))
    out = merge(stream, ["task1", "task2"], **options)
    assert same(tensors(out), {key: value.bfloat16() for key, value in wide.items()})


@pytest.mark.parametrize("scheme", SCHEMES)
def test_elements_may_begin_and_end_inside_a_block(tmp_path, scheme):
    save_stream(tmp_path, llama(), tasks=1)
    quantise(tmp_path / "base", scheme)
    checkpoint = Checkpoint.open(str(tmp_path / "base"))
    expected = tensors(tmp_path / "base_wide")[UP].flatten()
    for start, stop in [(0, 5), (70, 75), (13 * 32 + 3, 25 * 32 + 1), (1000, len(expected))]:
        assert torch.equal(checkpoint.elements(UP, start, stop), expected[start:stop])


def test_the_result_is_a_plain_model_in_bfloat16(stream):
    planned = plan(stream, ["task1"])
    assert planned.architecture.known_from == "LlamaForCausalLM"
    out = merge(stream, ["task1"])
    found = tensors(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert found.keys() == tensors(stream / "task1").keys()
    assert same(found, {key: value for key, value in model.state_dict().items() if key in found})
    assert model.dtype == torch.bfloat16
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    index = json.loads((out / "model.safetensors.index.json").read_text())
    file_names = {}
    for file in out.glob("*.safetensors"):
        file_names |= dict.fromkeys(load_file(file), file.name)
    assert index["weight_map"] == file_names
    size = sum(value.nbytes for value in found.values())
    assert index["metadata"]["total_size"] == planned.disk_bytes == size


def test_an_adapter_on_an_fp8_base_is_merged_as_on_the_base_dequantised_by_hand(tmp_path):
    models = save_stream(tmp_path, llama(), tasks=1, dtype=torch.bfloat16)
    save_adapter(tmp_path, models["_pretrained_"])
    quantise(tmp_path / "base")
    wide = tensors(merge(tmp_path, ["task1", "adapter"], "wide", base="base_wide"))
    found = tensors(merge(tmp_path, ["task1", "adapter"]))
    assert same(found, {key: value.bfloat16() for key, value in wide.items()})


def test_one_by_one_with_float32_layers_kept_is_the_stream_at_once(stream):
    settings = {"state": True}
    at_once = merge(stream, ["task1", "task2"], "at_once", settings=settings)
    merge(stream, ["task1"], "one", settings=settings)
    two = merge(stream, ["task2"], "two", merged="one", settings=settings)
    assert same(tensors(two), tensors(at_once))
    change(stream / "one", UP, lambda value: value.float().mul(0.5).to(value.dtype))
    with pytest.raises(ValueError, match="does not belong to the weights beside it"):
        merge(stream, ["task2"], "three", merged="one", settings={**settings, "verify": False})


def test_fused_experts_in_fp8_have_scales_of_their_own(tmp_path):
    save_stream(tmp_path, FAMILIES["gpt_oss"](), tasks=1)
    key = "model.layers.1.mlp.experts.down_proj"
    scale = f"{key}_scale_inv"
    file = tmp_path / "base" / "model.safetensors"
    state = tensors(tmp_path / "base")
    for path in (tmp_path / "base").glob("model*"):
        path.unlink()
    shutil.copytree(tmp_path / "base", tmp_path / "wide")
    experts = [by_hand(expert, (20, 12), torch.float32) for expert in state[key]]
    by_expert = [back_by_hand(*expert, (20, 12)) for expert in experts]
    save_file({**state, key: torch.stack(by_expert)}, tmp_path / "wide" / file.name)
    state[key], state[scale] = map(torch.stack, zip(*experts, strict=True))
    save_file(state, file)
    change_json(
        tmp_path / "base" / "config.json", quantization_config={"weight_block_size": [20, 12]}
    )
    wide = tensors(merge(tmp_path, ["task1"], "reference", base="wide"))
    assert torch.equal(tensors(merge(tmp_path, ["task1"], "plain"))[key], wide[key].bfloat16())
    save_file({**state, scale: torch.ones(1)}, file)  # one scale for all experts
    merge(tmp_path, ["task1"], "shared")
    save_file({**state, scale: torch.ones(3, 5)}, file)
    refuse(
        tmp_path,
        rf"base', tensor '{key}' of shape \(3, 64, 32\): "
        r"no blocks .* have scales of shape \(3, 5\)",
    )


def test_other_tensors_are_dequantised_and_scales_of_activations_dropped(stream):
    path = next(file for file in (stream / "base").glob("*.safetensors") if UP in load_file(file))
    save_file({**load_file(path), UP.replace("weight", "input_scale"): torch.ones(())}, path)
    found = tensors(merge(stream, ["task1"], target_modules=["q_proj"]))
    assert found.keys() == tensors(stream / "task1").keys()
    assert torch.equal(found[UP], tensors(stream / "base_wide")[UP].bfloat16())


def test_nothing_that_describes_a_quantisation_stays_beside_a_result_without_it(tmp_path):
    save_stream(tmp_path, llama(), tasks=1, dtype=torch.bfloat16, shards="1GB")
    base = tmp_path / "base"
    quantise(base, "ModelOpt")
    expected = merge(tmp_path, ["task1"], "expected")
    # As ModelOpt wrote it up to 0.29: beside the config, which has nothing of it.
    change_json(base / "config.json", quantization_config=None)
    of_modelopt = {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    }
    text = json.dumps({"producer": {"name": "modelopt"}, "quantization": of_modelopt})
    (base / "hf_quant_config.json").write_text(text)
    for name in ("quantize_config.json", "quant_config.json"):  # of GPTQ and AWQ, left behind
        (base / name).write_text("{}")
    file = base / "model.safetensors"
    attention = UP.replace("mlp.up_proj.weight", "self_attn")
    names = ["k_proj.k_scale", "v_proj.v_scale", "k_scale", "k_proj.output_scale"]
    scales = {f"{attention}.{name}": torch.ones(()) for name in names}
    save_file({**load_file(file), **scales}, file, metadata={"format": "pt"})
    out = merge(tmp_path, ["task1"], "of_weights")
    assert same(tensors(out), tensors(expected))
    assert not list(out.glob("*quant*"))
    # Of the cache alone, beside weights that are not quantised.
    shutil.copy(base / "hf_quant_config.json", tmp_path / "base_wide")
    change_json(
        tmp_path / "base_wide" / "hf_quant_config.json",
        quantization={**of_modelopt, "quant_algo": None},
    )
    wide = tmp_path / "base_wide" / "model.safetensors"
    save_file({**load_file(wide), **scales}, wide, metadata={"format": "pt"})
    out = merge(tmp_path, ["task1"], "of_cache", base="base_wide")
    assert tensors(out).keys() == tensors(expected).keys()
    assert not list(out.glob("*quant*"))
    of_modelopt["quant_algo"] = "NVFP4"
    change_json(base / "hf_quant_config.json", quantization=of_modelopt)
    refuse(tmp_path, r"base' is quantised by ModelOpt's NVFP4, and only FP8 and MXFP4")


def refuse(folder, message, tasks=("task1",), **options):
    with pytest.raises(ValueError, match=message):
        merge(folder, tasks, **options)
    assert not (folder / "out").exists()


def test_fp8_that_does_not_fit_its_scales_is_refused_by_name(stream):
    what = rf"base', tensor '{UP}'"
    quantise(stream / "task2", "tensor")
    change(stream / "task2", f"{UP}_scale", lambda scale: None)
    refuse(
        stream,
        rf"task2', tensor '{UP}' is stored as F8_E4M3: quantised weights can't be merged",
        ["task2"],
    )
    change(stream / "base", f"{UP}_scale_inv", lambda scale: scale.fill_(torch.nan))
    refuse(stream, f"{what} has NaN or infinite values")
    change(stream / "base", f"{UP}_scale_inv", lambda scale: scale[1:].contiguous())
    shapes = r"of shape \(64, 32\): no blocks of \(12, 20\) have scales of shape \(5, 2\)"
    refuse(stream, f"{what} {shapes}")
    change(stream / "base", f"{UP}_scale_inv", lambda scale: scale.to(torch.uint8))
    refuse(stream, rf"{what}: its scales '{UP}_scale_inv' are stored as U8")


@pytest.mark.parametrize(
    ("name", "config", "tensor"),
    [
        ("gptq", {"quant_method": "gptq", "bits": 4}, None),
        ("awq", {"quant_method": "awq"}, None),
        ("bitsandbytes", {"quant_method": "bitsandbytes"}, None),
        (
            "compressed-tensors in the format pack-quantized",
            {**COMPRESSED, "format": "pack-quantized"},
            None,
        ),
        ("GPTQ or AWQ", None, "model.layers.0.mlp.up_proj.qweight"),
        ("bitsandbytes", None, f"{UP}.absmax"),
    ],
)
def test_other_quantisations_are_refused_by_name(tmp_path, name, config, tensor):
    save_stream(tmp_path, llama(), tasks=1, shards="1GB")
    for model in ("task1", "base"):
        if tensor:
            path = tmp_path / model / "model.safetensors"
            state = load_file(path)
            save_file({**state, tensor: torch.zeros(3, dtype=torch.uint8)}, path)
        else:
            change_json(tmp_path / model / "config.json", quantization_config=config)
        refuse(
            tmp_path,
            rf"{model}' is quantised by {name}, and only FP8 and MXFP4 can be merged: "
            "name the model",
        )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_adapter_that_was_merged_and_stored_in_fp8_is_still_an_adapter(tmp_path, scheme):
    """What FP8 has rounded is none of its directions, though it is read in float32."""
    save_all(tmp_path, llama())
    quantise(tmp_path / "task9", scheme)
    assert task_strengths(KeptState(plan(tmp_path, ["task9"], method="best"))) == [0.5]
