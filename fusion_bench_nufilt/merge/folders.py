"""Merge checkpoint folders tensor by tensor, and describe the result in a manifest."""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from fusion_bench_nufilt.models.source import format_names
from fusion_bench_nufilt.utils.files import (
    CARD,
    disk_full_errors,
    existing_parent,
    is_writable,
    size_text,
)
from fusion_bench_nufilt.utils.heap import give_back_freed_memory
from fusion_bench_nufilt.utils.manifest import (
    in_one_line,
    inputs_at_other_times,
    merge_differences,
    read_manifest,
    verify_files,
    write_files,
    write_manifest,
)

from .card import card, sentence_about_energy
from .checks import check_contents, check_same_base, verify_merged
from .engine import CPU, do_jobs
from .kept_state import KeptState
from .layer_jobs import layer_jobs, machine_of, task_strengths
from .other_params import NOT_FINITE, other_tensors
from .output import Output, Record, clear_work_folder, work_folder
from .plan import Plan

log = logging.getLogger(__name__)


def merge_folders(
    plan: Plan, out: Path, progress: Callable[[int, int], object] | None = None
) -> Path:
    """Carry out a plan, and return ``out``.

    A tensor goes through all tasks at once, so that each input is read once, after the samples for
    the plan and for strengths, and nothing in between is stored. A run that was interrupted goes on
    where it stopped.

    Args:
        plan: from :func:`fusion_bench_nufilt.merge.plan_merge`.
        out: the folder to make.
        progress: called with the number of finished tensors and the number of all tensors.

    Raises:
        ValueError: ``out`` exists and is not this very merge, the disk has no room, or a tensor has
            NaN or infinite values; the message names it.
    """
    # Ahead of any download: a result that is finished needs no weights.
    if check_output(plan, out):
        clear_work_folder(out)  # the run may have been killed before it cleaned up
        return out
    warnings = [*plan.warnings, *_fetch(plan)]
    check_disk(plan, out)
    # Read ahead of the merge, since this may fail.
    files = plan.small_files | plan.head_files()
    kept = KeptState(plan)
    with (
        disk_full_errors(out, f" ({size_text(plan.disk_bytes)} in all)"),
        closing(Output(out, plan.description, plan.headers)) as output,
    ):
        _merge(kept, output, progress or (lambda done, total: None))
        _refuse_changed(plan)
        manifest = _manifest(plan, output.done, warnings)
        files[CARD] = card(plan, manifest).encode()
        if plan.settings.rank is not None:
            log.info("%s", sentence_about_energy(plan, manifest["energy_kept"]))
        write_files(output.draft, files)
        # The last of the files, since it has the sums of all others.
        write_manifest(output.draft, manifest, fingerprints=output.fingerprints())
        output.finish()
    return out


def _refuse_changed(plan: Plan) -> None:
    """Raise a ValueError if a file was written to during the run, which may have given parts of two
    models to one result.
    """
    names = [checkpoint.name for checkpoint in plan.checkpoints if checkpoint.is_changed()]
    if names:
        raise ValueError(
            f"{format_names(names)} was changed during the run: run the same command again"
        )


def check_output(plan: Plan, out: Path) -> bool:
    """Return whether ``out`` is this very merge; refuse a folder that holds anything else, and a
    result that is damaged.
    """
    refuse_inside(plan, out)
    if out.exists() or out.is_symlink():
        remedy = "remove it or name another folder"
        manifest = read_manifest(out, remedy)
        if not manifest:
            # What is no result is somebody's, and not for this command to have removed.
            if out.is_dir() and any(out.iterdir()):
                remedy = "name another folder"
            raise ValueError(f"'{out}' exists: {remedy}")
        description = plan.description
        saved = {key: manifest.get(key) for key in description}
        differing = merge_differences(saved, description)
        if differing:
            raise ValueError(f"'{out}' exists: {in_one_line(differing)}; {remedy}")
        advice = "remove it, and the same command makes it again"
        verify_files(out, manifest, advice, digests=plan.settings.verify)
        for name in inputs_at_other_times(manifest, description):
            log.warning(
                "'%s' has another size or time than when '%s' was made of it, and the same "
                "fingerprint: remove the result if it was edited",
                name,
                out,
            )
        return True
    folder = existing_parent(out)
    if not is_writable(folder):
        raise ValueError(f"'{out}' can't be made: '{folder}' is no folder that can be written to")
    return False


def refuse_inside(plan: Plan, out: Path) -> None:
    """Refuse a folder for results that is or lies in a model that is read, or whose work folder
    holds such a model.
    """
    resolved_out = out.resolve()
    work = work_folder(resolved_out)
    for checkpoint in plan.checkpoints:
        paths = [file.path.resolve() for file in checkpoint.opened.values()]  # may be links
        for path in [checkpoint.folder.resolve(), *paths]:
            if path == resolved_out or path in resolved_out.parents:
                place = "is" if path == resolved_out else "is inside"
                raise ValueError(
                    f"'{out}' {place} model '{checkpoint.name}', which is not written to: name "
                    "another folder"
                )
            if work == path or work in path.parents:
                raise ValueError(
                    f"'{checkpoint.name}' is inside '{work}', where '{out}' is to grow: move it "
                    "elsewhere"
                )


