"""Every method makes of adapters, as an adapter, what it makes of whole models on any base.

A method that is added to the table is tried by itself; the variants of NUFILT are options of one
method, which the oracle draws for adapters, too. The base is in float64, and on a base of
zeros a whole model has no rounding but that of the product, so that both are references.
"""

import json
import shutil
from copy import deepcopy

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from fusion_bench_nufilt.methods import METHODS, ORDER_FREE
from fusion_bench_nufilt.methods.options import VARIANTS
from tests.merge.helpers import RANKS, manifest, merge, save_stream, tensors
from tests.tiny_models import SMALL, build

TASKS = ("math", "code", "chat")
BLOCKS = 3
TARGETS = ["q_proj", "up_proj", "down_proj"]  # square, tall and wide
SHAPES = {"self_attn.q_proj": (32, 32), "mlp.up_proj": (64, 32), "mlp.down_proj": (32, 64)}
#: Of the length of a layer's update: what float32 rounds.
TOLERANCE = 2e-5
#: A layer in which one task is a copy of that before it, of which NUFILT's filter leaves rounding
#: alone, and Adam's steps are as long for that.
COPIED = "model.layers.1.mlp.down_proj"
TOLERANCE_OF_COPIES = 2e-3
NAMES = [name for name in METHODS if name not in VARIANTS]
#: Options by which a method takes a single task whole.
WHOLE = {"sum": {"scale": 1.0}, "tsv_stream": {"scale": 1.0}}


def unrelated_factors():
    """By task and layer: factors of other ranks, in all layers."""
    factors = {}
    for number, task in enumerate(TASKS):
        generator = torch.Generator().manual_seed(number)
        for block in range(BLOCKS):
            for name, shape in SHAPES.items():
                layer = f"model.layers.{block}.{name}"
                factors[task, layer] = draw(shape, 2 + number, generator)
    return factors


def draw(shape, rank, generator):
    d_o, d_i = shape
    B = torch.randn(d_o, rank, generator=generator, dtype=torch.float64) * 0.1 * d_o**-0.5
    A = torch.randn(rank, d_i, generator=generator, dtype=torch.float64) * d_i**-0.5
    return B, A


def factors_of_adapters():
    """The same in the last block; in the others are layers in which adapters have much in common,
    or which some leave alone.
    """
    factors = unrelated_factors()
    generator = torch.Generator().manual_seed(5)
    first_block = "model.layers.0"
    second_block = "model.layers.1"
    with_one_A = f"{first_block}.self_attn.q_proj"
    _, A = draw((32, 32), 3, generator)
    for task in TASKS:
        B, _ = draw((32, 32), 3, generator)
        factors[task, with_one_A] = (B, A)
    half_as_strong = f"{first_block}.mlp.up_proj"
    B, A = factors["math", half_as_strong]
    factors["code", half_as_strong] = (B / 2, A)
    taken_back = f"{first_block}.mlp.down_proj"
    B, A = factors["math", taken_back]
    factors["code", taken_back] = (-B / 2, A)
    left_alone = f"{second_block}.self_attn.q_proj"
    del factors["math", left_alone]
    B, A = factors["code", left_alone]
    factors["code", left_alone] = (torch.zeros_like(B), A)
    # Together more directions than the layer has.
    thick = f"{second_block}.mlp.up_proj"
    for task in TASKS:
        factors[task, thick] = draw((64, 32), 12, generator)
    factors["code", COPIED] = factors["math", COPIED]
    return factors


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"), factors_of_adapters())


def save_models(path, factors):
    """Save adapters, the base that they name, and what peft makes of them; and in `zeros` the same
    on a base of zeros.
    """
    size = {**SMALL, "num_hidden_layers": BLOCKS, "num_attention_heads": 4}
    config = LlamaConfig(**size, vocab_size=50, tie_word_embeddings=False)
    model = build(LlamaForCausalLM, config, 0)
    save_stream(path, model, tasks=0, dtype=torch.float64, shards="1GB")
    base = tensors(path / "base")
    on_zeros = {}
    for key, value in base.items():
        on_zeros[key] = value
        if any(f"{target}.weight" in key for target in TARGETS):
            on_zeros[key] = torch.zeros_like(value)
    save_copy(path / "base", path / "zeros" / "base", on_zeros)
    for task in TASKS:
        of_task = {}
        for (name, layer), update in factors.items():
            if name == task:
                of_task[layer] = update
        save_adapter(path / task, path / "base", of_task)
        whole = dict(on_zeros)
        for layer, (B, A) in of_task.items():
            whole[f"{layer}.weight"] = B @ A
        save_copy(path / "base", path / "zeros" / task, whole)
        model = PeftModel.from_pretrained(load(path), path / task).merge_and_unload()
        model.save_pretrained(path / f"{task}_whole")
    return path


def save_copy(source, target, state):
    shutil.copytree(source, target)
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})


def save_adapter(folder, base, factors):
    """Save factors B and A by layer, of scaling 1."""
    ranks = {layer: len(A) for layer, (_, A) in factors.items()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": 1,
        "lora_alpha": 1,
        "rank_pattern": ranks,
        "alpha_pattern": ranks,
        "target_modules": list(ranks),
    }
    state = {}
    for layer, (B, A) in factors.items():
        state[f"base_model.model.{layer}.lora_A.weight"] = A.clone()
        state[f"base_model.model.{layer}.lora_B.weight"] = B.clone()
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(state, folder / "adapter_model.safetensors")


