"""Folders analysed layer by layer, whatever way their tensors hold the layers."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from fusion_bench_nufilt.analysis.folders import analyze_folders
from fusion_bench_nufilt.analysis.summary import reading, summarise
from fusion_bench_nufilt.merge import plan_merge
from fusion_bench_nufilt.methods.options import TargetConfig
from fusion_bench_nufilt.models import select_layers
from fusion_bench_nufilt.nufilt.subspace import top_right_singular_vectors
from tests.families import FAMILIES
from tests.tiny_models import finetuned, llama

RANK = 4


def analyse(folder, **targets):
    plan = plan_merge(
        str(folder / "base"),
        [str(folder / "one"), str(folder / "two")],
        targets=TargetConfig(**targets),
    )
    return analyze_folders(plan, RANK)


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss", "resnet"])
def test_task_vectors_are_those_of_the_layers_matrices(tmp_path, family):
    base = FAMILIES[family]()
    models = {"base": base, "one": finetuned(base, 1), "two": finetuned(base, 2)}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    found = analyse(tmp_path)
    views = select_layers(base)
    shapes = {name: tuple(shape) for name, shape in found.layers.items()}
    assert shapes == {name: view.shape for name, view in views.items()}
    norms = {(row["task"], row["layer"]): row["norm"] for row in found.vectors}
    overlaps = {
        (row["vector"], row["other_vector"], row["layer"]): row["overlap"] for row in found.overlaps
    }
    for name, view in views.items():
        one = view.read(models["one"]) - view.read(base)
        two = view.read(models["two"]) - view.read(base)
        assert norms["one", name] == pytest.approx(float(one.norm()), rel=1e-4)
        rank = min(RANK, *view.shape)
        V = top_right_singular_vectors(one[None], rank)[0]
        W = top_right_singular_vectors(two[None], rank)[0]
        overlap = float((V.mT @ W).square().sum()) / rank
        assert overlaps["one", "two", name] == pytest.approx(overlap, abs=1e-3)


def adapter(folder, layers, rank=4, sign=1):
    """An adapter of rank 4 with equal singular values, on layers of the tiny Llama."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(layers)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    factors = {}
    for module, (d_o, d_i) in layers.items():
        factors[f"base_model.model.{module}.lora_A.weight"] = torch.eye(rank, d_i)
        factors[f"base_model.model.{module}.lora_B.weight"] = sign * torch.eye(d_o, rank)
    save_file(factors, folder / "adapter_model.safetensors")


def test_layers_that_an_adapter_does_not_touch_do_not_count(tmp_path):
    base = llama()
    base.save_pretrained(tmp_path / "base")
    shapes = {name: view.shape for name, view in select_layers(base).items()}
    q_proj = {name: shape for name, shape in shapes.items() if name.endswith("q_proj")}
    v_proj = {name: shape for name, shape in shapes.items() if name.endswith("v_proj")}
    adapter(tmp_path / "one", q_proj)
    adapter(tmp_path / "two", q_proj, sign=-1)
    content = summarise(analyse(tmp_path, target_modules="auto"))
    for task in ("one", "two"):
        vector = content["vectors"][task]
        assert vector["layers"] == len(q_proj)
        assert vector["rank"] == 4
        assert vector["effective_rank"] == pytest.approx(4)
        assert vector["energy_in_top"] == pytest.approx(1)
    assert content["overlap"]["all"] == [[pytest.approx(1)] * 2] * 2
    assert content["chance"]["all"] == pytest.approx(4 / 32)
    assert [layer["name"] for layer in content["layers"]] == list(q_proj)
    first, second, *_ = reading(content)
    left_out = len(shapes) - len(q_proj)
    assert first.startswith(f"Of {len(shapes)} layers, {left_out} are changed by no task vector")
    assert f"share 1.00 of their top 4 directions on average over {len(q_proj)} layers" in second

    shutil.rmtree(tmp_path / "two")
    adapter(tmp_path / "two", v_proj)
    content = summarise(analyse(tmp_path))
    assert content["overlap"]["all"][0][1] is None
    assert "No two task vectors change the same layer, so that none collide." in reading(content)
