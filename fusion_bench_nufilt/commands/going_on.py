"""What a merge takes over from the earlier merge that it goes on from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusion_bench_nufilt.core.options import with_scope
from fusion_bench_nufilt.layers import TargetConfig
from fusion_bench_nufilt.merge import Settings
from fusion_bench_nufilt.merge.sources.checkpoint import Checkpoint
from fusion_bench_nufilt.methods import find_method
from fusion_bench_nufilt.storage.checkpoint import read_manifest
from fusion_bench_nufilt.storage.schemas import Manifest


def inherited(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base and the settings of the model to go on from, except what the user says.

    If that is another method, the earlier one's options are left out.
    """
    if not (merged := said.get("merged")):
        return {}
    folder = Checkpoint.open(merged).folder
    made = read_manifest(folder) or Manifest()
    before, found = todays_settings(made.get("settings", {})), {}
    if method := str(
        before.get("method", before.get("layer_method", ""))
    ):  # the latter in a run of fusion_bench
        same = said.get("method", method) == method
        kinds = (
            (find_method(method).Options, TargetConfig, Settings)
            if same
            else (TargetConfig, Settings)
        )
        names = with_scope(kinds, "stream", "merge")
        found = {"method": method} | {name: before[name] for name in names if name in before}
        if found.get("tokenizer") not in ("base", "union"):  # it names a task
            found.pop("tokenizer", None)
        found = {name: value for name, value in found.items() if name not in said}
    if not said.get("base"):
        found["base"] = _base(merged, folder, made)
    return found


def todays_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a manifest; an earlier version had `accumulate` beside `state`."""
    found = dict(settings)
    accumulate = found.pop("accumulate", None)
    if accumulate == "float32":
        found["state"] = True
    elif accumulate == "stored" and found.get("state"):  # its default, of which NUFILT kept nothing
        del found["state"]
    return found


def _base(merged: str, folder: Path, made: Manifest) -> str:
    name = made.get("inputs", {}).get("base", {}).get("name")
    if name is None:
        raise ValueError(f"--base must be given: '{merged}' does not say what it was made from")
    if (
        Path(base := find_model(name, folder.absolute().parent)).is_dir() or "/" in name
    ):  # the hub's names have a slash
        return base
    raise ValueError(
        f"--base must be given: '{name}', which '{merged}' was made from, is neither here nor "
        "beside it"
    )


def find_model(name: str, beside: Path) -> str:
    """Return the path of a model that a manifest names, here or in a folder, or else its name."""
    return str(beside / name) if not Path(name).is_dir() and (beside / name).is_dir() else name
