"""The manifest ``nufilt.json`` beside every merged model: what is in it, and what it was made of.

A step of a run and a merge of folders write the same fields, so that either can go on from the other's result.
"""

from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt
from typing_extensions import TypedDict

from .files import MANIFEST
from .json_files import Count, read_json

#: The file with the state that a method needs to go on, relative to the folder of the merged model.
STATE_FILE = "nufilt_state/model.safetensors"


class Fingerprint(TypedDict):
    size: int  # of a file, in bytes
    sha256: str  # of its content


class Input(TypedDict, total=False):
    name: str  # of a model that was read
    source: Any  # of a model pool's entry: a folder, a hub name or a configuration
    kind: str  # a whole model or an adapter
    sha256: str  # digest of its weights, or of those that were read
    tensors_read: int


class Manifest(TypedDict, total=False):
    """The fields that are read again; there are more, for people."""

    method: str
    step: Count  # the number of models that were merged
    tasks: list[str]  # their names, in merging order
    order: list[str]  # all models of the stream, of which `tasks` are the first ones
    inputs: dict[str, Input]
    settings: dict[str, Any]
    mean_counts: dict[str, NonNegativeInt]  # models in the mean of a tensor, where that is not `step`
    state: dict[str, str]  # digests of the tensors in STATE_FILE, by name
    files: dict[str, Fingerprint]
    merge_seconds: list[float]
    run: Any  # of a merge of folders: a digest of all that it depends on
    coverage: dict[str, Any]


def read_manifest(folder: Path, advice: str = "fetch it again") -> Manifest | None:
    """Read the manifest of a folder, None if it has none; a ValueError names a damaged field and gives the advice."""
    return read_json(folder / MANIFEST, Manifest, advice)


def check_state(manifest: Manifest, name: str, found: str, file: Path) -> None:
    """Refuse a tensor of the state, read from a file, whose digest is not what the manifest says."""
    if manifest.get("state", {}).get(name, found) != found:
        raise ValueError(f"'{file}': '{name}' is not what was saved (its sha256 differs); merge again from the start")
