"""A folder merge gives what the algorithm gives on loaded models, and leaves the rest of a
checkpoint as it was.
"""

import hashlib
import zlib
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CLIPVisionModel

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.merge import merge_folders
from fusion_bench_nufilt.models import select_layers
from fusion_bench_nufilt.models.checkpoint import Checkpoint
from fusion_bench_nufilt.utils.tensors import TensorFile
from tests.conftest import every_device
from tests.continual.helpers import logging_to
from tests.merge.helpers import (
    RANKS,
    STATE,
    algorithm,
    change,
    change_json,
    manifest,
    merge,
    plan,
    pool,
    same,
    save_stream,
    tensors,
)
from tests.tiny_models import clip, finetuned, full_clip, llama, llava, t5

#: Families in 32 bits and in 16, with options of each kind.
STREAMS = [
    (clip, torch.float16, {}),
    (full_clip, torch.float32, {}),
    (t5, torch.float32, {"other_params": "first", "first_task": "release"}),
    (llama, torch.bfloat16, {"other_params": "mean"}),
    (llava, torch.float32, {"target_modules": "all-linear", "null_space": "zero"}),
]


def merged_keys(model):
    return {view.key for view in select_layers(model).values()}


@pytest.mark.parametrize(("make", "dtype", "options"), STREAMS)
def test_folders_give_the_algorithms_bits_in_the_dtype_of_the_base(tmp_path, make, dtype, options):
    models = save_stream(tmp_path, make(), dtype=dtype)
    out = merge(tmp_path, **options)
    loaded = type(models["_pretrained_"]).from_pretrained(out, dtype=dtype)
    assert same(loaded.state_dict(), algorithm(models, **options).state_dict())
    assert {value.dtype for value in tensors(out).values()} == {dtype}


@every_device
@pytest.mark.parametrize("method", ["nufilt", "spectral"])
def test_every_device_gives_the_same_folder_to_rounding(tmp_path, method, device):
    save_stream(tmp_path, llama(), dtype=torch.bfloat16)
    on_cpu = tensors(merge(tmp_path, out="on_cpu", method=method, settings={"device": "cpu"}))
    on_device = tensors(merge(tmp_path, method=method, settings={"device": device}))
    for key, value in on_cpu.items():  # to one rounding of bfloat16
        torch.testing.assert_close(on_device[key], value, rtol=2**-7, atol=1e-6)


def test_a_full_clip_folder_gives_the_bits_of_its_vision_tower_merged_alone(tmp_path):
    save_stream(tmp_path, full_clip())
    towers = {"_pretrained_": CLIPVisionModel.from_pretrained(tmp_path / "base")}
    for task in ("task1", "task2", "task3"):
        towers[task] = CLIPVisionModel.from_pretrained(tmp_path / task)
    merged = CLIPVisionModel.from_pretrained(merge(tmp_path))
    assert same(merged.state_dict(), algorithm(towers).state_dict())


def test_a_run_that_merged_the_towers_of_a_clip_goes_on_in_the_whole_clip(tmp_path):
    save_stream(tmp_path, full_clip(), tasks=0)
    base = CLIPVisionModel.from_pretrained(tmp_path / "base")
    models = {"_pretrained_": base}
    for number in (1, 2, 3):
        models[f"task{number}"] = finetuned(base, number, scale=0.002)
        models[f"task{number}"].save_pretrained(tmp_path / f"task{number}")
    names = {"_pretrained_": "base", "task1": "task1", "task2": "task2"}
    run = NufiltContinualMergingAlgorithm(**RANKS, shuffle_order=False)
    logging_to(tmp_path / "run", run).run(pool(tmp_path, CLIPVisionModel, **names))
    out = merge(tmp_path, ["task3"], merged="run/checkpoints/merged_model_1")
    assert tensors(out).keys() == tensors(tmp_path / "base").keys()
    merged = CLIPVisionModel.from_pretrained(out)
    assert same(merged.state_dict(), algorithm(models).state_dict())
    # A task that changes the other tower has a part in what the run does not have.
    finetuned(full_clip(), 4, scale=0.002).save_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"lacks 'logit_scale' .*: it was not made from this base"):
        plan(tmp_path, ["whole"], "run/checkpoints/merged_model_1", other_params="mean")


