"""An input is its content: a copy is the same input by whatever name, and other content never is,
though its folder has the same name, its files the same sizes, headers and times.
"""

import os
import re
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.merge import merge_folders
from fusion_bench_nufilt.merge.distributed import _make_merger
from fusion_bench_nufilt.methods.nufilt import Nufilt
from fusion_bench_nufilt.utils.tensors import TensorFile
from tests.cli.helpers import nufilt
from tests.continual.helpers import logging_to
from tests.merge.helpers import (
    RANKS,
    change,
    change_json,
    hashes,
    interrupt,
    merge,
    plan,
    pool,
    same,
    save_stream,
    tensors,
)
from tests.merge.test_adapters import adapter_of, save_adapters
from tests.merge.test_resume import count_layers
from tests.models.test_adapters import save_adapter
from tests.tiny_models import finetuned, llama

LAYER = "model.layers.0.mlp.up_proj.weight"
WEIGHTS = "model.safetensors"
WITHOUT = {"settings": {"verify": False}}


def replace_content(folder, seed):
    """Other values in the same files, which keep their sizes, headers and times, as after `cp -p`
    of another model.
    """
    random = torch.Generator().manual_seed(seed)
    for path in folder.glob("*.safetensors"):
        before = path.stat()
        content = bytearray(path.read_bytes())
        values = load_file(path)
        for key, value in values.items():
            values[key] = value + 0.002 * torch.randn(value.shape, generator=random).to(value)
        save_file(values, path, metadata={"format": "pt"})
        after = path.stat()
        assert after.st_size == before.st_size
        length = 8 + int.from_bytes(content[:8], "little")
        assert path.read_bytes()[:length] == content[:length]
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def edit_first_bytes(folder, pattern):
    """Change the first bytes of tensors, and keep the time."""
    edited = []
    for path in folder.glob("*.safetensors"):
        before = path.stat()
        for key, info in TensorFile(path).tensors.items():
            if re.search(pattern, key):
                edited.append(key)
                with path.open("r+b") as file:
                    file.seek(info.start)
                    file.write(bytes(16))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert edited


def copy(folder, name, to):
    shutil.copytree(folder / name, folder / to)
    for path in (folder / to).iterdir():
        os.utime(path, (0, 0))


# --- a finished result ---


@pytest.mark.parametrize("role", ["base", "task1", "task2"])
def test_a_model_that_was_trained_again_in_its_place_is_another_model(stream, role):
    merge(stream, ["task1", "task2"])
    replace_content(stream / role, seed=7)
    with pytest.raises(ValueError, match=rf"out' exists: the content of .* '{role}' is not the sa"):
        merge(stream, ["task1", "task2"])


def test_the_merged_model_and_its_state_are_known_by_their_content(tmp_path):
    save_stream(tmp_path, llama(), dtype=torch.bfloat16)
    keep = {"settings": {"state": True}}
    merge(tmp_path, ["task1"], "one", **keep)
    merge(tmp_path, ["task2"], merged="one", **keep)
    copy(tmp_path, "one", "copy")
    merge(tmp_path, ["task2"], merged="copy", **keep)
    shutil.rmtree(tmp_path / "one")
    change(tmp_path / "base", LAYER, lambda weight: weight + 0.01)
    merge(tmp_path, ["task1"], "one", **keep)
    with pytest.raises(ValueError, match=r"out' exists: the content of base 'base' is not the"):
        merge(tmp_path, ["task2"], merged="one", **keep)


def reshard(folder, name):
    model = LlamaForCausalLM.from_pretrained(folder / name)
    for path in (folder / name).glob("*.safetensors*"):
        path.unlink()
    model.save_pretrained(folder / name, max_shard_size="15KB")


@pytest.mark.parametrize("role", ["base", "task2"])
def test_a_copy_by_any_name_and_in_other_shards_is_the_same_input(
    stream, monkeypatch, caplog, role
):
    names = {"base": "base", "tasks": ["task1", "task2"]}
    expected = hashes(merge(stream, ["task1", "task2"]))
    copy(stream, role, "copy")
    if role == "base":
        names["base"] = "copy"
    else:
        names["tasks"] = ["task1", "copy"]
        reshard(stream, "copy")
    computed = count_layers(monkeypatch)
    caplog.clear()
    assert hashes(merge(stream, **names)) == expected
    assert computed == []
    line = "'copy' has another size or time than when '.*out' was made of it, and the same finger"
    assert re.search(line, caplog.text)
    assert caplog.text.count("\n") == 1


# --- between a kill and the next run, and during a run ---


def test_an_input_that_was_replaced_after_a_kill_gives_no_tensor_to_the_result(stream):
    interrupt(stream)
    replace_content(stream / "task2", seed=7)
    assert hashes(merge(stream)) == hashes(merge(stream, out="expected"))


@pytest.fixture
def wide(tmp_path):
    """A stream whose layers are larger than the pieces that the fingerprint reads."""
    model = llama()
    model.config.hidden_size = 64
    model.config.intermediate_size = 128
    torch.manual_seed(0)
    base = LlamaForCausalLM(model.config)
    base.save_pretrained(tmp_path / "base")
    for number in (1, 2):
        finetuned(base, seed=number, scale=0.002).save_pretrained(tmp_path / f"task{number}")
    return tmp_path


