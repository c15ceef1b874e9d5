"""Folders under transformers 4 and 5, which have layers in other ways in the models that they make
of them.
"""

import os
import subprocess
from itertools import product

import pytest
import torch
from transformers import __version__

from tests.conftest import REPO
from tests.families import FAMILIES
from tests.merge.helpers import manifest, merge, same, save_stream, tensors, transpose_experts
from tests.released import released
from tests.tiny_models import full_clip, llava

pytestmark = pytest.mark.oldest

#: A layer that transformers 5 renames, or makes a part of another, and the number of layers in the
#: blocks.
LAYERS = {
    "mixtral": ("model.layers.0.block_sparse_moe.experts.0.w1", 2 * (4 + 1 + 3 * 3)),
    "granitemoe": ("model.layers.0.block_sparse_moe.input_linear.0", 2 * (4 + 1 + 2 * 3)),
    "deepseek_v2": ("model.layers.1.mlp.experts.0.gate_proj", 2 * 4 + 3 + 3 * 3 + 3),
    "vit": ("vit.encoder.layer.0.attention.attention.query", 2 * 6),
    "dinov2": ("dinov2.encoder.layer.0.attention.attention.query", 2 * 6),
    "llava": ("model.language_model.layers.0.self_attn.q_proj", 2 * 7),
    "clip": ("encoder.layers.0.self_attn.q_proj", 2 * 5),
}
EXPERTS = "model.language_model.layers.0.mlp.experts"
PROJECTIONS = ("gate_up_proj", "down_proj")
MAKE = {**FAMILIES, "llava": llava, "clip": full_clip}


@pytest.mark.parametrize("family", LAYERS)
def test_layers_have_the_names_and_shapes_of_transformers_4(tmp_path, family):
    models = save_stream(tmp_path, MAKE[family](), tasks=2)
    out = merge(tmp_path, ["task1", "task2"], other_params="mean")
    layer, count = LAYERS[family]
    assert layer in manifest(out)["layers"]
    assert len(manifest(out)["layers"]) == count
    result = tensors(out)
    shapes = {key: value.shape for key, value in result.items()}
    assert shapes == {key: value.shape for key, value in tensors(tmp_path / "base").items()}
    loaded, info = type(models["_pretrained_"]).from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded.save_pretrained(tmp_path / "again")
    assert same(tensors(tmp_path / "again"), result)


@pytest.fixture
def released_experts(tmp_path):
    """Models with their experts as those of Qwen3-VL-MoE were released, and in `saved` as
    transformers 5 saves them.
    """
    if __version__ < "5":
        pytest.skip("transformers 4 knows the released form only")
    models = save_stream(tmp_path, released("Qwen3-VL-MoE"), tasks=2, shards="5GB")
    kind = type(models["_pretrained_"])
    for name in ("base", "task1", "task2"):
        transpose_experts(tmp_path / name)
        kind.from_pretrained(tmp_path / name).save_pretrained(tmp_path / "saved" / name)
    return tmp_path


def test_experts_are_merged_alike_as_released_and_as_transformers_5_saves_them(released_experts):
    """Experts of Qwen3-VL-MoE were released transposed, and transformers 5 saves them as it holds
    them.
    """
    out = merge(released_experts, ["task1", "task2"])
    other = merge(released_experts / "saved", ["task1", "task2"])
    layers = {f"{EXPERTS}.{i}.{name}" for i, name in product(range(4), PROJECTIONS)}
    assert manifest(out)["layers"].keys() > layers
    experts = {key for key in tensors(other) if key.startswith(EXPERTS)}
    assert tensors(out)[f"{EXPERTS}.down_proj"].shape == (4, 24, 32)
    assert tensors(other)[f"{EXPERTS}.down_proj"].shape == (4, 32, 24)
    for key in experts:
        torch.testing.assert_close(tensors(out)[key].mT, tensors(other)[key])
        assert not torch.equal(
            tensors(other)[key], tensors(released_experts / "saved" / "base")[key]
        )


def test_experts_that_only_one_model_has_transposed_are_refused_with_the_remedy(released_experts):
    transpose_experts(released_experts / "base")
    with pytest.raises(
        ValueError, match=r"task1', tensor '.*proj': .*: load the other model .* save it again"
    ):
        merge(released_experts, ["task1"])


# A LLaVA that transformers 5 saves without having loaded it lacks a prefix that transformers 4
# looks for.
BOTH = [*sorted(LAYERS.keys() - {"llava"}), "gpt_oss", "gpt2", "bert"]
MERGES = """
import sys
from pathlib import Path
from tests.merge.helpers import merge

for folder in map(Path, sys.argv[1:]):
    merge(folder, ["task1", "task2"], "there", other_params="mean")
    merge(folder, ["task2"], "second", merged="first", other_params="mean")
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Folders by family, merged here and with the other version of transformers."""
    python = os.environ.get("NUFILT_OTHER_PYTHON")
    if not python:
        pytest.skip("NUFILT_OTHER_PYTHON names no interpreter with another version of transformers")
    folders = {family: tmp_path_factory.mktemp(family) for family in BOTH}
    for family, folder in folders.items():
        save_stream(folder, MAKE[family](), tasks=2)
        merge(folder, ["task1", "task2"], "here", other_params="mean")
        merge(folder, ["task1"], "first", other_params="mean")
    command = [python, "-c", MERGES, *map(str, folders.values())]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folders


@pytest.mark.parametrize("family", BOTH)
def test_both_versions_give_the_same_bits_also_where_one_goes_on_from_the_other(family, both):
    here = tensors(both[family] / "here")
    assert same(tensors(both[family] / "there"), here)
    assert same(tensors(both[family] / "second"), here)
