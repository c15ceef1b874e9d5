"""What lies beside the weights: the result has what the base's hub snapshot would have, and the
modules of sentence-transformers.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.merge.helpers import manifest, merge, plan, same, save_stream
from tests.tiny_models import llama

KEPT = [
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "source.spm",
    "chat_template.jinja",
    "additional_chat_templates/tool.jinja",
    "modeling_own.py",
    "LICENSE.md",
    "USE_POLICY.md",
]
LEFT = [
    ".env",
    ".gitattributes",
    "nohup.out",
    "notes.txt",
    "trainer_state.json",
    "eval_results.json",
    "training_args.bin",
    "optimizer.pt",
    "pytorch_model.bin.index.json",
    "events.out.tfevents.1",
    "runs/secret.json",
    "checkpoint-500/config.json",
]


def put(folder, name, content=b"{}"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_a_result_has_what_the_bases_hub_snapshot_would_have_and_nothing_else(tmp_path):
    save_stream(tmp_path, llama(), tasks=1, shards="1GB")
    before = {path.name for path in (tmp_path / "base").iterdir()}
    for name in [*KEPT, *LEFT]:
        put(tmp_path / "base", name)
    out = merge(tmp_path, ["task1"])
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert found == {*before, *KEPT, "nufilt.json", "README.md"}


def encoder(folder, scale=1.0):
    """Make a model that of sentence-transformers, with a pooling, a trained layer and a norm."""
    paths = ["", "1_Pooling", "2_Dense", "3_Normalize"]
    modules = [{"idx": idx, "name": str(idx), "path": path} for idx, path in enumerate(paths)]
    put(folder, "modules.json", json.dumps(modules).encode())
    put(folder, "config_sentence_transformers.json")
    put(folder, "1_Pooling/config.json", b'{"pooling_mode_cls_token": true}')
    put(folder, "2_Dense/config.json", b'{"in_features": 4, "out_features": 4}')
    weights = {"linear.weight": scale * torch.eye(4)}
    save_file(weights, folder / "2_Dense" / "model.safetensors", {"format": "pt"})


def test_the_modules_that_modules_json_names_are_in_the_result(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    encoder(tmp_path / "base")
    put(tmp_path / "base", "2_Dense/.env")
    put(tmp_path / "base", "4_Forgotten/config.json")
    out = merge(tmp_path, ["task1"])
    modules = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
    for name in ["modules.json", "config_sentence_transformers.json", *modules]:
        assert (out / name).read_bytes() == (tmp_path / "base" / name).read_bytes()
    found = {str(path.relative_to(out)) for path in out.rglob("*_*/*")}
    assert found == set(modules)
    assert set(modules) < manifest(out)["files"].keys()


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_modules_that_a_task_trained_are_named_since_the_result_has_the_bases(tmp_path, scale):
    save_stream(tmp_path, llama(), tasks=2)
    for folder in ("base", "task1"):
        encoder(tmp_path / folder)
    weights = tmp_path / "task1" / "2_Dense" / "model.safetensors"
    tensors = {key: scale * value for key, value in load_file(weights).items()}
    save_file(tensors, weights, {"another": "header"})
    out = merge(tmp_path, ["task1", "task2"])
    expected = []
    if scale != 1:
        expected = [
            "'task1' has other modules than the base, whose are kept: '2_Dense/model.safetensors'"
        ]
    assert manifest(out)["warnings"] == expected
    base = load_file(tmp_path / "base" / "2_Dense" / "model.safetensors")
    assert same(load_file(out / "2_Dense" / "model.safetensors"), base)


def test_modules_that_only_a_task_has_are_named(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    encoder(tmp_path / "task1")
    (warning,) = plan(tmp_path, ["task1"]).warnings
    assert "task1' has other modules than the base, whose are kept: '1_Pooling/config" in warning


@pytest.mark.parametrize("path", ["../task1", "/etc"])
def test_a_module_outside_the_folder_is_refused(tmp_path, path):
    save_stream(tmp_path, llama(), tasks=1)
    put(tmp_path / "base", "modules.json", json.dumps([{"path": path}]).encode())
    with pytest.raises(ValueError, match=rf"modules\.json' names '{path}', which is not in"):
        plan(tmp_path, ["task1"])


def test_a_module_with_pickled_weights_is_refused(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    encoder(tmp_path / "base")
    dense = tmp_path / "base" / "2_Dense"
    put(dense, "pytorch_model.bin")
    plan(tmp_path, ["task1"])
    (dense / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"2_Dense/pytorch_model.bin' holds pickled weights"):
        plan(tmp_path, ["task1"])