@pytest.mark.oldest
def test_a_head_that_the_configuration_unties_has_a_mean_of_its_own(tmp_path):
    """transformers 5 builds every T5 with a tied head, as Flan-T5's is not, and unties it when it
    loads one.
    """
    save_stream(tmp_path, t5(), tasks=2, shards="1GB")
    for seed, folder in enumerate(("base", "task1", "task2")):
        path = tmp_path / folder / "model.safetensors"
        state = load_file(path)
        generator = torch.Generator().manual_seed(seed)
        state["lm_head.weight"] = torch.randn(state["shared.weight"].shape, generator=generator)
        save_file(state, path, metadata={"format": "pt"})
        change_json(tmp_path / folder / "config.json", tie_word_embeddings=False)
    out = tensors(merge(tmp_path, ["task1", "task2"], other_params="mean"))
    task1 = tensors(tmp_path / "task1")
    task2 = tensors(tmp_path / "task2")
    for key in ("lm_head.weight", "shared.weight"):
        torch.testing.assert_close(out[key], (task1[key] + task2[key]) / 2)


def test_a_task_that_names_its_tensors_otherwise_is_the_same_task(tmp_path):
    """Older LLaVA checkpoints say `language_model.model.…` where newer ones say
    `model.language_model.…`.
    """
    models = save_stream(tmp_path, llava())
    expected = tensors(merge(tmp_path))
    for path in (tmp_path / "task2").glob("*.safetensors"):
        path.unlink()
    path = tmp_path / "task2" / "model.safetensors"
    save_file(models["task2"].state_dict(), path, metadata={"format": "pt"})
    assert set(tensors(tmp_path / "task2")) != set(tensors(tmp_path / "task1"))
    assert same(tensors(merge(tmp_path, out="again")), expected)


def test_layers_are_told_by_name_where_transformers_does_not_know_the_model(stream):
    expected = tensors(merge(stream))
    unknown = {"architectures": ["TheirOwnForCausalLM"], "auto_map": {"AutoConfig": "x.y"}}
    change_json(stream / "base" / "config.json", **unknown)
    (stream / "base" / "x.py").write_text("raise RuntimeError('code of a checkpoint was run')")
    out = merge(stream, out="by_name")
    assert manifest(out)["linear_layers_known_from"] == "names of the tensors"
    assert same(tensors(out), expected)


def test_a_float32_merged_model_on_a_bfloat16_base_goes_on_unrounded(tmp_path):
    save_stream(tmp_path, llama(), tasks=2, dtype=torch.bfloat16)
    settings = {"state": True, "step": 2}
    first = merge(tmp_path, ["task1"], "first", settings={"state": True})
    expected = merge(tmp_path, ["task2"], "expected", merged="first", settings=settings)
    # The same, as another program would have stored it: all in float32, no state beside it.
    wide = tmp_path / "wide"
    AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32).save_pretrained(wide)
    for key, value in load_file(first / STATE).items():
        change(wide, key.replace(".state.", "."), lambda _, value=value: value.clone())
    out = merge(tmp_path, ["task2"], merged="wide", settings=settings)
    assert same(load_file(out / STATE), load_file(expected / STATE))


def test_float32_layers_are_kept_beside_the_model_and_out_of_its_way(tmp_path):
    models = save_stream(tmp_path, llama(), dtype=torch.bfloat16)
    out = merge(tmp_path, settings={"state": True})
    state = load_file(out / STATE)
    assert {key.replace(".state.", ".") for key in state} == merged_keys(models["_pretrained_"])
    weights = tensors(out)
    for key, value in state.items():
        assert value.dtype == torch.float32
        assert torch.equal(value.bfloat16(), weights[key.replace(".state.", ".")])
    AutoModelForCausalLM.from_pretrained(out)


