"""The place of the result, which must be free, writable and large enough."""

import os
import shutil
from pathlib import Path

from fusion_bench_nufilt.storage.manifest import read_manifest

from .forecast import disk_bytes
from .manifest import run_identity
from .output import work_folder
from .plan import Plan


def check_disk(plan: Plan, out: Path, already: int = 0) -> None:
    """Refuse a disk that can't take the result; ``already`` bytes of it are there."""
    folder = _nearest(out)
    free = shutil.disk_usage(folder).free + already
    if (needed := disk_bytes(plan)) > free:
        raise ValueError(f"the result takes {needed / 1e9:.1f} GB and '{folder}' has {free / 1e9:.1f} GB left")


def check_output(plan: Plan, out: Path) -> bool:
    """Return whether ``out`` is this very merge, finished.

    Raises:
        ValueError: It is something else, is inside an input or the other way round, or can't be written.
    """
    place, work = out.resolve(), work_folder(out.resolve())
    for checkpoint in plan.models.checkpoints:
        for path in checkpoint.paths:
            if path in (place, *place.parents):
                raise ValueError(f"'{out}' is inside '{checkpoint.name}', which is not written to: name another folder")
            if work in (path, *path.parents):
                raise ValueError(f"'{checkpoint.name}' is inside '{work}', where '{out}' is to grow: move it elsewhere")
    if out.exists() or out.is_symlink():
        here = not any(checkpoint.remote for checkpoint in plan.models.checkpoints)
        if here and (read_manifest(out) or {}).get("run") == run_identity(plan):
            return True
        raise ValueError(f"'{out}' exists: remove it or name another folder")
    folder = _nearest(out)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"'{out}' can't be made: '{folder}' is no folder that can be written to")
    return False


def _nearest(out: Path) -> Path:
    """Return the folder that ``out``, or the first folder on the way to it, is to be made in."""
    return next(parent for parent in out.absolute().parents if parent.exists())
