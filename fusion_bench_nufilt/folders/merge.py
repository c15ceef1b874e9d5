"""Merging checkpoint folders tensor by tensor: no model is ever loaded."""

import errno
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from itertools import chain
from pathlib import Path

import torch

from fusion_bench_nufilt.core.workers import map_layers
from fusion_bench_nufilt.storage.files import MANIFEST
from fusion_bench_nufilt.storage.manifest import STATE_FILE, read_manifest

from .checkpoint import some
from .engine import merge_here, merge_on_cluster
from .forecast import batches, disk_bytes
from .manifest import model_card, nufilt_json, run_identity
from .others import write_other
from .output import Output, clear_work_folder, work_folder
from .plan import Plan
from .preflight import check_relation
from .state import keeps_state, state_layout

log = logging.getLogger(__name__)

CARD = "README.md"


def merge_folders(plan: Plan, out: Path, progress: Callable[[int, int], object] | None = None) -> Path:
    """Carry out a plan.

    A tensor goes through all tasks before the next one is read, so that each input is read once, whatever the number
    of tasks, and nothing between is stored. A run that was interrupted goes on where it stopped.

    Args:
        plan: of :func:`fusion_bench_nufilt.folders.plan_merge`.
        out: the folder to make.
        progress: called with the numbers of finished tensors and of all.

    Returns:
        ``out``.

    Raises:
        ValueError: ``out`` exists, the disk has no room, or a tensor, which is named, has NaN or infinite values.
    """
    if check_output(plan, out):
        clear_work_folder(out)  # the run may have been killed before it cleaned up
        return out
    _fetch(plan)
    run, files = run_identity(plan), [*map(str, plan.base.small_files()), MANIFEST, CARD]
    try:
        with closing(Output(out, run, _headers(plan), files)) as output:
            check_disk(plan, out, already=output.nbytes_done)
            _merge(plan, output, progress or (lambda done, total: None))
            if changed := plan.changed():
                raise ValueError(
                    f"{some(changed)} was changed during the run: run the same command again, it starts anew"
                )
            _write_small_files(plan, output, run)
            output.finish()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ValueError(
                f"no room left on the disk for '{out}' ({disk_bytes(plan) / 1e9:.1f} GB in all): {error}. Make room "
                "and run the same command again, it goes on where it stopped"
            ) from error
        raise
    return out


def check_disk(plan: Plan, out: Path, already: int = 0) -> None:
    """Refuse a disk that can't take the result; ``already`` bytes of it are there."""
    folder = _nearest(out)
    free = shutil.disk_usage(folder).free + already
    if (needed := disk_bytes(plan)) > free:
        raise ValueError(f"the result takes {needed / 1e9:.1f} GB and '{folder}' has {free / 1e9:.1f} GB left")


def check_output(plan: Plan, out: Path) -> bool:
    """Return whether ``out`` is this very merge, finished; refuse any other place that is not free and writable."""
    place, work = out.resolve(), work_folder(out.resolve())
    for checkpoint in plan.checkpoints:
        for path in checkpoint.paths:
            if path in (place, *place.parents):
                raise ValueError(f"'{out}' is inside '{checkpoint.name}', which is not written to: name another folder")
            if work in (path, *path.parents):
                raise ValueError(f"'{checkpoint.name}' is inside '{work}', where '{out}' is to grow: move it elsewhere")
    if out.exists() or out.is_symlink():
        here = not any(checkpoint.remote for checkpoint in plan.checkpoints)
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


def _fetch(plan: Plan) -> None:
    """Download the weights that are still on the hub, and warn about what they then say of the models."""
    if any(checkpoint.remote for checkpoint in plan.checkpoints):
        for checkpoint in plan.checkpoints:
            checkpoint.fetch()
        new = [text for text in check_relation(plan) if text not in plan.warnings]
        plan.warnings += new
        for text in new:
            log.warning("%s", text)


def _merge(plan: Plan, output: Output, progress: Callable[[int, int], object]) -> None:
    """Merge the layers and write the other tensors, but for those that an earlier run finished."""
    done, total = output.done, len(plan.layers) + len(plan.others)
    if done:
        log.info("going on: %d of %d tensors are done", len(done), total)
    layers = list(batches(plan, [layer for layer in plan.layers if layer.slot not in done]))
    others = [slot for slot in plan.others if slot not in done]
    merge = merge_here if plan.settings.engine == "local" else merge_on_cluster
    written = map_layers(lambda slot: write_other(plan, slot, output), others, torch.device("cpu"))
    for _ in chain(merge(plan, layers, output.add), written):
        progress(len(done), total)


def _headers(plan: Plan) -> dict[str, tuple[bytes, int]]:
    """Return header and size of every weight file of the result: the base's, and that of the state."""
    headers = {}
    for key, info in plan.base.tensors.items():
        if info.file not in headers:
            file = plan.base.file(key)
            headers[info.file] = file.header, file.path.stat().st_size
    if keeps_state(plan):
        header, tensors = state_layout(plan)
        headers[STATE_FILE] = header, max(info.stop for info in tensors.values())
    return headers


def _write_small_files(plan: Plan, output: Output, run: str) -> None:
    """Write configuration, tokenizer and index as in the base, the manifest and the model card."""
    for path in plan.base.small_files():
        (output.model / path).parent.mkdir(exist_ok=True)
        shutil.copyfile(plan.base.folder / path, output.model / path)
    slots = [layer.slot for layer in plan.layers] + list(plan.others)
    (output.model / MANIFEST).write_text(nufilt_json(plan, [output.done[slot] for slot in slots], run))
    (output.model / CARD).write_text(model_card(plan))
