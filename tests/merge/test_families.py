"""Models of every family: through folders as through the algorithm, and known answers of the merged
model.
"""

from copy import deepcopy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fusion_bench_nufilt.models import select_layers
from fusion_bench_nufilt.utils.tensors import TensorFile
from tests.families import CONVERTED, FAMILIES, openclip, output
from tests.merge.helpers import (
    algorithm,
    change,
    change_json,
    manifest,
    merge,
    same,
    save_stream,
    tensors,
)
from tests.tiny_models import finetuned


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.oldest
def test_folders_give_the_algorithms_bits(tmp_path, family):
    if family in CONVERTED:
        pytest.skip("transformers 5 holds this family's layers in other ways than its checkpoints")
    models = save_stream(tmp_path, FAMILIES[family](), tasks=2)
    out = merge(tmp_path, ["task1", "task2"], other_params="mean")
    loaded = type(models["_pretrained_"]).from_pretrained(out)
    assert same(loaded.state_dict(), algorithm(models, other_params="mean").state_dict())


@torch.no_grad()
def change_outputs(model, layer, view, *, inputs, seed):
    """Add a task vector of rank one to a layer, which acts on one direction of its inputs only."""
    d_o, d_i = view.shape
    generator = torch.Generator().manual_seed(seed)
    direction = torch.zeros(d_i)
    direction[inputs] = 1.0
    tau = 0.1 * torch.outer(torch.randn(d_o, generator=generator), direction)
    view.write(model, view.read(model) + tau)


@pytest.mark.parametrize("make", [*FAMILIES.values(), openclip], ids=[*FAMILIES, "openclip"])
def test_a_task_in_the_null_space_of_the_first_leaves_what_the_first_does_unchanged(make):
    """Each layer of task 1 reads one input, that of task 2 another: the merged model is the sum of
    both.
    """
    base = make()
    one = deepcopy(base)
    two = deepcopy(base)
    both = deepcopy(base)
    for layer, view in select_layers(base).items():
        for model in (one, both):
            change_outputs(model, layer, view, inputs=0, seed=1)
        for model in (two, both):
            change_outputs(model, layer, view, inputs=1, seed=2)
    merged = algorithm({"_pretrained_": base, "one": one, "two": two}, lora_rank=0)
    expected = output(both)
    largest = float(expected.abs().max())
    torch.testing.assert_close(output(merged), expected, rtol=1e-3, atol=1e-4 * largest)
    assert not torch.allclose(output(one), expected, rtol=1e-3, atol=1e-3 * largest)
    for view in select_layers(base).values():
        # The input that task 1 reads.
        assert torch.allclose(view.read(merged)[:, 0], view.read(one)[:, 0], atol=1e-5)


def save_openclip(folder, dtype=torch.float32):
    """A checkpoint without config.json, as of a model that transformers does not know."""
    base = openclip().to(dtype)
    task1 = finetuned(base, 1, 0.002)
    task2 = finetuned(base, 2, 0.002)
    for name, model in {"base": base, "task1": task1, "task2": task2}.items():
        (folder / name).mkdir()
        save_file(model.state_dict(), folder / name / "model.safetensors")
    return {"_pretrained_": base, "task1": task1, "task2": task2}


def test_packed_projections_are_merged_in_folders_without_a_config(tmp_path):
    models = save_openclip(tmp_path)
    out = merge(tmp_path, ["task1", "task2"])
    assert same(tensors(out), algorithm(models).state_dict())
    assert "visual.transformer.resblocks.0.attn.in_proj.q" in manifest(out)["layers"]
    assert manifest(out)["coverage"]["left_out"] == {
        "visual.transformer.resblocks.*.mlp.c_proj.weight": 2
    }


def test_transposed_layers_are_told_by_a_shape_where_transformers_does_not_know_the_model(tmp_path):
    save_stream(tmp_path, FAMILIES["gpt2"](), tasks=2)
    expected = tensors(merge(tmp_path, ["task1", "task2"], "expected"))
    change_json(tmp_path / "base" / "config.json", architectures=["TheirOwnForCausalLM"])
    assert same(tensors(merge(tmp_path, ["task1", "task2"])), expected)


