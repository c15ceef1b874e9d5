"""Folders that do not hold what is looked for, and what is said about them."""

import json
import shutil

import huggingface_hub
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from fusion_bench_nufilt.models.checkpoint import Checkpoint, folder_at_hand
from tests.docs import run_program
from tests.merge.helpers import merge, plan, same, save_stream, tensors
from tests.models.test_adapters import save_adapter
from tests.tiny_models import SMALL, llama


@pytest.fixture
def adapter(tmp_path):
    """A base and an adapter."""
    models = save_stream(tmp_path, llama(), tasks=1)
    save_adapter(tmp_path, models["_pretrained_"])
    return tmp_path / "adapter"


def refused(folder, task):
    with pytest.raises(ValueError, match=task) as error:
        plan(folder, [task])
    return str(error.value)


def test_a_pickled_adapter_is_refused_with_a_program_that_saves_it_anew(adapter):
    folder = adapter.parent
    file = adapter / "adapter_model.safetensors"
    expected = tensors(merge(folder, ["adapter"], "expected"))
    torch.save(load_file(file), adapter / "adapter_model.bin")
    file.unlink()
    assert "docs/troubleshooting.md#pickled-weights saves them" in refused(folder, "adapter")
    run_program("pickled-weights", adapter / "adapter_model.bin", file)
    assert same(tensors(merge(folder, ["adapter"])), expected)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_folder_with_a_whole_model_and_an_adapter_is_refused_as_either_may_be_meant(
    adapter, name
):
    (adapter / name).write_text("{}")
    text = refused(adapter.parent, "adapter")
    assert f"holds an adapter ('adapter_model.safetensors') and a whole model ('{name}')" in text


@pytest.mark.parametrize("of", ["task1", "adapter"])
def test_the_newest_checkpoint_in_a_trainers_folder_is_named(adapter, of):
    folder = adapter.parent
    for number in (9, 10):
        shutil.copytree(folder / of, folder / "trained" / f"checkpoint-{number}")
    for name in ("training_args.bin", "optimizer.pt"):
        (folder / "trained" / name).write_bytes(b"pickled")
    text = refused(folder, "trained")
    remedy = text.partition("no safetensors file, and '")[2].partition("' does: give that one")[0]
    assert remedy == str(folder / "trained" / "checkpoint-10")
    expected = tensors(merge(folder, [of], "expected"))
    assert same(tensors(merge(folder, [remedy])), expected)


def test_the_model_in_a_folder_is_named_whatever_its_own_folder_is_called(adapter):
    folder = adapter.parent / "trained" / "run [1]"
    shutil.copytree(adapter, folder)
    assert f"'{folder}' does: give that one" in refused(adapter.parent, "trained")


def test_what_a_trainer_saves_beside_weights_is_not_taken_for_weights(adapter):
    folder = adapter.parent
    (folder / "trained").mkdir()
    for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth", "scheduler.pt"):
        (folder / "trained" / name).write_bytes(b"pickled")
    assert refused(folder, "trained").endswith("trained' holds no safetensors file")


#: Where weights that were trained with an adapter may lie beside it.
BESIDE = [
    "non_lora_trainables.bin",
    "non_lora_state_dict.bin",
    "mm_projector.bin",
    "value_head.safetensors",
    "vit.safetensors",
    "embeddings.pt",
    "vision_tower/weights.safetensors",
]


@pytest.mark.parametrize("name", BESIDE)
def test_weights_beside_an_adapter_are_refused_by_name_and_merged_without_them(adapter, name):
    expected = tensors(merge(adapter.parent, ["adapter"], "expected"))
    path = adapter / name
    path.parent.mkdir(exist_ok=True)
    save_file({"a": torch.ones(1)}, path)
    text = refused(adapter.parent, "adapter")
    assert f"adapter' has '{name}' beside it, which is no part of the adapter" in text
    assert "weights that do not belong to it must lie elsewhere" in text
    path.rename(adapter.parent / path.name)
    assert same(tensors(merge(adapter.parent, ["adapter"])), expected)


@pytest.mark.parametrize("name", ["vit.safetensors", "consolidated.safetensors", "extra.pt"])
def test_weights_beside_a_model_that_are_not_read_are_named(adapter, name):
    save_file({"a": torch.ones(1)}, adapter.parent / "task1" / name)
    (text,) = plan(adapter.parent, ["task1"]).warnings
    assert text.endswith(f"task1' has '{name}' beside its weights: not read")


#: What training and transformers leave beside weights, which is none of the model's.
LEFT = ["optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_0.pth", "training_args.bin"]
LEFT += ["scaler.pt", "optimizer.bin", "random_states_0.pkl", "sampler_1.bin"]
LEFT += ["custom_checkpoint_0.pkl", "dl_state_dict.bin"]
LEFT += ["checkpoint-10/adapter_model.safetensors", "global_step10/mp_rank_00_model_states.pt"]


COPIES = {"adapter": "adapter_model.bin", "task1": "pytorch_model.bin"}


@pytest.mark.parametrize("task", COPIES)
def test_what_training_leaves_beside_weights_and_older_copies_are_not_said(adapter, task):
    for name in [*LEFT, COPIES[task]]:
        path = adapter.parent / task / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"left")
    other = adapter / "other"  # as peft saves a second adapter of a model
    shutil.copytree(adapter, other, ignore=shutil.ignore_patterns("other", "checkpoint*"))
    assert plan(adapter.parent, [task]).warnings == []


def test_numbers_in_a_configuration_that_no_tensor_bears_out_are_no_reason_to_refuse(tmp_path):
    # Doge has 16384 experts by default, and uses none of them.
    size = {**SMALL, "vocab_size": 50, "max_position_embeddings": 64}
    torch.manual_seed(0)
    save_stream(tmp_path, hf.DogeForCausalLM(hf.DogeConfig(**size)), tasks=1)
    assert plan(tmp_path, ["task1"]).architecture.known_from == "DogeForCausalLM"


@pytest.mark.parametrize("fields", [{"num_labels": 1e8}, {"num_labels": -1}, {"id2label": ["a"]}])
def test_labels_that_are_none_are_named(tmp_path, fields):
    save_file({"weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"is damaged, field '(num_labels|id2label)'"):
        Checkpoint.open(str(tmp_path)).config  # noqa: B018


def test_a_config_is_at_hand_in_its_folder_or_in_the_hubs_cache_at_its_revision(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--base"
    snapshots = {}
    for revision in ("main", "v1"):
        snapshots[revision] = repository / "snapshots" / f"commit-{revision}"
        snapshots[revision].mkdir(parents=True)
        (snapshots[revision] / "config.json").write_text("{}")
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(f"commit-{revision}")
    assert folder_at_hand("owner/base") == snapshots["main"]
    assert folder_at_hand("owner/base", "v1") == snapshots["v1"]
    assert folder_at_hand(str(snapshots["v1"])) == snapshots["v1"]
    for name in ("", "owner/other", "owner/base@v1", "no name: of any", "x" * 300, str(tmp_path)):
        assert folder_at_hand(name) is None
