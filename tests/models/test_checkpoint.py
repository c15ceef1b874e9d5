"""Folders that do not hold what is looked for, and what is said about them."""

import shlex
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.merge.helpers import merge, plan, same, save_stream, tensors
from tests.models.test_adapters import save_adapter
from tests.tiny_models import llama


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


def test_a_pickled_adapter_is_refused_with_the_command_that_converts_it(adapter):
    folder = adapter.parent
    file = adapter / "adapter_model.safetensors"
    expected = tensors(merge(folder, ["adapter"], "expected"))
    torch.save(load_file(file), adapter / "adapter_model.bin")
    file.unlink()
    text = refused(folder, "adapter")
    program, option, code = shlex.split(text.rpartition("convert them with: ")[2])
    assert (program, option) == ("python", "-c")
    exec(code, {})
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


def test_what_a_trainer_saves_beside_weights_is_not_taken_for_weights(adapter):
    folder = adapter.parent
    (folder / "trained").mkdir()
    for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth", "scheduler.pt"):
        (folder / "trained" / name).write_bytes(b"pickled")
    assert refused(folder, "trained").endswith("trained' holds no safetensors file")
