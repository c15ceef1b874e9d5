"""Bad input is refused before any work, by a message that names the tensor and says what to do."""

import errno
import json
import os
import re
import shutil

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from fusion_bench_nufilt.folders import Settings, merge_folders, plan_merge
from fusion_bench_nufilt.methods import nufilt
from fusion_bench_nufilt.storage import tensors
from tests.folders.helpers import change, configs, hashes, merge, save_stream
from tests.models import llama

UP = "model.layers.1.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def stream(tmp_path):
    save_stream(tmp_path, llama(), tasks=2)
    return tmp_path


def refuse(stream, message, merged=None, settings=None, **config):
    """Refused by the plan, so that nothing was written."""
    with pytest.raises(ValueError, match=message):
        plan_merge(
            str(stream / "base"),
            [str(stream / "task1"), str(stream / "task2")],
            merged and str(stream / merged),
            *configs(config),
            settings,
        )


def refuse_late(stream, message):
    """Refused while merging: nothing that looks finished is left."""
    with pytest.raises(ValueError, match=message):
        merge(stream, ["task1", "task2"])
    assert not (stream / "out").exists()


def test_a_truncated_file(stream):
    path = stream / "task2" / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)
    refuse(stream, r"task2/model\.safetensors' is truncated or corrupt.*fetch it again")


def test_a_file_that_is_no_safetensors(stream):
    (stream / "task2" / "model.safetensors").write_bytes(b"\x80\x04 a pickle, perhaps")
    refuse(stream, "truncated or corrupt")


def test_an_index_that_names_absent_shards(stream):
    next((stream / "base").glob("model-00002-of-*.safetensors")).unlink()
    refuse(stream, r"base.*names shards that are not there: 'model-00002-of-\d+\.safetensors'")


def test_an_index_that_names_files_elsewhere(stream):
    path = stream / "base" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][UP] = "../task1/model.safetensors"
    path.write_text(json.dumps(index))
    refuse(stream, "names '../task1/model.safetensors': no safetensors files of this folder")


def test_an_index_that_promises_a_tensor_that_no_file_has(stream):
    path = stream / "base" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.more.weight"] = index["weight_map"][UP]
    path.write_text(json.dumps(index))
    refuse(stream, "names tensors that its files lack: 'model.more.weight'")


def test_pickled_weights(stream):
    (stream / "task2" / "model.safetensors").rename(stream / "task2" / "pytorch_model.bin")
    refuse(stream, r"pickled weights \('pytorch_model\.bin'\).*refused.*safe_serialization=True")


def test_a_folder_without_weights(stream):
    (stream / "task2" / "model.safetensors").unlink()
    refuse(stream, "task2' holds no safetensors file")


def test_neither_a_folder_nor_a_hub_name(stream):
    with pytest.raises(ValueError, match="'no/such/folder' is neither a folder nor the name of a hub repository"):
        plan_merge(str(stream / "base"), ["no/such/folder"])


def test_a_task_that_lacks_a_layer(stream):
    change(stream / "task2", UP, lambda value: None)
    refuse(stream, rf"model '.*task2' lacks layer '{UP}' \(64, 32\)")


def test_a_task_of_another_width(stream):
    change(stream / "task2", UP, lambda value: torch.zeros(64, 48))
    refuse(stream, rf"model '.*task2', tensor '{UP}': shape \(64, 48\) differs from \(64, 32\) of the base")


def test_more_rows_of_the_embedding_are_refused_unless_the_base_is_kept(stream):
    change(stream / "task2", EMBEDDING, lambda value: torch.cat([value, value[:2]]))
    refuse(stream, rf"'{EMBEDDING}': shape \(52, 32\) differs from \(50, 32\).*--on-shape-mismatch keep-base")
    out = merge(stream, ["task1", "task2"], on_shape_mismatch="keep-base", other_params="mean")
    warnings = json.loads((out / "nufilt.json").read_text())["warnings"]
    assert any("kept from the base because of their shape" in text and EMBEDDING in text for text in warnings)