def check_disk(plan: Plan, out: Path) -> None:
    """Raise a ValueError if the disk has no room for the result, besides what an interrupted run
    wrote of it.
    """
    folder = existing_parent(out)
    needed = plan.disk_bytes
    free = shutil.disk_usage(folder).free
    for path in work_folder(out).rglob("*.safetensors"):
        if path.is_file():
            # Blocks of 512 bytes: a file has its full size from the start, with holes to fill.
            free += 512 * path.stat().st_blocks
    if needed > free:
        raise ValueError(
            f"the result takes {size_text(needed)} and '{folder}' has {size_text(free)} left"
        )


def _fetch(plan: Plan) -> list[str]:
    """Download the weights that are still on the hub, and return the warnings that only they can
    tell.
    """
    remote = [checkpoint for checkpoint in plan.checkpoints if checkpoint.remote]
    for checkpoint in remote:
        checkpoint.fetch()
    plan.vocabulary.check()
    if not remote:
        return []
    warnings = []
    check_contents(plan)
    texts = [*check_same_base(plan), *verify_merged(plan)]
    for text in texts:
        # The plan has checked the models that were on this disk, and said what it found.
        if text not in plan.warnings:
            warnings.append(text)
            log.warning("%s", text)
    return warnings


def _merge(kept: KeptState, output: Output, progress: Callable[[int, int], object]) -> None:
    plan = kept.plan
    done = output.done
    total = len(plan.layers) + len(plan.other_keys)
    if done:
        log.info("going on: %d of %d tensors are done", len(done), total)
    layers = [layer for layer in plan.layers if layer.param not in done]
    other_params = [param for param in plan.other_keys if param not in done]
    tensors = other_tensors(plan, other_params, plan.places)
    machine = machine_of(plan)
    # A run that goes on may have no layer left, for which nothing is measured.
    strengths = task_strengths(kept) if layers else ()
    jobs = layer_jobs(kept, layers, strengths, plan.places)
    if plan.settings.engine == "ray":
        from .distributed import merge_on_cluster

        stages = [
            merge_on_cluster(plan, jobs, strengths, output.add),
            do_jobs((), machine._replace(devices=[CPU]), output.add, tensors),
        ]
    else:
        # Workers of a cluster do this in processes of their own.
        give_back_freed_memory()
        stages = [do_jobs(jobs, machine, output.add, tensors)]
    for stage in stages:
        # An error here, such as Ctrl-C, must leave no thread that writes when the lock is released.
        with closing(stage):
            for _ in stage:
                progress(len(done), total)


def _manifest(plan: Plan, done: Mapping[str, Record], warnings: Sequence[str]) -> dict[str, Any]:
    """Return the manifest's content: what the result depends on, and what became of it."""
    public_warnings = list(warnings)
    for checkpoint in plan.checkpoints:  # without the user's directories
        name = f"'{checkpoint.name}'"
        label = f"'{checkpoint.label}'"
        public_warnings = [text.replace(name, label) for text in public_warnings]
    for param in plan.other_keys:
        if "not_finite" in done[param]:
            public_warnings.append(NOT_FINITE % done[param]["not_finite"])
    description = plan.description
    about_adapter = {}
    if plan.is_adapter:
        about_adapter = {"base_model": plan.base.label, "energy_kept": _energy_kept(plan, done)}
    return {
        "method": plan.method.label,
        **description,
        **about_adapter,
        "rounding": {layer.name: done[layer.param]["rounding"] for layer in plan.layers},
        "task_inputs": plan.task_inputs,
        "coverage": plan.coverage.as_dict(),
        "linear_layers_known_from": plan.layers_known_from,
        "warnings": public_warnings,
        "layers": {layer.name: done[layer.param]["reports"] for layer in plan.layers},
    }


def _energy_kept(plan: Plan, done: Mapping[str, Record]) -> dict[str, Any]:
    """Return what share of the squared norm of the update an adapter has, in all and of each
    tensor.
    """
    names = {layer.param: layer.name for layer in plan.layers}
    shares = {}
    kept_of_all = 0.0
    whole_of_all = 0.0
    for param in plan.adapter_keys:
        kept, whole = done[param]["energy"]
        shares[names.get(param, param)] = kept / whole if whole else 1.0
        kept_of_all += kept
        whole_of_all += whole
    share_of_all = kept_of_all / whole_of_all if whole_of_all else 1.0
    return {"all": share_of_all, "tensors": shares}
