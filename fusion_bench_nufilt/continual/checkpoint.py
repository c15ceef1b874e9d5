"""Files that are either whole or not there."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_model
from torch import nn


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


def save_checkpoint(model: nn.Module, folder: Path) -> None:
    """Save a model for ``from_pretrained`` (any other module as ``model.safetensors``), atomically, without pickle."""
    with atomic_folder(folder) as temporary:
        save_pretrained = getattr(model, "save_pretrained", None)
        if callable(save_pretrained):
            save_pretrained(temporary, safe_serialization=True)
        else:
            save_model(model, str(temporary / "model.safetensors"))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
