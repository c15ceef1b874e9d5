"""`best` gives a task the same strength in all layers, in whatever form the task comes."""

import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM

from fusion_bench_nufilt import LayerwiseMergingAlgorithm
from fusion_bench_nufilt.merge import strength
from fusion_bench_nufilt.merge.kept_state import KeptState
from fusion_bench_nufilt.merge.layer_jobs import task_strengths
from fusion_bench_nufilt.methods.order_free import Sum
from fusion_bench_nufilt.models import select_layers
from fusion_bench_nufilt.models.architecture import Architecture
from fusion_bench_nufilt.utils.tensors import TensorFile
from tests.families import FAMILIES
from tests.merge.helpers import STATE, change, hashes, interrupt, merge, plan, pool, same, tensors
from tests.models.test_adapters import save_all
from tests.tiny_models import llama

TASKS = ["task1", "task9"]


@pytest.fixture
def folder(tmp_path):
    """A base, a full model `task1`, an `adapter`, and `task9` with the adapter merged into it."""
    save_all(tmp_path, llama(tie_word_embeddings=False))
    return tmp_path


def strengths(folder, tasks):
    planned = plan(folder, tasks, method="best")
    return task_strengths(KeptState(planned))


def test_an_adapter_has_its_strength_as_an_adapter_and_merged_in_float32_and_in_bfloat16(folder):
    merged = LlamaForCausalLM.from_pretrained(folder / "task9", dtype=torch.bfloat16)
    merged.save_pretrained(folder / "task9_bfloat16")
    tasks = ["task1", "adapter", "task9", "task9_bfloat16"]
    assert strengths(folder, tasks) == [1.0, 0.5, 0.5, 0.5]


def weaken(folder, task, scale):
    """Save a task with its update times a scale, in bfloat16."""
    base = tensors(folder / "base")
    state = {}
    for key, value in tensors(folder / task).items():
        state[key] = base[key].float().lerp(value.float(), scale).bfloat16()
    save_file(state, folder / task / "model.safetensors", metadata={"format": "pt"})


def test_a_weak_adapter_that_was_merged_and_stored_in_bfloat16_is_still_an_adapter(folder):
    """Its tail is rounding: with it, a twentieth of the adapter would have most of the strength."""
    weaken(folder, "task9", 0.05)
    assert strengths(folder, ["task9"]) == [0.5]


def test_the_strength_of_a_task_does_not_depend_on_its_weight_in_the_merge(folder):
    planned = plan(folder, TASKS, method="best", settings={"weights": [0.3, 0.3]})
    assert task_strengths(KeptState(planned)) == [1.0, 0.5]


def test_the_state_has_the_strengths_of_the_tasks_that_moved_a_layer(folder):
    state = load_file(merge(folder, ["task1", "adapter"], method="best") / STATE)
    assert state["model.layers.0.self_attn.q_proj.state.strength"] == 1.5
    assert state["model.layers.0.self_attn.k_proj.state.strength"] == 1.0


def test_a_strength_has_the_same_bits_on_any_number_of_threads(tmp_path):
    """Where it is between that of an adapter and that of a full model, it has all its digits."""
    update = torch.randn(320, 8) @ torch.randn(8, 320) + 0.26 * torch.randn(320, 320)
    for name, scale in [("base", 0.0), ("task1", 0.001)]:
        weight = torch.ones(320, 320) + scale * update
        (tmp_path / name).mkdir()
        save_file({"up_proj.weight": weight}, tmp_path / name / "model.safetensors")
    before = torch.get_num_threads()
    found = set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.add(strengths(tmp_path, ["task1"])[0])
    torch.set_num_threads(before)
    (strength,) = found
    assert 0.5 < strength < 1.0


def test_all_threads_measure_the_strength_of_a_task(folder, monkeypatch):
    together = threading.Barrier(2)
    spectrum_of = strength._spectrum_of

    def measured(*args):
        together.wait(30)  # for one more thread, or it breaks
        return spectrum_of(*args)

    monkeypatch.setattr(strength, "_spectrum_of", measured)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        merge(folder, TASKS, method="best")
    finally:
        torch.set_num_threads(threads)


def test_a_layer_that_was_made_with_another_strength_is_made_again(folder):
    """The strength follows from all layers: the change of one is a change of all."""
    interrupt(folder, after=8, tasks=TASKS, method="best")
    key = "model.layers.1.mlp.up_proj.weight"
    change(folder / "task9", key, lambda value: value + 0.1 * torch.randn_like(value))
    assert strengths(folder, TASKS) == [1.0, 1.0]
    expected = hashes(merge(folder, TASKS, "expected", method="best"))
    assert hashes(merge(folder, TASKS, method="best")) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folders_give_the_bits_of_the_models_in_memory(tmp_path, dtype):
    """Also where updates are as small as rounding, which leaves two fifths of the weights as they
    are, and the base was published in bfloat16.
    """
    save_all(tmp_path, llama(tie_word_embeddings=False), dtype)
    if dtype == torch.bfloat16:
        weaken(tmp_path, "task1", 0.03)
        weaken(tmp_path, "task9", 0.01)
    assert strengths(tmp_path, TASKS) == [1.0, 0.5]
    names = {name: name for name in TASKS}
    models = pool(tmp_path, LlamaForCausalLM, dtype, _pretrained_="base", **names)
    algorithm = LayerwiseMergingAlgorithm("best", other_params="mean", shuffle_order=False)
    expected = algorithm.run(models)
    out = merge(tmp_path, TASKS, method="best")
    merged = LlamaForCausalLM.from_pretrained(out, dtype=dtype)
    assert same(merged.state_dict(), expected.state_dict())


@pytest.mark.parametrize("method", ["best", "spectral"])
def test_a_block_has_its_strength_whichever_other_blocks_are_merged(folder, method):
    """The ramp goes by the model's blocks."""
    options = {"method": method, "ramp": 0.4}
    whole = tensors(merge(folder, TASKS, "whole", **options))
    part = tensors(merge(folder, TASKS, "part", exclude_modules=r".*layers\.1.*", **options))
    first_block = [key for key in whole if ".layers.0." in key and "proj" in key]
    assert len(first_block) == 7
    for key in first_block:
        assert torch.equal(part[key], whole[key])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_eps_of_stored_values_is_that_of_their_dtype(tmp_path, dtype):
    save_file({"weight": torch.ones(2, 2, dtype=dtype)}, tmp_path / "model.safetensors")
    info = TensorFile(tmp_path / "model.safetensors").tensors["weight"]
    assert info.eps == torch.finfo(dtype).eps


def test_a_layer_whose_name_lacks_the_prefix_of_its_tensor_finds_its_stack_of_blocks():
    """The names of layers are those of transformers 5, which drops the prefix of a CLIP tower."""
    tower = nn.ModuleDict({"vision_model": nn.ModuleDict({"layers": nn.ModuleList()})})
    for _ in range(3):
        tower["vision_model"]["layers"].append(nn.ModuleDict({"fc": nn.Linear(4, 4)}))
    (first, *_) = select_layers(tower, ["1.fc"])
    last = Architecture(tower).last_blocks
    assert first == "layers.1.fc"
    assert Sum(Sum.Options(scale=0.3, ramp=0.4), [first], last_blocks=last).scale_of(first) == 0.3


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_in_a_block_finds_its_stack_in_the_model(family):
    model = FAMILIES[family]()
    layers = select_layers(model, "all-linear")
    method = Sum(Sum.Options(scale=0.3), list(layers), last_blocks=Architecture(model).last_blocks)
    assert {method.scale_of(layer) for layer in layers} == {0.3}
