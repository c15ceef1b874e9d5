"""Merging checkpoint folders tensor by tensor: no model is ever loaded."""

import dataclasses
import errno
import hashlib
import logging
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from fusion_bench_nufilt.core import fuse_layers
from fusion_bench_nufilt.core.checks import is_finite
from fusion_bench_nufilt.core.workers import map_layers
from fusion_bench_nufilt.files import MANIFEST
from fusion_bench_nufilt.layers import running_mean

from .architecture import Layer
from .checkpoint import some
from .destination import check_disk, check_output
from .manifest import NOT_FINITE, model_card, nufilt_json, run_identity
from .memory import Budget, return_freed_memory
from .output import Output, Record, clear_work_folder
from .plan import BATCH_BYTES, Plan
from .preflight import STATE, check_relation
from .tensors import CHUNK_BYTES, FLOATS, digest, float32_header, raw

Digests = dict[str, "hashlib._Hash"]  # of what was read, by model

log = logging.getLogger(__name__)

STATE_FILE = f"{STATE}/model.safetensors"
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
        ValueError: ``out`` exists, NaN or infinite values (the tensor is named), a disk without room.
    """
    if check_output(plan, out):
        clear_work_folder(out)  # the run may have been killed before it cleaned up
        return out
    fetch(plan)
    run, files = run_identity(plan), [*map(str, plan.base.small_files()), MANIFEST, CARD]
    return_freed_memory()
    try:
        with closing(Output(out, run, _headers(plan), files)) as output:
            already = sum(info[2] - info[1] for record in output.done.values() for info in record["written"])
            check_disk(plan, out, already)
            _Merge(plan, output).run(progress)
            if changed := [checkpoint.name for checkpoint in plan.checkpoints if checkpoint.changed()]:
                raise ValueError(
                    f"{some(changed)} was changed during the run: run the same command again, it starts anew"
                )
            _write_small_files(plan, output, run)
            output.finish()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ValueError(
                f"no room left on the disk for '{out}' ({plan.disk / 1e9:.1f} GB in all): {error}. Make room and run "
                "the same command again, it goes on where it stopped"
            ) from error
        raise
    return out


def fetch(plan: Plan) -> None:
    """Download the weights that are still on the hub; what they then say about the models is a warning."""
    if any(checkpoint.remote for checkpoint in plan.checkpoints):
        for checkpoint in plan.checkpoints:
            checkpoint.fetch()
        new = [text for text in check_relation(plan) if text not in plan.warnings]
        plan.warnings += new
        for text in new:
            log.warning("%s", text)


class _Merge:
    """One run: reads, computes and writes, a tensor per thread."""

    def __init__(self, plan: Plan, output: Output) -> None:
        self.plan, self.output, self.budget = plan, output, Budget(plan.budget)
        state = float32_header({layer.keys[0]: plan.base.tensors[layer.keys[0]].shape for layer in plan.layers})
        self._state_offsets, offset = {}, len(state)
        for layer in plan.layers:
            self._state_offsets[layer.slot] = offset
            offset += 4 * plan.base.tensors[layer.keys[0]].numel

    def run(self, progress: Callable[[int, int], object] | None) -> None:
        plan, done = self.plan, self.output.done
        total = len(plan.layers) + len(plan.others)
        if done:
            log.info("going on: %d of %d tensors are done", len(done), total)
        jobs: list[list[Layer] | str] = list(plan.batches([layer for layer in plan.layers if layer.slot not in done]))
        jobs += [slot for slot in plan.others if slot not in done]
        for _ in map_layers(self._do, jobs, torch.device(plan.settings.device), plan.workers):
            if progress is not None:
                progress(len(done), total)

    def _do(self, job: list[Layer] | str) -> None:
        if isinstance(job, str):
            self._copy(job)
            return
        with self.budget.reserve(sum(map(self.plan.layer_memory, job))):
            self._merge(job)

    def _merge(self, layers: list[Layer]) -> None:
        plan = self.plan
        read: dict[str, dict[str, str]] = {layer.slot: {} for layer in layers}
        reports: dict[str, list[Record]] = {layer.slot: [] for layer in layers}
        theta_0, running = {}, {}
        for layer in layers:
            weight, read[layer.slot]["base"] = plan.base.read(layer.keys[0])
            theta_0[layer.name] = layer.view.matrix(weight)
            so_far = theta_0[layer.name]
            if plan.merged is not None:
                weight, read[layer.slot]["merged"] = plan.merged.weight(layer.slot)
                so_far = layer.view.matrix(weight)
            if plan.state is not None and layer.slot in plan.state.keys:
                weight, read[layer.slot]["state"] = plan.state.weight(layer.slot)
                state = layer.view.matrix(weight)
                if not torch.equal(state.to(so_far.dtype), so_far):
                    raise ValueError(
                        f"'{plan.state.checkpoint.name}' does not belong to the weights beside it: '{layer.name}' "
                        "differs; remove it if the weights are right"
                    )
                so_far = state
            kept = plan.dtype(layer.keys[0])
            if plan.settings.accumulate == "float32":
                kept = torch.promote_types(kept, torch.float32)
            running[layer.name] = so_far.to(kept)
        for number, task in enumerate(plan.tasks):
            changed = [layer for layer in layers if layer.slot in task.slots]  # an adapter may leave some alone
            if not changed:
                continue
            theta_t = {}
            for layer in changed:
                new, read[layer.slot][f"task {number}"] = task.weight(layer.slot)
                theta_t[layer.name] = layer.view.matrix(new) if isinstance(new, Tensor) else new
            step = plan.first_step + number
            fused, report = fuse_layers(
                {layer.name: theta_0[layer.name] for layer in changed},
                {layer.name: running[layer.name] for layer in changed},
                theta_t,
                plan.config,
                seed=plan.settings.seed,
                step=step,
                device=plan.settings.device,
                batch_bytes=BATCH_BYTES,
            )
            if large := [name for name, weight in fused.items() if not is_finite(weight)]:
                raise ValueError(
                    f"model '{task.checkpoint.name}', layer '{large[0]}': the result is too large for "
                    f"{theta_0[large[0]].dtype}, or its squares are"
                )
            running |= fused
            for layer in changed:
                reports[layer.slot].append({"step": step, **dataclasses.asdict(report[layer.name])})
        for layer in layers:
            written = self._write(layer, running.pop(layer.name))
            self.output.record(
                {"slot": layer.slot, "written": written, "read": read[layer.slot], "reports": reports[layer.slot]}
            )

    def _write(self, layer: Layer, matrix: Tensor) -> list[tuple[str, int, int, str]]:
        """Write a layer wherever the base has it, and in float32 if that is kept."""
        written, weight = [], layer.view.part(matrix)
        if self.plan.keeps_state:
            start, wide = self._state_offsets[layer.slot], weight.to(torch.float32)
            self.output.write(STATE_FILE, raw(wide), start)
            written.append((STATE_FILE, start, start + 4 * wide.numel(), digest(wide)))
        for key in layer.keys:
            info = self.plan.base.tensors[key]
            stored = weight.to(FLOATS[info.dtype])
            if not is_finite(stored):
                raise ValueError(f"tensor '{key}': the merged weight is too large for {info.dtype}")
            self.output.write(info.file, raw(stored), info.start)
            written.append((info.file, info.start, info.stop, digest(stored)))
        return written

    def _copy(self, slot: str) -> None:
        """A tensor outside the merged layers: as it is in the merged model (the base's bits), or averaged."""
        written: list[tuple[str, int, int, str]] = []
        read: Digests = defaultdict(hashlib.sha256)
        record: Record = {"slot": slot, "written": written, "reports": []}
        for key in self.plan.others[slot]:
            info, sha, finite = self.plan.base.tensors[key], hashlib.sha256(), True
            offset = info.start
            for piece in self._pieces(slot, key, read):
                data = raw(piece)
                self.output.write(info.file, data, offset)
                offset += len(data)
                sha.update(data)
                finite = finite and (info.dtype not in FLOATS or is_finite(piece.view(FLOATS[info.dtype])))
            if not finite:
                record["not_finite"] = key
                log.warning(NOT_FINITE, key)
            written.append((info.file, info.start, info.stop, sha.hexdigest()))
        digests = {source: sha.hexdigest() for source, sha in read.items()}
        self.output.record({**record, "read": digests})

    def _pieces(self, slot: str, key: str, read: Digests) -> Iterable[Tensor]:
        """The new tensor, flattened, a bounded number of bytes at a time."""
        plan, info = self.plan, self.plan.base.tensors[key]
        base = plan.base.file(key)
        if (slot not in plan.averaged and plan.merged is None) or info.dtype not in FLOATS:
            for piece in base.chunks(info):
                read["base"].update(raw(piece))
                yield piece
            return
        count = CHUNK_BYTES // 8
        for start in range(0, info.numel, count):
            stop = min(start + count, info.numel)
            value = theta_0 = base.elements(info, start, stop)
            read["base"].update(raw(theta_0))
            if plan.merged is not None and (so_far := plan.merged.elements(slot, start, stop, theta_0)) is not None:
                read["merged"].update(raw(so_far))
                value = so_far.to(theta_0.dtype)
            yield self._average(slot, start, stop, theta_0, value, read) if slot in plan.averaged else value

    def _average(self, slot: str, start: int, stop: int, theta_0: Tensor, value: Tensor, read: Digests) -> Tensor:
        for number, task in enumerate(self.plan.tasks):
            step = self.plan.first_step + number
            new = task.elements(slot, start, stop, theta_0)
            if new is None or (self.plan.targets.other_params == "first" and step > 1):
                continue
            read[f"task {number}"].update(raw(new))
            if not is_finite(new):
                raise ValueError(f"model '{task.checkpoint.name}', tensor '{slot}' has NaN or infinite values")
            value = running_mean(value, new, step)
        value = value.to(theta_0.dtype)  # once: roundings after every task would add up
        if not is_finite(value):
            raise ValueError(f"tensor '{slot}': the mean has values that {theta_0.dtype} can't hold")
        return value


def _headers(plan: Plan) -> dict[str, tuple[bytes, int]]:
    """Header and size of every weight file of the result: the base's, and that of the float32 layers."""
    headers = {}
    for key, info in plan.base.tensors.items():
        if info.file not in headers:
            file = plan.base.file(key)
            headers[info.file] = file.header, file.path.stat().st_size
    if plan.keeps_state:
        shapes = {layer.keys[0]: plan.base.tensors[layer.keys[0]].shape for layer in plan.layers}
        header = float32_header(shapes)
        size = len(header) + sum(4 * torch.Size(shape).numel() for shape in shapes.values())
        headers[STATE_FILE] = header, size
    return headers


def _write_small_files(plan: Plan, output: Output, run: str) -> None:
    """Configuration, tokenizer and index as in the base, manifest and model card."""
    for path in plan.base.small_files():
        (output.model / path).parent.mkdir(exist_ok=True)
        shutil.copyfile(plan.base.folder / path, output.model / path)
    records = [output.done[layer.slot] for layer in plan.layers] + [output.done[slot] for slot in plan.others]
    (output.model / MANIFEST).write_text(nufilt_json(plan, records, run))
    (output.model / CARD).write_text(model_card(plan))