def test_a_task_from_another_base_is_merged_with_a_warning_that_shows_the_evidence(stream):
    other = llama(seed=9)
    other.save_pretrained(stream / "task2")
    plan = plan_merge(str(stream / "base"), [str(stream / "task1"), str(stream / "task2")])
    assert len(plan.warnings) == 1
    assert "task2' looks as if it was made from another base" in plan.warnings[0]
    assert "cosine -0.0" in plan.warnings[0] or "cosine 0.0" in plan.warnings[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("model", ["base", "task2"])
def test_values_that_are_not_finite(stream, model, value):
    change(stream / model, UP, lambda tensor: tensor.index_fill(0, torch.tensor([3]), value))
    refuse_late(stream, rf"model '.*{model}', tensor '{UP}' has NaN or infinite values")


def test_a_merged_weight_that_half_precision_cannot_hold(tmp_path):
    save_stream(tmp_path, llama(), tasks=2, dtype=torch.float16)
    change(tmp_path / "task2", UP, lambda tensor: tensor.float() + 1e6)
    refuse_late(tmp_path, r"task2', layer '.*up_proj': the result is too large for torch\.float16")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("model", ["base", "task2"])
def test_quantised_weights(stream, model, dtype):
    change(stream / model, UP, lambda tensor: tensor.to(dtype))
    refuse(stream, f"{model}', tensor '{UP}' is stored as (I8|F8_E4M3): quantised weights can't be merged")


def test_quantised_weights_of_the_merged_model(stream):
    (stream / "task1").rename(stream / "one")
    (stream / "task2").rename(stream / "task1")
    (stream / "one" / "nufilt.json").write_text('{"step": 1}')
    change(stream / "one", UP, lambda tensor: tensor.to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=f"one', tensor '{UP}' is stored as F8_E4M3"):
        plan_merge(str(stream / "base"), [str(stream / "task1")], str(stream / "one"))


def test_quantised_weights_are_refused_where_they_are_averaged_and_no_matter_where_not(stream):
    change(stream / "task2", EMBEDDING, lambda tensor: tensor.to(torch.float8_e4m3fn))
    refuse(stream, f"task2', tensor '{EMBEDDING}' is stored as F8_E4M3", other_params="mean")
    plan_merge(str(stream / "base"), [str(stream / "task2")])


def test_a_tensor_in_two_shards(stream):
    first, *_, last = sorted((stream / "base").glob("*.safetensors"))
    save_file({**load_file(first), **load_file(last)}, first, metadata={"format": "pt"})
    refuse(stream, rf"base' has '.*' in '{last.name}' and in another file: remove one of them")


def test_a_target_that_matches_no_layer(stream):
    refuse(stream, "names no layer", target_modules=["typo"])


def test_a_config_that_promises_more_layers_than_there_are(stream):
    path = stream / "base" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 3}))
    refuse(stream, "lacks the weight of 7 layers that its config.json promises")


def test_a_merged_model_of_another_base(stream):
    change(stream / "task1", EMBEDDING, lambda tensor: tensor[:-1])
    (stream / "task1" / "nufilt.json").write_text('{"step": 1}')
    refuse(stream, f"merged model '.*task1' was not made from the base '.*base': '.*{EMBEDDING}'", merged="task1")


def test_a_merged_model_of_unknown_step(stream):
    refuse(stream, "no nufilt.json that tells how many tasks it holds: say with --step", merged="task1")
    plan_merge(str(stream / "base"), [str(stream / "task2")], str(stream / "task1"), settings=Settings(step=2))


@pytest.mark.parametrize(
    ("manifest", "message"),
    [("[1]", r"nufilt\.json' is damaged"), ('{"step": "x"}', "field 'step': input should be a valid integer, got 'x'")],
)
def test_a_manifest_that_is_none(stream, manifest, message):
    (stream / "task1" / "nufilt.json").write_text(manifest)
    refuse(stream, message, merged="task1")


