"""What a merge takes over from the earlier merge that it goes on from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusion_bench_nufilt.methods import find_method
from fusion_bench_nufilt.methods.options import Settings, TargetConfig
from fusion_bench_nufilt.models.checkpoint import Checkpoint
from fusion_bench_nufilt.utils.files import Input, Manifest
from fusion_bench_nufilt.utils.manifest import read_manifest
from fusion_bench_nufilt.utils.options import with_scope


def settings_to_continue(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base and the settings of the model to go on from, except what the user says in a
    recipe.

    If that is another method, the earlier one's options are left out.
    """
    merged = recipe.get("merged")
    if not merged:
        return {}
    folder = Checkpoint.open(merged).folder
    manifest = read_manifest(folder) or Manifest()
    before = todays_settings(manifest.get("settings", {}))
    settings: dict[str, Any] = {}
    # In a run of fusion_bench, the key is layer_method.
    method = str(before.get("method", before.get("layer_method", "")))
    if method:
        settings["method"] = method
        kinds: list[type] = [TargetConfig, Settings]
        if recipe.get("method", method) == method:
            kinds.insert(0, find_method(method).Options)
        for name in with_scope(kinds, "stream", "merge"):
            if name in before:
                settings[name] = before[name]
        if settings.get("tokenizer") not in ("base", "union"):  # it names a task
            settings.pop("tokenizer", None)
        settings = {name: value for name, value in settings.items() if name not in recipe}
    if not recipe.get("base"):
        settings["base"] = _base(merged, folder, manifest)
    return settings


def todays_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a manifest; an earlier version had `accumulate` beside `state`."""
    today = dict(settings)
    accumulate = today.pop("accumulate", None)
    if accumulate == "float32":
        today["state"] = True
    elif accumulate == "stored" and today.get("state"):  # its default, of which NUFILT kept nothing
        del today["state"]
    return today


def _base(merged: str, folder: Path, manifest: Manifest) -> str:
    """Return the base of a merged model, if it can be found."""
    base = manifest.get("inputs", {}).get("base", {})
    if "name" not in base:
        raise ValueError(f"--base must be given: '{merged}' does not say what it was made from")
    name = find_model(base, folder.absolute().parent)
    if Path(name).is_dir() or "/" in base["name"]:  # the hub's names have a slash
        return name
    raise ValueError(
        f"--base must be given: '{name}', which '{merged}' was made from, is neither here nor "
        "beside it"
    )


def find_model(model: Input, beside: Path) -> str:
    """Return the name of a model that a manifest names: on the hub at the same revision, or a
    folder here or beside the result.
    """
    name = model["name"]
    if "revision" in model:
        # A branch in the name moves; the revision stays what it is.
        return f"{name.partition('@')[0]}@{model['revision']}"
    # A manifest names folders without their directories, which are the user's own.
    if not Path(name).is_dir() and (beside / name).is_dir():
        return str(beside / name)
    return name
