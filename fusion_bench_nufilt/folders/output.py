"""The folder being written: whole when it has its name, and resumed where an interrupted run stopped."""

import json
import os
import shutil
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fusion_bench_nufilt.files import sync

from .tensors import file_digest, write_at

Record = dict[str, Any]


class Output:
    """A folder beside ``out`` that takes its place when it is finished.

    Weight files have the base's headers, so every tensor's place is known from the start: tensors are written in any
    order, by any thread. A journal says which are done, and the digest of their bytes.

    Args:
        out: the folder to make.
        run: identifies inputs and settings; what another run left is thrown away.
        headers: header and size in bytes of each weight file, by its path in the folder.

    Raises:
        ValueError: another process is writing the same folder.
    """

    def __init__(self, out: Path, run: str, headers: Mapping[str, tuple[bytes, int]]) -> None:
        self.out, self.work = out, work_folder(out)
        self.model, self._journal_path = self.work / "model", self.work / "journal.jsonl"
        self.work.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.work / "lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(f"another process is writing '{out}'") from None
        self._headers, self._files, self._writing = headers, {}, threading.Lock()
        records = self._journal(run)
        if records is None:
            shutil.rmtree(self.model, ignore_errors=True)
        for file, (header, size) in headers.items():
            self._files[file] = self._open(file, header, size)
        self.done = {record["slot"]: record for record in records or [] if self._holds(record["written"])}
        # Written anew, so that no half line of a killed process is left in the middle.
        journal = self.work / "journal.new"
        journal.write_text("".join(json.dumps(r) + "\n" for r in [{"run": run}, *self.done.values()]))
        journal.replace(self._journal_path)

    def _journal(self, run: str) -> list[Record] | None:
        """Records of an interrupted run with these inputs and settings."""
        records = []
        try:
            for line in self._journal_path.read_text().splitlines():
                records.append(json.loads(line))
        except FileNotFoundError:
            return None
        except ValueError:
            pass  # the last line, which the process did not finish
        return records[1:] if records and records[0] == {"run": run} else None

    def _open(self, file: str, header: bytes, size: int) -> int:
        path = self.model / file
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(descriptor, size)
        write_at(descriptor, memoryview(header), 0)
        return descriptor

    def _holds(self, written: Iterable[tuple[str, int, int, str]]) -> bool:
        return all(file_digest(self._files[file], start, stop) == sha for file, start, stop, sha in written)

    def write(self, file: str, data: memoryview, offset: int) -> None:
        """Write bytes of a tensor."""
        write_at(self._files[file], data, offset)

    def record(self, record: Record) -> None:
        """Note that a tensor is written: its ``slot``, and in ``written`` file, first and last byte, and digest."""
        with self._writing, open(self._journal_path, "a") as journal:
            journal.write(json.dumps(record) + "\n")
            self.done[record["slot"]] = record

    def finish(self) -> None:
        """Give the folder its name, once all is on the disk."""
        for file in self.model.rglob("*"):
            sync(file)
        sync(self.model)
        self.model.rename(self.out)
        sync(self.out.parent)
        self.close()
        shutil.rmtree(self.work, ignore_errors=True)

    def close(self) -> None:
        """Release files and lock; what is written stays for the next run."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}
        self._lock.release()


def work_folder(out: Path) -> Path:
    """Where a folder is written before it takes its name."""
    return out.with_name(f".{out.name}.nufilt")
