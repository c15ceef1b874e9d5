"""Files that are either whole or not there, and checkpoints that know whether they are still whole."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import nn

#: Written beside every merged model: ``step`` and ``tasks`` say what is in it, ``files`` the digests of its files.
MANIFEST = "nufilt.json"


@contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """A temporary path beside ``target``; the file written there takes its place when the block ends well."""
    temporary = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(target: Path, text: str) -> None:
    """Write a text file, atomically."""
    with atomic_file(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside ``target`` that takes its place when the block ends well, and is removed otherwise."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield temporary
        for file in temporary.rglob("*"):
            _sync(file)
        if target.exists():
            shutil.rmtree(target)
        temporary.chmod(0o755)  # mkdtemp's folders are private
        temporary.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save_checkpoint(model: nn.Module, folder: Path, about: Mapping[str, Any]) -> None:
    """Save a model for ``from_pretrained`` (any other module as ``model.safetensors``), atomically, without pickle.

    Args:
        model: what to save.
        folder: where; what is there is replaced.
        about: what the manifest says beside the digests of the files.
    """
    with atomic_folder(folder) as temporary:
        save_pretrained = getattr(model, "save_pretrained", None)
        if callable(save_pretrained):
            save_pretrained(temporary, safe_serialization=True)
        else:
            save_model(model, str(temporary / "model.safetensors"))
        files = {path.name: _fingerprint(path) for path in sorted(temporary.iterdir())}
        (temporary / MANIFEST).write_text(json.dumps({**about, "files": files}, indent=1))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, once every file is found to be as it was saved.

    Raises:
        ValueError: a file is missing, cut short or changed; names it.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"checkpoint '{folder}' has no readable {MANIFEST}: {error}") from error
    for name, expected in manifest["files"].items():
        if not (folder / name).is_file():
            raise ValueError(f"checkpoint '{folder}' lacks {name}")
        # The size first: it is known at once.
        if (folder / name).stat().st_size != expected["size"] or _fingerprint(folder / name) != expected:
            raise ValueError(f"checkpoint '{folder}': {name} is not what was saved (size or sha256 differs)")
    return manifest


def load_checkpoint(model: nn.Module, folder: Path) -> None:
    """Give a model the weights of a checkpoint that :func:`save_checkpoint` wrote of one like it."""
    from_pretrained = getattr(model, "from_pretrained", None)
    if callable(from_pretrained):
        # The widest type that occurs, so that each weight is read exactly; a model may have several.
        dtype = reduce(torch.promote_types, {parameter.dtype for parameter in model.parameters()})
        model.load_state_dict(from_pretrained(folder, dtype=dtype).state_dict())
    else:
        load_model(model, folder / "model.safetensors")


def _fingerprint(file: Path) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
            size += len(block)
    return {"size": size, "sha256": digest.hexdigest()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
