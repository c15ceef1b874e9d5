"""Hub names: headers first, weights when the plan stands. The hub is a stand-in; nothing is
downloaded.
"""

import hashlib
import json
import re
import shutil
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.repocard import metadata_load
from huggingface_hub.utils import SafetensorsFileMetadata, TensorInfo, filter_repo_objects
from safetensors.torch import load_file, save_file

from fusion_bench_nufilt import FusionConfig, load_task
from fusion_bench_nufilt.merge import merge_folders, plan_merge
from fusion_bench_nufilt.methods.options import Settings
from fusion_bench_nufilt.models.checkpoint import Checkpoint
from fusion_bench_nufilt.utils.tensors import TensorFile
from tests.merge.helpers import (
    RANKS,
    STATE,
    change_json,
    manifest,
    merge,
    never,
    same,
    save_stream,
    tensors,
)
from tests.merge.test_heads import save as save_classifiers
from tests.models.test_adapters import random_adapter, save_adapter
from tests.models.test_quantised import quantise
from tests.models.test_small_files import encoder
from tests.tiny_models import llama

COMMIT = "0" * 40
WEIGHTS = "model.safetensors"


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Serves the folders of a stream as `owner/<folder>`; returns the names of downloaded files."""
    save_stream(tmp_path / "remote", llama(), tasks=2)
    (tmp_path / "remote" / "base" / "README.md").write_text("---\nlicense: mit\n---\n")
    downloaded = []

    def snapshot_download(name, revision=None, allow_patterns=(), ignore_patterns=()):
        source = tmp_path / "remote" / name.split("/")[1]
        target = tmp_path / "cache" / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT
        target.mkdir(parents=True, exist_ok=True)
        files = [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        for file in filter_repo_objects(files, **patterns):
            # As in the hub's cache: a file is named by its digest, with a link to it.
            blob = target.parents[1] / "blobs" / sha256(source / file)
            blob.parent.mkdir(exist_ok=True)
            shutil.copyfile(source / file, blob)
            (target / file).parent.mkdir(exist_ok=True)
            (target / file).unlink(missing_ok=True)
            (target / file).symlink_to(blob)
            downloaded.append(f"{name}/{file}")
        return str(target)

    def parse_safetensors_file_metadata(name, file, revision=None):
        path = tmp_path / "remote" / name.split("/")[1] / file
        infos = {}
        for key, info in TensorFile(path).tensors.items():
            offsets = (0, info.nbytes)
            infos[key] = TensorInfo(info.dtype, list(info.shape), data_offsets=offsets)
        return SafetensorsFileMetadata(metadata={}, tensors=infos)

    def model_info(name, revision, timeout, files_metadata):
        assert revision == COMMIT
        folder = tmp_path / "remote" / name.split("/")[1]
        siblings = []
        for path in folder.rglob("*"):
            if path.is_file():
                file = path.relative_to(folder).as_posix()
                siblings.append(RepoSibling(rfilename=file, blob_id=sha256(path)))
        return SimpleNamespace(siblings=siblings)

    for stand_in in (snapshot_download, parse_safetensors_file_metadata, model_info):
        monkeypatch.setattr(huggingface_hub, stand_in.__name__, stand_in)
    return downloaded


def plan(*tasks):
    names = [f"owner/{task}" for task in tasks]
    return plan_merge("owner/base", names, None, FusionConfig(**RANKS))


def weights(files):
    """The names of files that hold weights."""
    return [name for name in files if name.endswith(".safetensors")]


def test_a_plan_downloads_no_weights_and_a_merge_gives_the_bits_of_the_folders(tmp_path, hub):
    planned = plan("task1", "task2")
    assert hub
    assert not weights(hub)
    out = merge_folders(planned, tmp_path / "out")
    assert same(tensors(out), tensors(merge(tmp_path / "remote", ["task1", "task2"])))
    card = metadata_load(out / "README.md")
    assert card["base_model"] == ["owner/base", "owner/task1", "owner/task2"]
    assert card["base_model_relation"] == "merge"
    assert card["license"] == "mit"


def test_a_base_in_fp8_is_planned_by_headers_alone(tmp_path, hub):
    quantise(tmp_path / "remote" / "base")
    planned = plan("task1")
    assert planned.base.remote
    predicted = planned.disk_bytes
    result = tensors(merge_folders(planned, tmp_path / "out"))
    assert same(result, tensors(merge(tmp_path / "remote", ["task1"])))
    assert predicted == sum(value.nbytes for value in result.values())


def test_weights_that_are_here_already_need_no_headers_from_the_hub(tmp_path, hub, monkeypatch):
    planned = plan("task1", "task2")
    expected = tensors(merge_folders(planned, tmp_path / "out"))
    task = manifest(tmp_path / "out")["inputs"]["task 0"]
    assert (task["name"], task["revision"]) == ("owner/task1", COMMIT)
    assert task["hub"] == {WEIGHTS: sha256(tmp_path / "remote" / "task1" / WEIGHTS)}
    assert task["fingerprint"] == Checkpoint.open(str(tmp_path / "remote" / "task1")).fingerprint
    monkeypatch.setattr(huggingface_hub, "model_info", never)
    monkeypatch.setattr(huggingface_hub, "parse_safetensors_file_metadata", never)
    again = plan("task1", "task2")
    assert merge_folders(again, tmp_path / "out") == tmp_path / "out"  # known as the finished run
    assert same(tensors(merge_folders(again, tmp_path / "out2")), expected)


def test_weights_that_are_here_need_no_hub_though_an_index_names_others(tmp_path, hub, monkeypatch):
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "remote" / "task1" / "model.safetensors.index.json").write_text(json.dumps(index))
    out = merge_folders(plan("task1"), tmp_path / "out")
    assert f"owner/task1/{WEIGHTS}" in hub
    monkeypatch.setattr(huggingface_hub, "model_info", never)
    assert merge_folders(plan("task1"), out) == out


def test_what_the_hub_says_of_its_files_tells_other_content_before_any_download(tmp_path, hub):
    remote = tmp_path / "remote"
    out = tmp_path / "out"
    merge_folders(plan("task1"), out)
    shutil.copytree(remote / "task1", remote / "moved")
    shutil.copytree(remote / "task1", remote / "again")
    shutil.copyfile(remote / "task2" / WEIGHTS, remote / "again" / WEIGHTS)
    shutil.rmtree(tmp_path / "cache")
    hub.clear()
    assert merge_folders(plan("moved"), out) == out
    message = r'out. exists: inputs.task 0.name is "owner/task1" there and "owner/again" here'
    with pytest.raises(ValueError, match=message):
        merge_folders(plan("again"), out)
    with pytest.raises(ValueError, match="owner/moved' is also task 'owner/task1'"):
        plan("task1", "moved")
    (remote / "task1").rename(remote / "was_task1")
    (remote / "again").rename(remote / "task1")
    message = r"out. exists: the content of task 0 'owner/task1' is not the same"
    with pytest.raises(ValueError, match=message):
        merge_folders(plan("task1"), out)
    assert not weights(hub)


def test_models_of_a_mirror_that_gives_no_digests_are_not_taken_for_one(tmp_path, hub, monkeypatch):
    model_info = huggingface_hub.model_info

    def without_digests(*args, **kwargs):
        repository = model_info(*args, **kwargs)
        names = [file.rfilename for file in repository.siblings]
        return SimpleNamespace(siblings=[RepoSibling(rfilename=name) for name in names])

    monkeypatch.setattr(huggingface_hub, "model_info", without_digests)
    planned = plan("task1", "task2")
    assert not weights(hub)
    result = tensors(merge_folders(planned, tmp_path / "out"))
    assert same(result, tensors(merge(tmp_path / "remote", ["task1", "task2"])))


def test_after_the_download_a_hub_model_is_known_as_a_copy_in_a_folder_is(tmp_path, hub):
    remote = tmp_path / "remote"
    merge(remote, ["task1"], "one")
    options = FusionConfig(**RANKS)

    def going_on(base, task):
        return plan_merge(f"owner/{base}", [f"owner/{task}"], str(remote / "one"), options)

    planned = going_on("base", "task2")
    assert planned.base.remote
    out = merge_folders(planned, tmp_path / "out")
    assert same(tensors(out), tensors(merge(remote, ["task2"], merged="one")))
    assert going_on("base", "task2").warnings == []
    with pytest.raises(ValueError, match=r"task1' is in '.*one' already, as step 1 \('task1'\)"):
        merge_folders(going_on("base", "task1"), tmp_path / "out2")


def test_a_whole_model_with_an_adapters_config_beside_it_is_a_whole_model(tmp_path, hub):
    expected = tensors(merge(tmp_path / "remote", ["task1"]))
    (tmp_path / "remote" / "task1" / "adapter_config.json").write_text("{}")
    planned = plan("task1")
    assert same(tensors(merge_folders(planned, tmp_path / "out")), expected)


def test_a_module_of_the_base_with_pickled_weights_is_refused_as_one_in_a_folder_is(tmp_path, hub):
    encoder(tmp_path / "remote" / "base")
    dense = tmp_path / "remote" / "base" / "2_Dense"
    (dense / "model.safetensors").rename(dense / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"2_Dense/pytorch_model\.bin' holds pickled weights"):
        plan("task1")


@pytest.mark.parametrize(
    ("task", "command"),
    [
        ("task1", "hf download owner/task1 --local-dir FOLDER"),
        ("task1@v2", "hf download owner/task1 --revision v2 --local-dir FOLDER"),
    ],
)
def test_a_pickled_adapter_is_refused_with_what_gets_that_revision(tmp_path, hub, task, command):
    remote = tmp_path / "remote" / "task1"
    (remote / "adapter_config.json").write_text("{}")
    (remote / "model.safetensors").rename(remote / "adapter_model.bin")
    with pytest.raises(ValueError, match=f"`{command}`, and give"):
        plan(task)


def test_an_adapter_and_the_index_of_a_whole_model_are_refused(tmp_path, hub):
    remote = tmp_path / "remote" / "task1"
    (remote / "adapter_config.json").write_text("{}")
    shutil.copyfile(remote / "model.safetensors", remote / "adapter_model.safetensors")
    (remote / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    with pytest.raises(ValueError, match=r"holds an adapter .* and a whole model"):
        plan("task1")


def test_a_plan_refuses_what_does_not_fit_before_any_download(tmp_path, hub):
    next((tmp_path / "remote" / "task2").glob("*.safetensors")).unlink()
    message = "'owner/task2' holds no safetensors file; get it with `hf download owner/task2 "
    with pytest.raises(ValueError, match=message):
        plan("task1", "task2")
    assert not weights(hub)


def test_weights_of_any_name_are_read_from_the_hub_as_from_a_folder(tmp_path, hub):
    expected = tensors(merge(tmp_path / "remote", ["task1"]))
    folder = tmp_path / "remote" / "task1"
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    planned = plan("task1")
    assert not weights(hub)
    assert same(tensors(merge_folders(planned, tmp_path / "out")), expected)


def test_without_a_network_the_cause_is_told_in_one_line(monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("Got: ConnectError\nNetwork is unreachable.\n")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    message = (
        "'owner/base' is no folder, and the hub can't give it: Got: ConnectError "
        "Network is unreachable."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        plan("task1")


def test_a_network_that_breaks_as_weights_are_downloaded_is_told_as_an_error(
    tmp_path, hub, monkeypatch
):
    class ClosedConnectionError(Exception):
        """As httpx has it, whose errors are no OSError."""

    def broken(*args, **kwargs):
        raise ClosedConnectionError("peer closed connection")

    planned = plan("task1")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    with pytest.raises(ValueError, match=r"owner/base'.* the hub can't give it: peer closed"):
        merge_folders(planned, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("./maht", "no folder './maht'"),
        ("models/code/last/step", "no folder 'models/code/last/step'"),
        ("/nowhere", "no folder '/nowhere'"),
        ("math/model.safetensors", "'math/model.safetensors' is a file: name the folder that it"),
    ],
)
def test_a_path_that_is_no_folder_is_refused_without_asking_the_hub(
    tmp_path, monkeypatch, name, says
):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", never)
    monkeypatch.chdir(tmp_path)
    save_stream(tmp_path, llama(), tasks=0)
    (tmp_path / "math").mkdir()
    (tmp_path / "math" / "model.safetensors").touch()
    with pytest.raises(ValueError, match=f"^{re.escape(says)}"):
        plan_merge("base", [name])


@pytest.mark.parametrize("method", ["best", "nufilt"])
def test_a_plan_to_go_on_from_the_hub_downloads_no_state_and_the_merge_has_its_bits(
    tmp_path, hub, method
):
    remote = tmp_path / "remote"
    for folder in ("base", "task1", "task2"):
        for path in (remote / folder).glob("*.safetensors"):
            narrow = {key: value.bfloat16() for key, value in load_file(path).items()}
            save_file(narrow, path, {"format": "pt"})
    merge(remote, ["task1"], "one", method=method, settings={"state": True})
    options = None
    if method == "nufilt":
        options = FusionConfig(**RANKS)
    settings = Settings(state=True)
    planned = plan_merge(
        "owner/base", ["owner/task2"], "owner/one", options, None, settings, method=method
    )
    assert planned.state.source.remote
    assert not weights(hub)
    out = merge_folders(planned, tmp_path / "out")
    expected = merge(remote, ["task2"], merged="one", method=method, settings={"state": True})
    assert same(tensors(out), tensors(expected))
    assert same(load_file(out / STATE), load_file(expected / STATE))


def test_a_head_is_loaded_without_the_state(tmp_path, hub):
    save_classifiers(tmp_path / "remote", "vit")
    left_out = {"exclude_modules": ["pooler.dense"]}
    merge(tmp_path / "remote", ["few"], "one", method="best", **left_out)
    model = load_task("owner/one", "few")
    expected = load_task(tmp_path / "remote" / "one", "few")
    assert same(model.state_dict(), expected.state_dict())
    assert "owner/one/heads/few.safetensors" in hub
    assert f"owner/one/{STATE}" not in hub


def test_weights_beside_an_adapter_on_the_hub_are_refused_without_a_download(tmp_path, hub):
    save_adapter(tmp_path / "remote", llama())
    (tmp_path / "remote" / "adapter").rename(tmp_path / "remote" / "lora")
    beside = tmp_path / "remote" / "lora" / "non_lora_trainables.bin"
    beside.touch()
    with pytest.raises(ValueError, match=r"owner/lora' has 'non_lora_trainables\.bin' beside it"):
        plan("lora")
    assert not any(file.endswith(beside.name) for file in hub)
    beside.unlink()
    plan("lora")


def test_adapters_become_an_adapter_without_a_file_of_their_base(tmp_path, hub):
    remote = tmp_path / "remote"
    for number, name in enumerate(("math", "code")):
        base = type(llama()).from_pretrained(remote / "base")
        random_adapter(remote / name, tmp_path / f"{name}_whole", base, number)
        change_json(remote / name / "adapter_config.json", base_model_name_or_path="owner/base")
    settings = Settings(adapter=True)
    names = ["owner/math", "owner/code"]
    planned = plan_merge(None, names, None, FusionConfig(**RANKS), settings=settings)
    out = merge_folders(planned, tmp_path / "out")
    assert {file.rpartition("/")[0] for file in hub} == set(names)
    expected = merge(remote, ["math", "code"], "here", settings={"adapter": True})
    assert same(tensors(out), tensors(expected))
    assert metadata_load(out / "README.md")["base_model"] == "owner/base"
    for folder in (out, expected):
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "owner/base"
