"""Merged models on disk: their weights, the state to go on from, the manifest that describes both,
and the heads beside them.

A step of a run and a merge of folders write the same manifest, so that either can go on from the
other's result. A result is used again only while all that it depends on is the same as its
description says; otherwise, what differs is named (:func:`differences`).
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, reduce
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

from .files import (
    CARD,
    MANIFEST,
    Fingerprint,
    Head,
    Input,
    Manifest,
    atomic_folder,
    file_name,
    is_inside,
    read_json,
    write_json,
    write_text,
)
from .tensors import TensorFile, file_checksum

#: The file with the state that a method needs to go on, relative to the folder of the merged model.
STATE_FILE = "nufilt_state/model.safetensors"


def state_key(name: str, part: str = "weight") -> str:
    """Return the key of a part of what is kept of a layer, or of a tensor outside the layers."""
    return f"{name}.state.{part}"


def save_checkpoint(
    model: nn.Module,
    folder: Path,
    about: Mapping[str, Any],
    state: Mapping[str, Tensor],
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Save a model for ``from_pretrained`` (any other module as ``model.safetensors``), atomically
    and without pickle.

    An existing folder is replaced. ``about`` is the manifest's content besides the digests of the
    files, ``state`` the tensors to go on from, and ``files`` the content of further files by path.
    """
    with described_folder(folder, about) as draft:
        save_pretrained = getattr(model, "save_pretrained", None)
        if callable(save_pretrained):
            save_pretrained(draft, safe_serialization=True)
            _name_untied_head(model, draft / "config.json")
        else:
            save_model(model, str(draft / "model.safetensors"))
        if state:
            file = draft / STATE_FILE
            file.parent.mkdir()
            save_file({name: value.cpu().contiguous() for name, value in state.items()}, file)
        write_files(draft, files or {})


def _name_untied_head(model: Any, config: Path) -> None:
    """Have a config.json say that the output head has a weight of its own.

    transformers 5 writes that the head of every T5 is tied, and transformers 4 would replace it by
    the embeddings.
    """
    if not (hasattr(model, "get_input_embeddings") and hasattr(model, "get_output_embeddings")):
        return
    embeddings = getattr(model.get_input_embeddings(), "weight", None)
    head = getattr(model.get_output_embeddings(), "weight", None)
    if embeddings is None or head is None or embeddings is head:
        return
    content = json.loads(config.read_bytes())
    if content.get("tie_word_embeddings"):
        content["tie_word_embeddings"] = False
        write_text(config, json.dumps(content, indent=2) + "\n")


def load_checkpoint(model: nn.Module, folder: Path) -> None:
    """Load the weights that :func:`save_checkpoint` saved from such a model."""
    from_pretrained = getattr(model, "from_pretrained", None)
    if callable(from_pretrained):
        # The widest dtype that occurs, so that each weight is read exactly; a model may have
        # several dtypes.
        dtype = reduce(torch.promote_types, {parameter.dtype for parameter in model.parameters()})
        saved = from_pretrained(folder, dtype=dtype)
        model.load_state_dict(saved.state_dict())
    else:
        load_model(model, folder / "model.safetensors")


def load_state(folder: Path) -> dict[str, Tensor]:
    """Return the state that was saved beside a merged model; {} if its method keeps none."""
    file = folder / STATE_FILE
    if not file.is_file():
        return {}
    return load_file(file)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@contextmanager
def described_folder(
    folder: Path, about: Mapping[str, Any], name: str = MANIFEST
) -> Iterator[Path]:
    """Yield a folder to be filled, which becomes ``folder`` as in
    :func:`~fusion_bench_nufilt.utils.files.atomic_folder`, with a manifest.
    """
    with atomic_folder(folder) as draft:
        yield draft
        write_manifest(draft, about, name)


def write_manifest(
    folder: Path,
    about: Mapping[str, Any],
    name: str = MANIFEST,
    fingerprints: Mapping[str, Fingerprint] | None = None,
) -> None:
    """Write a folder's manifest, with the fingerprints of all other files, as far as they are not
    given.
    """
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    files = dict(fingerprints or {})
    files |= _fingerprints(folder, sorted(set(names) - files.keys()))
    write_json(folder / name, {**about, "files": dict(sorted(files.items()))})