def test_float32_layers_go_on_where_they_are_and_rounded_ones_where_they_are_not(tmp_path):
    save_stream(tmp_path, llama(), tasks=2, dtype=torch.bfloat16)
    merge(tmp_path, ["task1"], "one", settings={"state": True}, target_modules=["up_proj"])
    out = merge(tmp_path, ["task2"], "two", merged="one", settings={"state": True})
    warnings = manifest(out)["warnings"]
    assert any("does not have all merged layers in float32" in text for text in warnings)
    assert len(load_file(out / STATE)) == 14


def test_a_float32_base_needs_no_float32_layers_beside_it(stream):
    settings = {"state": True}
    merge(stream, ["task1"], "one", settings=settings)
    assert manifest(merge(stream, ["task2"], merged="one", settings=settings))["warnings"] == []


def test_a_task_stored_in_more_digits_is_computed_in_the_bases(stream):
    expected = tensors(merge(stream, ["task1", "task2"], "expected"))
    for key in merged_keys(llama()):
        change(stream / "task2", key, lambda value: value.double())
    assert same(tensors(merge(stream, ["task1", "task2"])), expected)


def test_the_manifest_says_what_was_merged_and_the_card_names_no_folder(stream):
    out = merge(stream)
    made = manifest(out)
    assert made["coverage"]["merged"]["parameters"] == made["coverage"]["layers"] == 14
    assert made["coverage"]["kept"]["parameters"] == 6
    assert [report["step"] for report in made["layers"]["model.layers.0.mlp.up_proj"]] == [1, 2, 3]
    assert set(made["inputs"]) == {"base", "task 0", "task 1", "task 2"}
    for model in made["inputs"].values():
        folder = stream / model["name"]
        assert model.keys() == {"name", "fingerprint", "files", "stamps"}
        assert set(model["files"]) <= {"config.json"}
        assert model["fingerprint"] == Checkpoint.open(str(folder)).fingerprint
        for file, stamp in model["stamps"].items():
            status = (folder / file).stat()
            assert stamp == [status.st_size, status.st_mtime_ns]
    card = (out / "README.md").read_text()
    assert str(stream) not in (out / "nufilt.json").read_text() + card
    assert "base_model" not in card  # which would have to be a name on the hub


def test_the_manifest_has_the_size_of_every_other_file_and_the_sums_of_its_content(tmp_path):
    save_stream(tmp_path, llama(), dtype=torch.bfloat16)
    templates = tmp_path / "base" / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool.jinja").write_text("{{ tools }}")
    out = merge(tmp_path, settings={"state": True})
    made = manifest(out)
    files = {}
    for path in out.rglob("*"):
        if path.is_file() and path != out / "nufilt.json":
            data = path.read_bytes()
            content = {"sha256": hashlib.sha256(data).hexdigest()}
            if path.suffix == ".safetensors":
                first = 8 + int.from_bytes(data[:8], "little")
                starts = [info.start for info in TensorFile(path).tensors.values()]
                bounds = [0, first, *sorted(starts)[1:], len(data)]
                sums = [[*each, zlib.crc32(data[slice(*each)])] for each in pairwise(bounds)]
                content = {"checksums": sums}
            files[str(path.relative_to(out))] = {"size": len(data), **content}
    assert {STATE, "README.md", "additional_chat_templates/tool.jinja"} < files.keys()
    assert made["files"] == files


def test_files_of_the_base_that_change_or_vanish_during_a_merge_are_those_that_it_began_with(
    stream,
):
    before = (stream / "base" / "config.json").read_bytes()
    planned = plan(stream)
    change_json(stream / "base" / "config.json", vocab_size=7)
    (stream / "base" / "generation_config.json").unlink()
    out = merge_folders(planned, stream / "out")
    assert (out / "config.json").read_bytes() == before
    assert (out / "generation_config.json").is_file()


def test_warnings_in_the_manifest_name_no_folder(stream):
    llama(seed=9).save_pretrained(stream / "task1")
    text = (merge(stream, ["task1"]) / "nufilt.json").read_text()
    assert "'task1' looks as if it was made from another base than 'base'" in text
    assert str(stream) not in text


def test_two_devices_give_the_bits_of_one(stream):
    two = merge(stream, out="two", settings={"device": "cpu,cpu"})
    assert same(tensors(two), tensors(merge(stream)))
