"""Merged models on disk: their weights, the state to go on from, and the manifest that describes
both.

A step of a run and a merge of folders write the same manifest, so that either can go on from the
other's result.
"""

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, reduce
from importlib.metadata import version
from itertools import chain, count
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

from .files import CARD, MANIFEST, atomic_folder, read_json, write_json, write_text
from .schemas import Fingerprint, Head, Manifest
from .tensors import digest

_PACKAGES = ("fusion-bench-nufilt", "fusion-bench", "torch", "transformers", "safetensors")

#: The file with the state that a method needs to go on, relative to the folder of the merged model.
STATE_FILE = "nufilt_state/model.safetensors"


def read_manifest(folder: Path, advice: str = "fetch it again") -> Manifest | None:
    """Return the manifest of a folder, if it has one; a ValueError names a damaged field and gives
    the advice.
    """
    return read_json(folder / MANIFEST, Manifest, advice)


# Fields of a task's configuration that are dropped: the user's folder, and what the merged model
# decides itself.
_NOT_KEPT = ("_name_or_path", "dtype", "torch_dtype")


def add_head(
    heads: dict[str, Head], task: str, modules: list[str], config: Mapping[str, Any]
) -> str:
    """Add a head, which has a file of its own; return its name: the task's, with a number if that
    is taken.
    """
    name = _unused(task, heads)
    stem = _unused(
        re.sub(r"[^\w.-]+", "_", name),
        {PurePosixPath(head["file"]).stem for head in heads.values()},
    )
    kept = {key: value for key, value in config.items() if key not in _NOT_KEPT}
    heads[name] = Head(file=f"heads/{stem}.safetensors", modules=modules, config=kept)
    return name


def _unused(name: str, others: Collection[str]) -> str:
    numbered = (f"{name}-{number}" for number in count(2))
    return next(each for each in chain([name], numbered) if each not in others)


def read_heads(folder: Path, manifest: Manifest, task: str | None = None) -> dict[str, bytes]:
    """Return the files of all heads of a result, or of one task's, by path; refuse one that is not
    what was saved.
    """
    files = [
        head["file"] for name, head in manifest.get("heads", {}).items() if task in (None, name)
    ]
    verify_files(folder, manifest, "fetch it again", files)
    return {file: (folder / file).read_bytes() for file in files}


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
    with atomic_folder(folder) as temporary:
        save_pretrained = getattr(model, "save_pretrained", None)
        if callable(save_pretrained):
            save_pretrained(temporary, safe_serialization=True)
            _name_untied_head(model, temporary / "config.json")
        else:
            save_model(model, str(temporary / "model.safetensors"))
        if state:
            (temporary / STATE_FILE).parent.mkdir()
            save_file(
                {name: value.cpu().contiguous() for name, value in state.items()},
                temporary / STATE_FILE,
            )
        write_files(temporary, files or {})
        write_manifest(temporary, about)


def _name_untied_head(model: Any, config: Path) -> None:
    """Have a config.json say that the output head has a weight of its own.

    transformers 5 writes that the head of every T5 is tied, and transformers 4 would replace it by
    the embeddings.
    """
    heads = [
        getattr(model, f"get_{side}_embeddings", lambda: None)() for side in ("input", "output")
    ]
    weights = [getattr(head, "weight", None) for head in heads]
    if all(weight is not None for weight in weights) and weights[0] is not weights[1]:
        content = json.loads(config.read_text())
        if content.get("tie_word_embeddings"):
            write_text(
                config, json.dumps({**content, "tie_word_embeddings": False}, indent=2) + "\n"
            )


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def write_manifest(folder: Path, about: Mapping[str, Any]) -> None:
    """Write a folder's manifest, with digests of all other files."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    files = _fingerprints(folder, sorted(names))
    write_json(folder / MANIFEST, {**about, "files": files})


def read_whole_checkpoint(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint; a ValueError names a file that is missing, cut short or
    changed.
    """
    advice = "the step can be made again"
    manifest = read_manifest(folder, advice)
    if manifest is None or "files" not in manifest:
        raise ValueError(f"checkpoint '{folder}' has no {MANIFEST} that lists its files")
    verify_files(folder, manifest, advice)
    return manifest


def verify_files(
    folder: Path,
    manifest: Manifest,
    advice: str,
    names: Iterable[str] | None = None,
    *,
    digests: bool = True,
) -> None:
    """Raise a ValueError that names a file which is missing or changed; without ``digests``, sizes
    alone tell.

    By default, the files are all that the manifest lists except the model card, which people edit.
    A manifest of an earlier version, which lists none, passes.
    """
    if (files := manifest.get("files")) is None:
        return
    wanted = sorted(files.keys() - {CARD} if names is None else names)
    for name in wanted:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not (folder / path).is_file():
            raise ValueError(f"'{folder}' lacks {name}; {advice}")
        if name not in files or (folder / path).stat().st_size != files[name]["size"]:
            raise ValueError(
                f"'{folder}': {name} is not what was saved (its size differs); {advice}"
            )
    for name, found in _fingerprints(folder, wanted if digests else []).items():
        if found != files[name]:
            raise ValueError(
                f"'{folder}': {name} is not what was saved (its sha256 differs); {advice}"
            )


def load_checkpoint(model: nn.Module, folder: Path) -> None:
    """Load the weights that :func:`save_checkpoint` saved from such a model."""
    from_pretrained = getattr(model, "from_pretrained", None)
    if callable(from_pretrained):
        # The widest dtype that occurs, so that each weight is read exactly; a model may have
        # several dtypes.
        dtype = reduce(torch.promote_types, {parameter.dtype for parameter in model.parameters()})
        model.load_state_dict(from_pretrained(folder, dtype=dtype).state_dict())
    else:
        load_model(model, folder / "model.safetensors")


def load_state(folder: Path) -> dict[str, Tensor]:
    file = folder / STATE_FILE
    return load_file(file) if file.is_file() else {}


def _fingerprints(folder: Path, names: Sequence[str]) -> dict[str, Fingerprint]:
    def fingerprint(name: str) -> Fingerprint:
        with (folder / name).open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            return Fingerprint(size=os.fstat(stream.fileno()).st_size, sha256=sha256)

    with ThreadPoolExecutor(8) as pool:  # digests of large files are computed without Python's lock
        return dict(zip(names, pool.map(fingerprint, names), strict=True))


def model_digest(model: nn.Module | Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and bits of a model's parameters and buffers, in
    any order.
    """
    state = model.state_dict() if isinstance(model, nn.Module) else model
    tensors = ((name, value) for name, value in state.items() if isinstance(value, Tensor))
    return combined_digest(
        (name, [str(value.dtype), tuple(value.shape), digest(value)]) for name, value in tensors
    )


def combined_digest(parts: Iterable[tuple[str, object]]) -> str:
    """Return one digest of named parts, such as digests of tensors, in any order."""
    lines = sorted(f"{part}\n" for part in parts)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@cache
def package_versions() -> dict[str, str]:
    return {package: version(package) for package in _PACKAGES}