def read_manifest(folder: Path, advice: str = "merge or fetch it again") -> Manifest:
    """Return the manifest of a merged model, empty if it has none; a ValueError names a damaged
    field and gives the advice.
    """
    return read_json(folder / MANIFEST, Manifest, advice) or Manifest()


def verify_files(
    folder: Path,
    manifest: Mapping[str, Any],
    advice: str,
    names: Iterable[str] | None = None,
    *,
    digests: bool = True,
    manifest_name: str = MANIFEST,
) -> None:
    """Raise a ValueError that names a file which is missing or changed; without ``digests``, sizes
    alone tell.

    By default, the files are all that the manifest lists except the model card, which people edit.
    """
    files = manifest.get("files", {})
    if names is None:
        if not files:
            raise ValueError(f"'{folder}': {manifest_name} does not list its files; {advice}")
        names = files.keys() - {CARD}
    names = sorted(names)
    for name in names:
        path = PurePosixPath(name)
        # A manifest from elsewhere must not make this read a file outside the folder.
        if path.is_absolute() or ".." in path.parts or not (folder / path).is_file():
            raise ValueError(f"'{folder}' lacks {name}; {advice}")
    for name in names:
        if name not in files:
            raise ValueError(
                f"'{folder}': {manifest_name} does not list {name} among its files; {advice}"
            )
        if (folder / name).stat().st_size != files[name]["size"]:
            raise ValueError(
                f"'{folder}': {name} is not what was saved (its size differs); {advice}"
            )
    if not digests:
        return
    with ThreadPoolExecutor(8) as pool:  # sums of large files are made without Python's lock
        changes = pool.map(lambda name: _what_changed(folder / name, files[name]), names)
        for name, what in zip(names, changes, strict=True):
            if what:
                raise ValueError(f"'{folder}': {name} is not what was saved ({what}); {advice}")


def _what_changed(file: Path, saved: Fingerprint) -> str:
    """Return what of a file is not as it was saved, empty if nothing is."""
    if "checksums" not in saved:
        return "" if _sha256(file) == saved.get("sha256") else "its sha256 differs"
    end = 0
    for start, stop, checksum in saved["checksums"]:
        is_next = start == end and stop <= saved["size"]
        if not is_next or file_checksum(file, start, stop) != checksum:
            return f"its bytes from {start} to {stop} differ"
        end = stop
    return "" if end == saved["size"] else f"its bytes from {end} on are not known"


def _fingerprints(folder: Path, names: Sequence[str]) -> dict[str, Fingerprint]:
    with ThreadPoolExecutor(8) as pool:
        fingerprints = pool.map(lambda name: _fingerprint(folder / name), names)
        return dict(zip(names, fingerprints, strict=True))


def _fingerprint(file: Path) -> Fingerprint:
    """Return size and SHA-256 of a small file, or the sums of the tensors in a file of weights."""
    size = file.stat().st_size
    if file.suffix != ".safetensors":
        return Fingerprint(size=size, sha256=_sha256(file))
    return Fingerprint(size=size, checksums=TensorFile(file).checksums())


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# Fields of a task's configuration that are dropped: the user's folder, and what the merged model
# decides itself, which is never quantised.
_NOT_KEPT = (
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "compression_config",
)


def add_head(
    heads: dict[str, Head], task: str, modules: list[str], config: Mapping[str, Any]
) -> str:
    """Add a head, which has a file of its own; return its name: the task's, with a number if that
    is taken.
    """
    name = _unused(task, heads)
    stems = {PurePosixPath(head["file"]).stem for head in heads.values()}
    stem = _unused(file_name(re.sub(r"[^\w.-]+", "_", name)), stems)
    kept = {key: value for key, value in config.items() if key not in _NOT_KEPT}
    heads[name] = Head(file=f"heads/{stem}.safetensors", modules=modules, config=kept)
    return name