def test_float32_layers_of_weights_that_were_changed_since(tmp_path):
    save_stream(tmp_path, llama(), tasks=2, dtype=torch.bfloat16)
    settings = Settings(accumulate="float32")
    merge(tmp_path, ["task1"], "one", settings=settings)
    change(tmp_path / "one", UP, lambda tensor: tensor * 2)
    with pytest.raises(ValueError, match=r"nufilt_state' does not belong to the weights.*1\.mlp\.up_proj'"):
        merge(tmp_path, ["task2"], merged="one", settings=settings)


def test_changed_settings_are_warned_about(stream):
    merge(stream, ["task1"], "one")
    plan = plan_merge(str(stream / "base"), [str(stream / "task2")], str(stream / "one"), settings=Settings(seed=7))
    assert any("null_rank was 6, is 128" in text and "seed was 42, is 7" in text for text in plan.warnings)


def test_an_output_that_exists(stream):
    (stream / "out").mkdir()
    with pytest.raises(ValueError, match="out' exists: remove it or name another folder"):
        merge(stream, ["task1"])


def test_an_output_inside_an_input(stream):
    with pytest.raises(ValueError, match=r"is inside '.*task1', which is not written to"):
        merge(stream, ["task1"], "task1/out")


def test_a_mean_that_half_precision_cannot_hold(tmp_path):
    save_stream(tmp_path, llama(), tasks=2, dtype=torch.float16)
    change(tmp_path / "task2", EMBEDDING, lambda tensor: tensor.float() + 1e6)
    with pytest.raises(ValueError, match=rf"tensor '{EMBEDDING}': the mean has values that torch\.float16 can't hold"):
        merge(tmp_path, ["task1", "task2"], other_params="mean")
    assert not (tmp_path / "out").exists()


def test_an_input_that_is_written_to_during_the_run(stream, monkeypatch):
    fuse = nufilt.fuse_each

    def overwrite_and_fuse(*args, **kwargs):
        with (stream / "task2" / "model.safetensors").open("r+b") as file:  # in place: another thread may be reading
            file.seek(-64, os.SEEK_END)
            file.write(bytes(64))
        return fuse(*args, **kwargs)

    monkeypatch.setattr(nufilt, "fuse_each", overwrite_and_fuse)
    refuse_late(stream, "task2' was changed during the run")


def test_a_config_that_is_no_json(stream):
    (stream / "base" / "config.json").write_text("{")
    refuse(stream, r"base/config\.json' is damaged.*fetch it again")


def test_no_room_on_the_disk(stream, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    refuse_late(stream, r"the result takes 0\.0 GB and '.*' has 0\.0 GB left")


def test_a_disk_that_fills_up_half_way_is_said_and_the_run_goes_on_from_there(stream, monkeypatch):
    expected = hashes(merge(stream, ["task1", "task2"], "expected"))
    written, pwrite = [], os.pwrite

    def full_after_ten(descriptor, data, offset):
        written.append(offset)
        if len(written) > 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full_after_ten)
    refuse_late(stream, "no room left on the disk.*run the same command again")
    monkeypatch.setattr(os, "pwrite", pwrite)
    assert hashes(merge(stream, ["task1", "task2"])) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step": 0}, "step must be a whole number >= 1"),
        ({"accumulate": "bf16"}, "accumulate must be one of 'stored', 'float32'"),
        ({"device": "toaster"}, "device 'toaster'"),
    ],
)
def test_a_setting_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        Settings(**settings)


