"""MXFP4 checkpoints, which gpt-oss has, are read as transformers reads them, and merged as the
bfloat16 model is.
"""

import itertools
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fusion_bench_nufilt.models.checkpoint import Checkpoint
from fusion_bench_nufilt.models.quantised import Mxfp4Tensor, decode_mxfp4
from tests.families import FAMILIES
from tests.merge.helpers import (
    change,
    change_json,
    manifest,
    merge,
    plan,
    same,
    save_stream,
    tensors,
)
from tests.tiny_models import llama

DOWN = "model.layers.1.mlp.experts.down_proj"
EXPERTS = ("gate_up_proj", "down_proj")
CODES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def by_transformers(blocks, scales):
    return pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors(
        blocks, scales
    )


def by_hand(weight):
    """Blocks and scales of a stack of matrices ``(experts, inputs, outputs)``."""
    tiles = weight.float().transpose(1, 2).unflatten(2, (-1, 32))
    exponents = tiles.abs().amax(-1, keepdim=True).log2().floor() - 2  # the largest code is 6
    distances = ((tiles / 2**exponents).unsqueeze(-1) - torch.tensor(CODES)).abs()
    codes = distances.argmin(-1).to(torch.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4  # two codes of 4 bits in a byte
    scales = (exponents[..., 0] + 127).to(torch.uint8)
    return blocks, scales


def quantise(folder):
    """Store a folder's experts in MXFP4; its copy `<name>_wide` has their values in bfloat16."""
    state = tensors(folder)
    wide = dict(state)
    for key in [key for key in state if key.endswith(EXPERTS)]:
        blocks, scales = by_hand(state.pop(key))
        state |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        wide[key] = by_transformers(blocks, scales)
    for path in folder.glob("model*"):
        path.unlink()
    other = folder.with_name(f"{folder.name}_wide")
    other.mkdir()
    other.joinpath("config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(wide, other / "model.safetensors", metadata={"format": "pt"})
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    change_json(
        folder / "config.json", quantization_config={"quant_method": "mxfp4"}, dtype="bfloat16"
    )


@pytest.fixture
def stream(tmp_path):
    """A base and a task in MXFP4, and a task in bfloat16."""
    save_stream(tmp_path, FAMILIES["gpt_oss"](), tasks=2, dtype=torch.bfloat16)
    quantise(tmp_path / "base")
    quantise(tmp_path / "task1")
    return tmp_path


def test_every_code_with_every_scale_is_decoded_to_the_bits_of_transformers():
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(2, 256, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8).reshape(1, 256, 1).expand(2, 256, 16)
    expected = by_transformers(blocks, scales)
    found = decode_mxfp4(blocks, scales)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    assert found[:, :, :252].isfinite().all()
    assert found[:, :, 0].abs().max() == 6 * 2.0**-127


@pytest.mark.parametrize("method", ["nufilt", "sum"])
def test_it_is_merged_to_the_bits_of_the_bfloat16_model(stream, method):
    options = {"method": method, "other_params": "mean"}
    expected = merge(stream, ["task1_wide", "task2"], "wide", base="base_wide", **options)
    assert same(tensors(merge(stream, ["task1", "task2"], **options)), tensors(expected))


def test_the_result_is_a_plain_bfloat16_model_that_later_merges_read(stream):
    out = merge(stream, ["task1"])
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert same(
        tensors(out),
        {key: value for key, value in model.state_dict().items() if key in tensors(out)},
    )
    assert tensors(out).keys() == tensors(stream / "task2").keys()
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    two = merge(stream, ["task2"], "two", merged="out")
    assert same(tensors(two), tensors(merge(stream, ["task1", "task2"], "both")))
    quantise(out)
    expected = merge(stream, ["task2"], "wide", merged="out_wide", settings={"step": 2})
    found = merge(stream, ["task2"], "again", merged="out", settings={"verify": False})
    assert same(tensors(found), tensors(expected))


def test_experts_outside_the_layers_keep_their_values_or_are_averaged(stream):
    kept = tensors(merge(stream, ["task1"], "kept", target_modules=["q_proj"]))
    assert torch.equal(kept[DOWN], tensors(stream / "base_wide")[DOWN])
    mean = tensors(merge(stream, ["task1"], "mean", target_modules=["q_proj"], other_params="mean"))
    assert torch.equal(mean[DOWN], tensors(stream / "task1_wide")[DOWN])


def test_one_expert_is_read_without_the_others(stream):
    checkpoint = Checkpoint.open(str(stream / "base"))
    file = checkpoint.opened["model.safetensors"]
    whole = checkpoint.read(DOWN)
    checkpoint.split({DOWN: [(0, 1), (1, 2), (2, 3)]})
    read = []
    read_bytes = file.read_bytes

    def counted(start, stop):
        read.append(stop - start)
        return read_bytes(start, stop)

    file.read_bytes = counted
    expert = checkpoint.read(f"{DOWN}[1:2]")
    assert torch.equal(expert, whole[1:2])
    assert sum(read) == 64 * 32 // 2 + 64
    assert torch.equal(checkpoint.elements(f"{DOWN}[2:3]", 40, 90), whole[2].flatten()[40:90])


def test_the_size_of_the_result_is_predicted(stream):
    planned = plan(stream, ["task1"])
    out = merge(stream, ["task1"])
    assert planned.disk_bytes == sum(value.nbytes for value in tensors(out).values())
    assert manifest(out)["tasks"] == ["task1"]


def refuse(folder, message, **options):
    with pytest.raises(ValueError, match=message):
        merge(folder, ["task1"], **options)
    assert not (folder / "out").exists()


def test_what_can_not_be_decoded_is_refused_by_name(stream):
    what = f"base', tensor '{DOWN}_blocks' U8"
    change(stream / "base", f"{DOWN}_scales", lambda scales: scales.fill_(255))
    refuse(stream, rf"base', tensor '{DOWN}\[0:1\]' has NaN or infinite values")
    change(stream / "base", f"{DOWN}_scales", lambda scales: scales[:, 1:].contiguous())
    refuse(
        stream,
        rf"{what} \(3, 32, 2, 16\) with '{DOWN}_scales' U8 \(3, 31, 2\): MXFP4 has U8 blocks",
    )
    change(stream / "base", f"{DOWN}_scales", lambda scales: None)
    refuse(stream, rf"{what} \(3, 32, 2, 16\) with no '{DOWN}_scales'")


@pytest.mark.parametrize("scaled", [False, True])
def test_tensors_that_are_only_named_like_blocks_are_tensors_like_others(tmp_path, scaled):
    save_stream(tmp_path, llama(), tasks=1, shards="1GB")
    named = {"extra_blocks": torch.ones(3, 4), "mask_blocks": torch.ones(3, dtype=torch.uint8)}
    if scaled:
        named |= {"extra_scales": torch.ones(3), "mask_scales": torch.ones(3, dtype=torch.uint8)}
    for name in ("base", "task1"):
        file = max((tmp_path / name).glob("*.safetensors"))
        save_file({**load_file(file), **named}, file, metadata={"format": "pt"})
    out = tensors(merge(tmp_path, ["task1"]))
    assert same({key: out[key] for key in named}, named)


def test_the_spacing_is_that_of_the_values_over_the_power_of_two_below_each():
    values = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    spacings = set()
    for value, following in itertools.pairwise(values):
        spacings.add((following - value) / 2 ** math.floor(math.log2(value)))
    assert spacings == {Mxfp4Tensor.eps}
