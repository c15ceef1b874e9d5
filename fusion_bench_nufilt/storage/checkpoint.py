"""Checkpoints that know whether they are still whole."""

import hashlib
import json
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from pydantic import FiniteFloat
from safetensors.torch import load_model, save_model
from torch import nn
from typing_extensions import TypedDict

from fusion_bench_nufilt.storage.files import MANIFEST, atomic_folder
from fusion_bench_nufilt.storage.json_files import Count, read_json


class Fingerprint(TypedDict):
    """What a file is known by."""

    size: int
    sha256: str


class StepManifest(TypedDict):
    """What is read of the manifest of a step."""

    step: Count
    tasks: list[str]
    merge_seconds: list[FiniteFloat]
    run: dict[str, Any]
    files: dict[str, Fingerprint]


def save_checkpoint(model: nn.Module, folder: Path, about: Mapping[str, Any]) -> None:
    """Save a model for ``from_pretrained`` (any other module as ``model.safetensors``), atomically, without pickle.

    Args:
        model: what to save.
        folder: where; what is there is replaced.
        about: what the manifest says beside ``files``, their sizes and digests.
    """
    with atomic_folder(folder) as temporary:
        save_pretrained = getattr(model, "save_pretrained", None)
        if callable(save_pretrained):
            save_pretrained(temporary, safe_serialization=True)
        else:
            save_model(model, str(temporary / "model.safetensors"))
        files = {path.name: _fingerprint(path) for path in sorted(temporary.iterdir())}
        (temporary / MANIFEST).write_text(json.dumps({**about, "files": files}, indent=1))


def read_manifest(folder: Path) -> StepManifest:
    """The manifest of a checkpoint, once every file is found to be as it was saved.

    Raises:
        ValueError: a file is missing, cut short or changed; names it.
    """
    manifest = read_json(folder / MANIFEST, StepManifest, advice="the step can be made again")
    if manifest is None:
        raise ValueError(f"checkpoint '{folder}' has no {MANIFEST}")
    for name, expected in manifest["files"].items():
        if Path(name).name != name or not (folder / name).is_file():
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


def _fingerprint(file: Path) -> Fingerprint:
    digest, size = hashlib.sha256(), 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
            size += len(block)
    return {"size": size, "sha256": digest.hexdigest()}