TWO = ["task1", "task2"]


def at_the_first_update(monkeypatch, function):
    update = Nufilt.update
    lock = threading.Lock()
    calls = []

    def disturbed(*args, **options):
        with lock:  # layers are solved side by side
            if not calls:
                calls.append(function())
        return update(*args, **options)

    monkeypatch.setattr(Nufilt, "update", disturbed)


def replaced_by_rename(folder, name):
    copy(folder, name, "other")
    replace_content(folder / "other", seed=7)
    before = (folder / name / WEIGHTS).stat()
    os.utime(folder / "other" / WEIGHTS, ns=(before.st_atime_ns, before.st_mtime_ns))
    (folder / "other" / WEIGHTS).replace(folder / name / WEIGHTS)


DISTURBANCES = {
    "replaced": replaced_by_rename,
    "written over": lambda folder, name: replace_content(folder / name, seed=7),
    "edited": lambda folder, name: edit_first_bytes(folder / name, "_proj"),
    "touched": lambda folder, name: os.utime(folder / name / WEIGHTS),
}


@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_an_input_that_changes_during_the_run_is_found(wide, monkeypatch, disturbance):
    at_the_first_update(monkeypatch, lambda: DISTURBANCES[disturbance](wide, "task1"))
    with pytest.raises(ValueError, match=r"task1' was changed during the run: run the same"):
        merge(wide, TWO)
    monkeypatch.undo()
    assert not (wide / "out").exists()
    assert same(tensors(merge(wide, TWO)), tensors(merge(wide, TWO, "expected")))


def test_an_input_that_is_linked_during_the_run_is_the_same(wide, monkeypatch):
    expected = hashes(merge(wide, TWO, "expected"))
    weights = wide / "task1" / WEIGHTS
    at_the_first_update(monkeypatch, lambda: (wide / "link").hardlink_to(weights))
    assert hashes(merge(wide, TWO)) == expected


def test_an_edit_that_a_fingerprint_does_not_see_is_told_by_the_time(wide, caplog):
    expected = hashes(merge(wide, TWO))
    fingerprint = plan(wide, TWO).tasks[0].checkpoint.fingerprint
    weights = wide / "task1" / WEIGHTS
    place = TensorFile(weights).tensors[LAYER]
    with weights.open("r+b") as file:
        file.seek(place.start + 5000)  # behind the first piece
        file.write(bytes(16))
    assert plan(wide, TWO).tasks[0].checkpoint.fingerprint == fingerprint
    assert hashes(merge(wide, TWO)) == expected
    assert "'task1' has another size or time than when" in caplog.text
    assert "remove the result if it was edited" in caplog.text


def test_a_node_may_have_copies_at_other_times_and_no_other_content(stream):
    of_driver = plan(stream, ["task1", "task2"])
    for name in ("base", "task1"):
        copy(stream, name, "copy")
        shutil.rmtree(stream / name)
        (stream / "copy").rename(stream / name)
    layer = of_driver.layers[0]
    threads = torch.get_num_threads()
    ((record, _),) = _make_merger(of_driver, [1.0, 1.0])([layer.name])
    torch.set_num_threads(threads)  # a worker has one
    assert record["param"] == layer.param
    replace_content(stream / "task2", seed=7)
    with pytest.raises(ValueError, match=r"it has other files of '.*task2' than the driver: put"):
        _make_merger(of_driver, [1.0, 1.0])


# --- the base of what is gone on from ---


def other_base(folder, name="base"):
    for path in (folder / name).glob("*.safetensors"):
        values = load_file(path)
        random = torch.Generator().manual_seed(3)
        for key, value in values.items():
            values[key] = value.std() * torch.randn(value.shape, generator=random)
        save_file(values, path, metadata={"format": "pt"})


OTHER_BASES = {
    "unrelated": other_base,
    "one tensor": lambda folder: change(folder / "base", LAYER, lambda value: value + 0.01),
}


@pytest.mark.parametrize("other", OTHER_BASES)
def test_another_base_than_that_of_the_merged_model_is_refused(stream, other):
    merge(stream, ["task1"], "one")
    OTHER_BASES[other](stream)
    message = (
        r"base' is not the base of '.*one': the content of base 'base' is not the same; name that "
        r"one, or add --no-verify$"
    )
    with pytest.raises(ValueError, match=message):
        plan(stream, ["task2"], "one")
    if other != "unrelated":
        assert plan(stream, ["task2"], "one", **WITHOUT).warnings == []


def test_a_copy_of_the_base_is_the_base_without_a_word(stream):
    merge(stream, ["task1"], "one")
    expected = tensors(merge(stream, ["task2"], "two", merged="one"))
    copy(stream, "base", "copy")
    shutil.rmtree(stream / "base")
    again = plan(stream, ["task2"], "one", base="copy")
    assert again.warnings == []
    assert same(tensors(merge_folders(again, stream / "out")), expected)