def load(folder):
    return LlamaForCausalLM.from_pretrained(folder / "base", dtype=torch.float64)


def merge_any(folder, method, tasks, out, merged=None, settings=None, **options):
    options = {"target_modules": TARGETS, **options}
    if method not in ORDER_FREE:
        # The default ranks of NUFILT are those of wide layers.
        options = {**RANKS, **METHODS[method].defaults, **options}
    return merge(folder, tasks, out, merged, settings=settings, method=method, **options)


def merge_adapters(*args, settings=None, **options):
    return merge_any(*args, settings={"adapter": True, **(settings or {})}, **options)


def updates(base, merged):
    """The updates of layers in a merged model, by name."""
    before = tensors(base)
    changes = {}
    for key, value in tensors(merged).items():
        if any(f"{target}.weight" in key for target in TARGETS):
            changes[key] = value - before[key]
    return changes


def updates_by_peft(folder, adapter, tmp_path):
    model = PeftModel.from_pretrained(deepcopy(load(folder)), adapter).merge_and_unload()
    whole = tmp_path / f"{adapter.name}_by_peft"
    model.save_pretrained(whole)
    return updates(folder / "base", whole)


def assert_close(changes, expected):
    assert changes.keys() == expected.keys()
    for key, update in expected.items():
        tolerance = TOLERANCE_OF_COPIES if COPIED in key else TOLERANCE
        # As long as a task's, where the layer has none left.
        length = update.norm().clamp_min(1e-2)
        assert (changes[key] - update).norm() <= tolerance * length, key


@pytest.mark.parametrize("method", NAMES)
def test_adapters_are_merged_as_whole_models_on_any_base(folder, tmp_path, method):
    """At once, one by one, and with a cut after which the merge goes on; into an adapter, and into
    the base.
    """
    zeros = folder / "zeros"
    on_zeros = merge_any(zeros, method, TASKS, tmp_path / "zeros")
    expected = updates(zeros / "base", on_zeros)

    at_once = merge_adapters(folder, method, TASKS, tmp_path / "at_once")
    assert_close(updates_by_peft(folder, at_once, tmp_path), expected)
    first = merge_adapters(folder, method, [TASKS[0]], tmp_path / "first")
    second = merge_adapters(folder, method, [TASKS[1]], tmp_path / "second", first)
    third = merge_adapters(folder, method, [TASKS[2]], tmp_path / "third", second)
    assert_close(updates_by_peft(folder, third, tmp_path), expected)
    cut = {"rank": 1, "state": True}
    goes_on = merge_adapters(folder, method, [TASKS[1]], tmp_path / "cut", first, settings=cut)
    goes_on = merge_adapters(folder, method, [TASKS[2]], tmp_path / "after_cut", goes_on)
    assert_close(updates_by_peft(folder, goes_on, tmp_path), expected)

    into_base = merge_any(folder, method, TASKS, tmp_path / "into_base")
    assert_close(updates(folder / "base", into_base), expected)
    mixed = [f"{TASKS[0]}_whole", *TASKS[1:]]
    of_both = merge_any(folder, method, mixed, tmp_path / "of_both")
    assert_close(updates(folder / "base", of_both), expected)


@pytest.mark.parametrize("method", NAMES)
def test_a_cut_is_the_best_approximation_of_its_rank(folder, tmp_path, method):
    """Which is not the only one where directions are equally strong."""
    whole = merge_adapters(folder, method, TASKS, tmp_path / "whole")
    cut = merge_adapters(folder, method, TASKS, tmp_path / "cut", settings={"rank": 2})
    uncut = updates_by_peft(folder, whole, tmp_path)
    approximations = updates_by_peft(folder, cut, tmp_path)
    kept = manifest(cut)["energy_kept"]
    shares = kept["tensors"]
    assert len(shares) == len(uncut)
    all_kept = sum(update.square().sum() for update in approximations.values())
    all_energy = sum(update.square().sum() for update in uncut.values())
    assert kept["all"] == pytest.approx((all_kept / all_energy).item(), rel=1e-4)
    assert f"{kept['all']:.2%} of the energy" in (cut / "README.md").read_text()
    for key, update in uncut.items():
        strengths = torch.linalg.svdvals(update)
        energies = strengths.square()
        left_out = (update - approximations[key]).norm()
        assert torch.linalg.matrix_rank(approximations[key], rtol=1e-5) == 2, key
        torch.testing.assert_close(left_out, energies[2:].sum().sqrt(), rtol=1e-4, atol=1e-6)
        share = (energies[:2].sum() / energies.sum()).item()
        assert shares[key.removesuffix(".weight")] == pytest.approx(share, rel=1e-5), key


@pytest.mark.parametrize("method", NAMES)
def test_a_single_adapter_is_what_peft_makes_of_it(folder, tmp_path, method):
    alone = merge_adapters(folder, method, ["chat"], tmp_path / "alone", **WHOLE.get(method, {}))
    expected = updates(folder / "base", folder / "chat_whole")
    assert_close(updates_by_peft(folder, alone, tmp_path), expected)