def _unused(name: str, taken_names: Collection[str]) -> str:
    """Return the name, with the first free number from 2 if it is taken."""
    candidate = name
    number = 2
    while candidate in taken_names:
        candidate = f"{name}-{number}"
        number += 1
    return candidate


def read_heads(folder: Path, manifest: Manifest, task: str | None = None) -> dict[str, bytes]:
    """Return the files of all heads of a result, or of one task's, by path; refuse one that is not
    what was saved.
    """
    advice = "fetch it again"
    heads = manifest.get("heads", {})
    files = [head["file"] for name, head in heads.items() if task in (None, name)]
    verify_files(folder, manifest, advice, files)
    for file in files:
        # A result has them, too, and a link may lead to any file of the user's.
        if not is_inside(folder / file, folder):
            raise ValueError(f"'{folder}': {file} is a link out of the folder; {advice}")
    return {file: (folder / file).read_bytes() for file in files}


class Difference(NamedTuple):
    """A value of a description that is not the stored one."""

    name: str  # its keys, joined by dots, or the noun for it
    stored: Any
    wanted: Any
    reason: str = ""  # what to say where values tell nothing

    def __str__(self) -> str:
        if self.reason:
            return f"{self.name} {self.reason}"
        if _is_digest(self.stored) or _is_digest(self.wanted):  # which tell a reader nothing
            if self.stored is None:
                return f"{self.name} is missing there"
            if self.wanted is None:
                return f"{self.name} is missing here"
            return f"{self.name} is not the same"
        return f"{self.name} is {_short(self.stored)} there and {_short(self.wanted)} here"


def _is_digest(value: Any) -> bool:
    return re.fullmatch(r"[0-9a-f]{64}", str(value)) is not None


def differences(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = ""
) -> list[Difference]:
    """Return what differs between the stored description of a result and that of the result that is
    wanted.
    """
    differing: list[Difference] = []
    for key in {**stored, **wanted}:  # in their order, which a set would not keep
        name = f"{prefix}{key}"
        old = stored.get(key)
        new = wanted.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            differing += differences(old, new, f"{name}.")
        elif old != new:
            differing.append(Difference(name, old, new))
    return differing


def merge_differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Difference]:
    """Return what differs between the descriptions of two merges of folders: their inputs are
    compared by their contents, whatever their names.
    """
    differing: list[Difference] = []
    old_inputs = stored.get("inputs") or {}
    new_inputs = wanted.get("inputs") or {}
    for role in {**old_inputs, **new_inputs}:
        differing += input_differences(role, old_inputs.get(role), new_inputs.get(role))
    return differing + differences(_without_names(stored), _without_names(wanted))