@pytest.mark.parametrize("other_params", ["pretrained", "mean"])
def test_a_part_of_a_parameter_is_merged_and_its_rest_is_an_other_parameter(tmp_path, other_params):
    models = save_openclip(tmp_path)
    options = {"target_modules": ["in_proj.v"], "other_params": other_params}
    result = tensors(merge(tmp_path, ["task1", "task2"], **options))
    assert same(result, algorithm(models, **options).state_dict())
    key = "visual.transformer.resblocks.0.attn.in_proj_weight"
    base, task1, task2 = [model.get_parameter(key)[:64] for model in models.values()]
    expected = base
    if other_params == "mean":
        expected = (task1 + task2) / 2
    torch.testing.assert_close(result[key][:64], expected)
    assert not torch.equal(result[key][64:], models["_pretrained_"].get_parameter(key)[64:])


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss"])
def test_one_by_one_in_bfloat16_with_float32_layers_kept_is_the_stream_at_once(tmp_path, family):
    save_stream(tmp_path, FAMILIES[family](), tasks=2, dtype=torch.bfloat16)
    settings = {"state": True}
    merge(tmp_path, ["task1"], "one", settings=settings)
    one_by_one = merge(tmp_path, ["task2"], "two", merged="one", settings=settings)
    at_once = merge(tmp_path, ["task1", "task2"], settings=settings)
    assert same(tensors(one_by_one), tensors(at_once))
    assert same(tensors(one_by_one / "nufilt_state"), tensors(at_once / "nufilt_state"))


def refuse(folder, message, tasks=("task1",), **options):
    with pytest.raises(ValueError, match=message):
        merge(folder, tasks, **options)
    assert not (folder / "out").exists()


def test_another_number_of_experts(tmp_path):
    models = save_stream(tmp_path, FAMILIES["gpt_oss"](), tasks=1)
    key = "model.layers.1.mlp.experts.down_proj"
    change(tmp_path / "task1", key, lambda value: value[:2])
    refuse(tmp_path, rf"task1', tensor '{key}': shape \(2, 64, 32\) differs from \(3, 64, 32\)")
    models["task1"].model.layers[1].mlp.experts.down_proj = nn.Parameter(torch.ones(2, 64, 32))
    message = rf"'task1', tensor '{key}': shape \(2, 64, 32\) differs .* \(3, 64, 32\)"
    with pytest.raises(ValueError, match=message):
        algorithm(models)


def test_a_base_whose_shape_its_config_denies(tmp_path):
    save_stream(tmp_path, FAMILIES["gpt_oss"](), tasks=1)
    change(tmp_path / "base", "model.layers.0.mlp.experts.gate_up_proj", lambda value: value[:2])
    refuse(
        tmp_path,
        r"'model.layers.0.mlp.experts.gate_up_proj': shape \(2, .* which its config.json promises",
    )


def test_fused_experts_are_read_and_written_one_by_one(tmp_path, monkeypatch):
    save_stream(tmp_path, FAMILIES["gpt_oss"](), tasks=1)
    sizes = []
    read = TensorFile.pieces

    def counted(self, bounds):
        for piece in read(self, bounds):
            sizes.append(len(piece))
            yield piece

    monkeypatch.setattr(TensorFile, "pieces", counted)
    expert = 4 * 32 * 2 * 64  # the bytes of its gate and up projection, in float32
    for targets in ("auto", ["q_proj"]):  # merged, and copied
        sizes.clear()
        merge(tmp_path, ["task1"], f"out{len(targets)}", target_modules=targets)
        assert max(sizes) == expert


NO_NAMES = (".", "..weight", "a..b.weight", "forward.weight", "training.a.weight")


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_tensor_whose_name_no_module_can_have_is_kept_as_the_base_has_it(tmp_path, caplog, name):
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for key in ("a.weight", "a.b.weight", name):
        weights[key] = torch.randn(8, 8, generator=generator)
    for folder in ("base", "task1", "task2"):
        (tmp_path / folder).mkdir()
        save_file(weights, tmp_path / folder / "model.safetensors")
        for key in weights:
            weights[key] = weights[key] + 0.01 * torch.randn(8, 8, generator=generator)
    merge(tmp_path, tasks=("task1", "task2"), target_modules="all-linear")
    result = tensors(tmp_path / "out")
    base = tensors(tmp_path / "base")
    assert torch.equal(result[name], base[name])
    for layer in ("a.weight", "a.b.weight"):  # the first of which comes second in the file
        assert not torch.equal(result[layer], base[layer])
    assert (f"tensor '{name}' is not merged as a layer" in caplog.text) == name.endswith(".weight")


def test_a_packed_projection_without_rows_is_copied_where_no_configuration_tells_the_layers(
    tmp_path,
):
    weights = {"attn.in_proj_weight": torch.empty(0, 8), "mlp.up.weight": torch.randn(8, 8)}
    for name, scale in (("base", 1.0), ("task1", 1.01)):
        (tmp_path / name).mkdir()
        scaled = {key: scale * value for key, value in weights.items()}
        save_file(scaled, tmp_path / name / "model.safetensors", {"format": "pt"})
    merged = tensors(merge(tmp_path, ["task1"], target_modules="all-linear"))
    assert merged["attn.in_proj_weight"].shape == (0, 8)
    assert not torch.equal(merged["mlp.up.weight"], weights["mlp.up.weight"])