def test_a_corrupt_header_is_refused_without_being_believed(tmp_path):
    """A header that says it is an exabyte long."""
    save_file({"x": torch.zeros(2)}, tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes((2**60).to_bytes(8, "little") + data[8:])
    with pytest.raises(ValueError, match="truncated or corrupt"):
        tensors.TensorFile(tmp_path / "x.safetensors")


def test_an_input_in_the_work_folder_is_refused_and_stays(stream):
    shutil.move(stream / "base", stream / ".out.nufilt")
    before = hashes(stream / ".out.nufilt")
    with pytest.raises(ValueError, match=r"is inside '.*\.out\.nufilt', where '.*out' is to grow: move it elsewhere"):
        merge_folders(plan_merge(str(stream / ".out.nufilt"), [str(stream / "task1")]), stream / "out")
    assert hashes(stream / ".out.nufilt") == before


def test_weights_that_are_links_into_the_work_folder_are_refused(stream):
    inside = stream / ".out.nufilt" / "model"
    inside.mkdir(parents=True)
    shutil.move(stream / "task1" / "model.safetensors", inside)
    (stream / "task1" / "model.safetensors").symlink_to(inside / "model.safetensors")
    with pytest.raises(ValueError, match=r"task1' is inside '.*\.out\.nufilt'"):
        merge(stream, ["task1"])


@pytest.mark.parametrize("name", ["README.md", "nufilt.json", "config.json"])
def test_a_shard_with_the_name_of_another_file(stream, name):
    path = stream / "base" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    last = sorted(index["weight_map"].values())[-1]
    (stream / "base" / last).rename(stream / "base" / name)
    index["weight_map"] = {key: name if file == last else file for key, file in index["weight_map"].items()}
    path.write_text(json.dumps(index))
    refuse(stream, rf"index\.json' names '{re.escape(name)}': no safetensors files of this folder")


def test_a_config_with_fewer_layers_than_the_weights(stream):
    path = stream / "base" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 1}))
    refuse(stream, r"stores 9 tensors of layers that its config\.json does not have, 'model\.layers\.1\.")


NORM = "model.norm.weight"


def test_a_norm_of_the_base_that_is_not_finite_is_copied_with_a_warning(stream, caplog):
    change(stream / "base", NORM, lambda tensor: tensor.fill_(float("nan")))
    out = merge(stream, ["task1", "task2"])
    assert f"'{NORM}' has NaN or infinite values in the base" in caplog.text
    assert json.loads((out / "nufilt.json").read_text())["warnings"] == [
        f"tensor '{NORM}' has NaN or infinite values in the base, and so in the result"
    ]


def test_a_norm_of_a_task_that_is_not_finite_is_refused_where_it_is_used(stream):
    change(stream / "task2", NORM, lambda tensor: tensor.fill_(float("nan")))
    with pytest.raises(ValueError, match=rf"task2', tensor '{NORM}' has NaN or infinite values"):
        merge(stream, ["task1", "task2"], other_params="mean")


def test_a_file_larger_than_memory_is_opened_without_reserving_it(tmp_path):
    """A sparse file: its size is only said."""
    size = 2 * (psutil.virtual_memory().total + psutil.swap_memory().total)
    header = json.dumps({"w": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size // 2 * 2]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        try:
            file.truncate(8 + len(header) + size // 2 * 2)
        except OSError:
            pytest.skip("no sparse files on this disk")
    opened = tensors.TensorFile(tmp_path / "model.safetensors")
    assert opened.elements(opened.tensors["w"], size // 2 - 4, size // 2).tolist() == [0.0] * 4


def test_a_pipe_in_place_of_weights(stream):
    (stream / "task2" / "model.safetensors").unlink()
    os.mkfifo(stream / "task2" / "model.safetensors")
    refuse(stream, "is no regular file")


@pytest.mark.parametrize(("model", "value"), [("task1", 1e36), ("task2", 1e36), ("base", 1e36)])
def test_finite_values_whose_squares_are_not_are_called_too_large(stream, model, value):
    change(stream / model, UP, lambda tensor: torch.full_like(tensor, value).index_fill(0, torch.tensor([0]), 0.0))
    with pytest.raises(ValueError, match=r"up_proj.* too large for"):
        merge(stream, ["task1", "task2", "task1"])
    assert not (stream / "out").exists()