def _without_names(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a merge's description in which its inputs are not named."""
    unnamed = {key: value for key, value in description.items() if key not in ("inputs", "tasks")}
    vocabulary = unnamed.get("vocabulary") or {}
    if "new_tokens" in vocabulary:  # with the names of the models that have each
        unnamed["vocabulary"] = {**vocabulary, "new_tokens": list(vocabulary["new_tokens"])}
    return unnamed


def input_differences(role: str, stored: Input | None, wanted: Input | None) -> list[Difference]:
    """Return what differs between what was the input in a role of a merge, such as ``task 0``, and
    what is now; nothing if one is a copy of the other.
    """
    if stored is None or wanted is None:
        old_name = stored and stored.get("name")
        new_name = wanted and wanted.get("name")
        return [Difference(f"inputs.{role}.name", old_name, new_name)]
    # Of the base of a merge into an adapter, nothing is read.
    if not wanted.keys() - {"name"}:
        return differences({"name": stored.get("name")}, {**wanted}, f"inputs.{role}.")
    differing = []
    if not is_same_model(stored, wanted):
        differing.append(_content_difference(role, stored, wanted))
    if "files" in stored:
        old_files = _digests_of_files(stored)
        new_files = _digests_of_files(wanted)
        differing += differences(old_files, new_files, f"inputs.{role}.files.")
    return differing


def inputs_at_other_times(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return the names of the inputs of a merge whose files have another size or time than in an
    earlier description of it.
    """
    names = []
    for role, model in wanted["inputs"].items():
        earlier = stored["inputs"][role].get("stamps")
        # A model that is still on the hub has none.
        if earlier and "stamps" in model and earlier != model["stamps"]:
            names.append(model["name"])
    return names


def _digests_of_files(model: Input) -> dict[str, str]:
    """Return the digests of the files beside the weights of a model."""
    files = model.get("files", {})
    return {name: file["sha256"] for name, file in files.items() if "sha256" in file}


def is_same_model(one: Input, other: Input) -> bool | None:
    """Tell by their content whether two inputs are the same weights, by whatever names; None if
    nothing can be said, since they are not known by the same.
    """
    digests = [{model.get("fingerprint"), model.get("loaded")} - {None} for model in (one, other)]
    if digests[0] & digests[1]:
        return True
    for key in ("fingerprint", "loaded"):
        if key in one and key in other:
            return False
    # One of them is still on the hub.
    if "hub" in one and "hub" in other:
        return one["hub"] == other["hub"]
    if "revision" in one and one["revision"] == other.get("revision"):
        repositories = {model["name"].partition("@")[0] for model in (one, other)}
        if len(repositories) == 1:
            return True
    return None


def is_same_task(one: Input, other: Input) -> bool:
    """Tell whether two inputs are known to be the same task: the same weights, and of adapters also
    the same scaling.
    """
    if not is_same_model(one, other):
        return False
    scalings = []
    for model in (one, other):
        scalings.append(_digests_of_files(model).get("adapter_config.json"))
    return scalings[0] == scalings[1]


def base_of(manifest: Manifest) -> Input | None:
    """Return what the base of a merged model is known by, if its manifest says that."""
    inputs = manifest.get("inputs", {})
    return inputs.get("base") or inputs.get("_pretrained_")  # as a model pool calls it


def is_made_from(folder: Path, base: Input) -> bool:
    """Tell whether a folder has a result of a merge into this base."""
    saved = base_of(read_manifest(folder))
    return saved is not None and is_same_model(saved, base) is True


def tasks_of(manifest: Manifest) -> list[Input]:
    """Return what the tasks in a merged model are known by, in merging order; of those that are not
    known by their content, the names.
    """
    names = manifest.get("tasks", [])
    if len(manifest.get("task_inputs", [])) == len(names):
        return manifest.get("task_inputs", [])
    # A run of a model pool has its models by their names.
    inputs = manifest.get("inputs", {})
    tasks = []
    for name in names:
        task = inputs.get(name, Input()).copy()
        task["name"] = name
        tasks.append(task)
    return tasks


def _content_difference(role: str, stored: Input, wanted: Input) -> Difference:
    """Return the difference of two inputs that are not the same model, by what tells a reader
    most.
    """
    for key in ("name", "revision"):
        old = stored.get(key)
        new = wanted.get(key)
        if old and new and old != new:
            return Difference(f"inputs.{role}.{key}", old, new)
    reason = "is not the same"
    if is_same_model(stored, wanted) is None:
        reason = "is not known before its download"
    label = f"the content of {role} '{wanted.get('name')}'"
    old = stored.get("fingerprint")
    new = wanted.get("fingerprint")
    return Difference(label, old, new, reason)


def in_one_line(differing: list[Difference]) -> str:
    """Name the first three differences."""
    return "; ".join(map(str, differing[:3]))


def _short(value: Any) -> str:
    text = json.dumps(value)
    if len(text) > 80:
        return f"{text[:77]}..."
    return text


def combined_digest(named_values: Iterable[tuple[str, object]]) -> str:
    """Return one digest of named values, such as digests of tensors, in any order."""
    lines = sorted(f"{named_value}\n" for named_value in named_values)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


_PACKAGES = ("fusion-bench-nufilt", "fusion-bench", "torch", "transformers", "safetensors")


@cache
def package_versions() -> dict[str, str]:
    return {package: version(package) for package in _PACKAGES}
