"""Merging checkpoint folders tensor by tensor: no model is ever loaded."""

import errno
import hashlib
import logging
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

from torch import Tensor

from fusion_bench_nufilt.core.checks import is_finite
from fusion_bench_nufilt.layers import running_mean
from fusion_bench_nufilt.storage.files import MANIFEST
from fusion_bench_nufilt.storage.tensors import CHUNK_BYTES, FLOATS, raw

from .architecture import Layer
from .checkpoint import some
from .destination import check_disk, check_output
from .engine import STATE_FILE, Engine, LocalEngine, state_layout
from .manifest import NOT_FINITE, model_card, nufilt_json, run_identity
from .output import Output, Record, clear_work_folder
from .plan import Plan
from .preflight import check_relation

Digests = dict[str, "hashlib._Hash"]  # of what was read, by model

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
        ValueError: ``out`` exists, NaN or infinite values (the tensor is named), a disk without room.
    """
    if check_output(plan, out):
        clear_work_folder(out)  # the run may have been killed before it cleaned up
        return out
    fetch(plan)
    run, files = run_identity(plan), [*map(str, plan.base.small_files()), MANIFEST, CARD]
    try:
        with closing(Output(out, run, _headers(plan), files)) as output:
            already = sum(info[2] - info[1] for record in output.done.values() for info in record["written"])
            check_disk(plan, out, already)
            with closing(_engine(plan)) as engine:
                _Merge(plan, output, engine).run(progress)
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


def _engine(plan: Plan) -> Engine:
    if plan.settings.engine == "local":
        return LocalEngine(plan)
    from .ray_engine import RayEngine

    return RayEngine(plan)


class _Merge:
    """One run: an engine computes the layers, this process writes."""

    def __init__(self, plan: Plan, output: Output, engine: Engine) -> None:
        self.plan, self.output, self.engine = plan, output, engine

    def run(self, progress: Callable[[int, int], object] | None) -> None:
        plan, done = self.plan, self.output.done
        total = len(plan.layers) + len(plan.others)
        if done:
            log.info("going on: %d of %d tensors are done", len(done), total)
        jobs: list[list[Layer] | str] = list(plan.batches([layer for layer in plan.layers if layer.slot not in done]))
        jobs += [slot for slot in plan.others if slot not in done]
        for _ in self.engine.side_by_side(self._do, jobs):
            if progress is not None:
                progress(len(done), total)

    def _do(self, job: list[Layer] | str) -> None:
        if isinstance(job, str):
            self._copy(job)
            return
        for record, pieces in self.engine.fuse(job):
            for (file, start, _, _), data in zip(record["written"], pieces, strict=True):
                self.output.write(file, data, start)
            self.output.record(record)

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
        header, _, size = state_layout(plan)
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