def test_where_no_content_of_the_base_is_known_weights_that_look_like_anothers_are_refused(stream):
    one = merge(stream, ["task1"], "one")
    options = {"settings": {"step": 2}}
    (one / "nufilt.json").unlink()
    expected = plan(stream, ["task2"], "one", **options)
    assert expected.warnings == []
    other_base(stream)
    message = r"one' looks as if it was made from another base than '.*cosine.*, or add --no-verify"
    with pytest.raises(ValueError, match=message):
        plan(stream, ["task2"], "one", **options)
    options["settings"]["verify"] = False
    warnings = plan(stream, ["task2"], "one", **options).warnings
    assert any("one' looks as if it was made from another base" in text for text in warnings)


# --- a task that is merged already ---


def test_a_task_that_is_in_the_merged_model_is_refused_by_whatever_name_with_its_step(stream):
    merge(stream, ["task1", "task2"], "two")
    merge(stream, ["task3"], "three", merged="two")
    copy(stream, "task2", "copy")
    for task, merged in (("task2", "two"), ("copy", "two"), ("copy", "three")):
        message = (
            rf"{task}' is in '.*{merged}' already, as step 2 \('task2'\): leave it out, or add"
        )
        with pytest.raises(ValueError, match=message):
            plan(stream, [task], merged)
        plan(stream, [task], merged, **WITHOUT)
    with pytest.raises(ValueError, match=r"task3' is in '.*three' already, as step 3 \('task3'\)"):
        plan(stream, ["task3"], "three")


def test_the_steps_of_a_run_are_gone_on_from_by_content_and_keep_that_of_earlier_tasks(stream):
    merge(stream, ["task1"], "one")
    algorithm = NufiltContinualMergingAlgorithm(**RANKS, shuffle_order=False)
    models = {"_pretrained_": "base", "_merged_": "one", "second": "task2"}
    logging_to(stream / "run", algorithm).run(pool(stream, LlamaForCausalLM, **models))
    step = "run/checkpoints/merged_model_1"
    copy(stream, "base", "copy")
    assert plan(stream, ["task3"], step, base="copy").warnings == []
    for task, number, name in (("task1", 1, "task1"), ("task2", 2, "second")):
        message = rf"{task}' is in '.*{step}' already, as step {number} \('{name}'\)"
        with pytest.raises(ValueError, match=message):
            plan(stream, [task], step)
    merge(stream, ["task3"], "three", merged=step)
    with pytest.raises(ValueError, match=r"as step 2 \('second'\)"):
        plan(stream, ["task2"], "three")


def test_a_task_that_comes_twice_is_refused_by_its_content(stream):
    copy(stream, "task1", "copy")
    with pytest.raises(
        ValueError, match=r"copy' is also task '.*task1': name it once, and set its"
    ):
        plan(stream, ["task1", "task2", "copy"])
    plan(stream, ["task1", "task2", "copy"], **WITHOUT)


def test_a_copy_of_the_merged_model_is_no_task(stream):
    merge(stream, ["task1"], "one")
    copy(stream, "one", "copy")
    with pytest.raises(ValueError, match="copy' is also --merged: leave the task out"):
        plan(stream, ["copy", "task2"], merged="one")


def test_an_adapter_scaled_otherwise_is_another_task(stream):
    save_adapter(stream, LlamaForCausalLM.from_pretrained(stream / "base"))
    copy(stream, "adapter", "copy")
    with pytest.raises(ValueError, match=r"copy' is also task '.*adapter'"):
        plan(stream, ["adapter", "copy"])
    change_json(stream / "copy" / "adapter_config.json", lora_alpha=64)
    plan(stream, ["adapter", "copy"])


def test_an_analysis_refuses_by_content_and_goes_on_where_it_is_told_to(stream):
    merge(stream, ["task1"], "one")
    models = ["--base", stream / "base", "--task", stream / "task1", "--merged", stream / "one"]
    code, text = nufilt("analyze", *models, "--out", stream / "analysis")
    assert code == 1
    text = " ".join(text.split())
    assert "task1' is in" in text
    assert "already, as step 1 ('task1'): leave it out, or add --no-verify" in text
    code, text = nufilt("analyze", *models, "--out", stream / "analysis", "--no-verify")
    assert code == 0, text


def test_an_adapter_of_adapters_is_known_by_the_content_of_these(tmp_path, monkeypatch):
    save_adapters(tmp_path)
    adapter_of(tmp_path, ["math", "code"])
    copy(tmp_path, "code", "copy")
    computed = count_layers(monkeypatch)
    assert adapter_of(tmp_path, ["math", "copy"]) == tmp_path / "adapter"
    assert computed == []
    with pytest.raises(ValueError, match=r"copy' is in '.*adapter' already, as step 2 \('code'\)"):
        adapter_of(tmp_path, ["copy"], "more", merged="adapter")
    replace_content(tmp_path / "code", seed=7)
    with pytest.raises(ValueError, match=r"exists: the content of task 1 'code' is not the same"):
        adapter_of(tmp_path, ["math", "code"])
