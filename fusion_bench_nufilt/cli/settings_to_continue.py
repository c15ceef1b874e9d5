"""What a merge takes over from the earlier merge that it goes on from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusion_bench_nufilt.merge import Settings
from fusion_bench_nufilt.methods import find_method
from fusion_bench_nufilt.models import TargetConfig
from fusion_bench_nufilt.models.checkpoint import Checkpoint
from fusion_bench_nufilt.utils.manifest import read_manifest
from fusion_bench_nufilt.utils.options import with_scope
from fusion_bench_nufilt.utils.schemas import Input, Manifest


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
    base = made.get("inputs", {}).get("base", {})
    if "name" not in base:
        raise ValueError(f"--base must be given: '{merged}' does not say what it was made from")
    found = find_model(base, folder.absolute().parent)
    if Path(found).is_dir() or "/" in base["name"]:  # the hub's names have a slash
        return found
    raise ValueError(
        f"--base must be given: '{found}', which '{merged}' was made from, is neither here nor "
        "beside it"
    )


def find_model(model: Input, beside: Path) -> str:
    """Return the name of a model that a manifest names: on the hub at the same revision, or a
    folder here or beside the result.
    """
    name = model["name"]
    if "revision" in model:
        return f"{name.partition('@')[0]}@{model['revision']}"
    if not Path(name).is_dir() and (beside / name).is_dir():
        return str(beside / name)
    return name
