"""The same content has the same fingerprint, wherever it lies; other content has another."""

import os
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from fusion_bench_nufilt.models.checkpoint import Checkpoint
from fusion_bench_nufilt.utils import fingerprint
from fusion_bench_nufilt.utils.fingerprint import (
    PIECE_BYTES,
    fingerprint_files,
    fingerprint_tensors,
)
from fusion_bench_nufilt.utils.tensors import TensorFile
from tests.tiny_models import clip, finetuned, llama, t5

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    torch.bool,
]


def random_tensors(count=6, side=80, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(side, side, generator=generator) for i in range(count)}


def of_files(*paths):
    return fingerprint_files([TensorFile(path) for path in paths])


def test_files_and_memory_agree_whatever_the_order_the_shards_and_the_metadata(tmp_path):
    tensors = random_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "sharded").mkdir()
    names = list(reversed(tensors))
    shards = [tmp_path / "sharded" / f"{part}.safetensors" for part in "ab"]
    save_file({name: tensors[name] for name in names[:2]}, shards[0], {"format": "pt"})
    save_file({name: tensors[name] for name in names[2:]}, shards[1], {"made by": "me"})
    expected = fingerprint_tensors(tensors)
    assert of_files(tmp_path / "model.safetensors") == expected
    assert of_files(*shards) == expected
    assert of_files(*reversed(shards)) == expected


@pytest.mark.parametrize(
    "make",
    [llama, partial(llama, tie_word_embeddings=False), t5, clip],
    ids=["llama", "untied llama", "t5", "clip"],
)
def test_a_module_has_the_fingerprint_of_its_saved_tensors(tmp_path, make):
    model = make()
    model.save_pretrained(tmp_path)
    assert Checkpoint.open(str(tmp_path)).fingerprint == fingerprint_tensors(model)
    assert fingerprint_tensors(finetuned(model, 1)) != fingerprint_tensors(model)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_has_one_in_files_and_in_memory(tmp_path, dtype):
    tensors = {
        "large": torch.randn(90, 91).mul(50).to(dtype),
        "odd": torch.randn(7, 3).mul(50).to(dtype),
        "scalar": torch.tensor(3.0).to(dtype),
        "empty": torch.empty(0, 4).to(dtype),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert of_files(tmp_path / "model.safetensors") == fingerprint_tensors(tensors)
    transposed = dict(tensors, large=tensors["large"].T.contiguous().T)
    assert fingerprint_tensors(transposed) == fingerprint_tensors(tensors)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: {**tensors, "w1": tensors["w2"], "w2": tensors["w1"]},
        lambda tensors: {**tensors, "w3": tensors["w3"].half()},
        lambda tensors: {**tensors, "w3": tensors["w3"].view(torch.int32)},
        lambda tensors: {**tensors, "w3": tensors["w3"].reshape(40, 160)},
        lambda tensors: {**tensors, "w3": torch.nextafter(tensors["w3"], torch.tensor(9.0))},
        lambda tensors: {**tensors, "x3": tensors["w3"].clone()},
        lambda tensors: {name: tensors[name] for name in tensors if name != "w3"},
    ],
    ids=["swapped", "dtype", "bits", "shape", "last digits", "more", "fewer"],
)
def test_other_content_has_another_fingerprint(change):
    tensors = random_tensors()
    assert fingerprint_tensors(change(tensors)) != fingerprint_tensors(tensors)


def test_it_tells_by_bits_and_not_by_values():
    zero = {"w": torch.zeros(4)}
    nan = {"w": torch.full((4,), float("nan"))}
    assert fingerprint_tensors({"w": -torch.zeros(4)}) != fingerprint_tensors(zero)
    assert fingerprint_tensors({"w": nan["w"].clone()}) == fingerprint_tensors(nan)


def test_small_pieces_of_each_tensor_are_read_and_each_file_is_opened_once(tmp_path, monkeypatch):
    save_file(random_tensors(side=400), tmp_path / "model.safetensors")
    file = TensorFile(tmp_path / "model.safetensors")
    bounds = []
    pieces = TensorFile.pieces

    def noted(file, of_pieces):
        bounds.append(list(of_pieces))
        return pieces(file, bounds[-1])

    monkeypatch.setattr(TensorFile, "pieces", noted)
    fingerprint_files([file])
    (of_file,) = bounds
    assert len(of_file) == 18
    for number, info in enumerate(file.tensors.values()):
        first, second, third = of_file[3 * number : 3 * number + 3]
        assert first == (info.start, info.start + PIECE_BYTES)
        assert second[0] < (info.start + info.stop) / 2 < second[1]
        assert third == (info.stop - PIECE_BYTES, info.stop)


def test_of_very_many_tensors_some_from_all_over_the_model_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "MOST_TENSORS", 20)
    kinds = ("gate", "up", "down", "scale")
    tensors = {}
    for layer in range(10):
        for kind in kinds:
            tensors[f"layers.{layer}.{kind}"] = torch.full((4,), float(layer))
    save_file(tensors, tmp_path / "model.safetensors")
    before = of_files(tmp_path / "model.safetensors")
    assert before == fingerprint_tensors(tensors)
    changed = []
    for name, value in tensors.items():
        if fingerprint_tensors({**tensors, name: value + 1}) != before:
            changed.append(name)
    assert len(changed) == 20
    assert {name.rpartition(".")[2] for name in changed} == set(kinds)
    more = {**tensors, "layers.10.gate": torch.zeros(4)}
    assert fingerprint_tensors(more) != before


def test_a_file_that_was_cut_short_after_it_was_opened_is_named(tmp_path):
    save_file(random_tensors(), tmp_path / "model.safetensors")
    file = TensorFile(tmp_path / "model.safetensors")
    os.truncate(file.path, 2000)
    with pytest.raises(ValueError, match=r"model.safetensors' ended before its header says"):
        fingerprint_files([file])
    file.path.unlink()
    with pytest.raises(ValueError, match=r"model.safetensors' can't be read: No such file"):
        fingerprint_files([file])
