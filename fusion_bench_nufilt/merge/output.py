"""The folder being written: it gets its name once it is complete, and an interrupted run resumes
where it stopped.
"""

import hashlib
import json
import logging
import os
import shutil
import stat
import threading
import zlib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Required, TypeVar

from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import TypedDict

from fusion_bench_nufilt.utils.files import (
    LOCK,
    Fingerprint,
    lock_folder,
    put_in_place,
    write_text,
)
from fusion_bench_nufilt.utils.manifest import (
    STATE_FILE,
    in_one_line,
    inputs_at_other_times,
    merge_differences,
)
from fusion_bench_nufilt.utils.tensors import (
    TensorInfo,
    end_of_file,
    file_checksum,
    raw_bytes,
    write_at,
    write_back,
)

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_JOURNAL = "journal.jsonl"


class Record(TypedDict, total=False):
    """A journal's entry for a tensor that is written."""

    param: Required[str]
    #: For each range of bytes, of one tensor: its file, the offsets of its start and end, and its
    #: CRC-32, which the manifest has, too.
    written: Required[Annotated[list[tuple[str, NonNegativeInt, int, int]], Field(min_length=1)]]
    reports: Required[list[dict[str, Any]]]
    #: What rounding has added to the update of a layer so far.
    rounding: float
    not_finite: str
    #: Of an update in an adapter: the energies of what is kept and of the whole.
    energy: tuple[float, float]


class _JournalStart(TypedDict):
    """The first line of a journal."""

    run: dict[str, Any]  # inputs and settings, as the result's manifest has them


#: Made once, since this takes a thousand times as long as reading a line.
_JOURNAL_START = TypeAdapter(_JournalStart)
_RECORD = TypeAdapter(Record)


class Output:
    """A folder beside ``out`` that takes its place when it is finished.

    The ``headers`` of the weight files fix every tensor's place from the start, so any thread may
    write tensors in any order. A journal lists which are done, with checksums of their bytes.

    Args:
        out: the folder to make.
        run: what the result depends on. Leftovers of another run are deleted.
        headers: by file of weights.

    Raises:
        ValueError: another process writes the folder, or it is not this program's: no real folder,
            another user's, or without our lock.
    """

    def __init__(
        self,
        out: Path,
        run: Mapping[str, Any],
        headers: Mapping[str, bytes],
    ) -> None:
        self.out = out
        self.work = work_folder(out)
        self.draft = self.work / "model"
        self._journal = self.work / _JOURNAL
        self._headers = headers
        self._sizes = {file: end_of_file(header) for file, header in headers.items()}
        self._writing = threading.Lock()
        self._is_closed = False
        self._claim()
        self._lock = lock_folder(self.work)
        try:
            # Asked under the lock: another process may have finished since the plan was checked.
            if out.exists():
                clear_work_folder(out)
                raise ValueError(f"'{out}' was made by another process meanwhile")
            self.done = self._resume(run)
        # Ctrl-C, too, must not leave the lock with a process that lives on.
        except BaseException:
            self.close()
            raise

    def _claim(self) -> None:
        """Make or take over the work folder for this user alone: a link or another user could
        redirect its files.
        """
        folder = f"'{self.work}', where the merge is to grow,"
        try:
            self.work.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            status = self.work.lstat()
            if not stat.S_ISDIR(status.st_mode):
                raise ValueError(f"{folder} is a file or a link: remove it") from None
            if status.st_uid != os.geteuid():
                raise ValueError(f"{folder} belongs to another user: name another folder") from None
            # A kill between the folder and its lock leaves it empty, and ours to take.
            if any(self.work.iterdir()) and not (self.work / LOCK).is_file():
                raise ValueError(f"{folder} was not made by nufilt: move it away") from None
            self.work.chmod(0o700)

    def _resume(self, run: Mapping[str, Any]) -> dict[str, Record]:
        """Return by param what an interrupted run with these inputs and settings finished and is
        still undamaged.
        """
        headers = self._headers
        # The places of all tensors in the files follow from these.
        digests = {file: hashlib.sha256(header).hexdigest() for file, header in headers.items()}
        run = {**run, "headers": digests}
        records = self._records_of(run)
        if not records:
            # No byte of another run may end in this one's result.
            shutil.rmtree(self.draft, ignore_errors=True)
        entries: list[_JournalStart | Record] = [_JournalStart(run=run), *records]
        lines = [f"{_line(json.dumps(entry))}\n" for entry in entries]
        # Anew, since a line that a kill cut short would swallow the next one.
        write_text(self._journal, "".join(lines))
        self._remove_all_but(headers)
        for file, header in headers.items():
            path = self.draft / file
            path.parent.mkdir(parents=True, exist_ok=True)
            # To append makes a file, or keeps what it has; truncating then gives it its size.
            with path.open("ab") as stream:
                stream.truncate(self._sizes[file])
            self.write(file, memoryview(header), 0)
        # Bytes are synced at the end alone: after a power cut, a line may be there without them.
        done = {record["param"]: record for record in records if self._holds(record)}
        damaged = len(records) - len(done)
        if damaged:
            log.warning(
                "%d tensors of '%s' were damaged since they were written: made again",
                damaged,
                self.work,
            )
        return done

    def _records_of(self, run: Mapping[str, Any]) -> list[Record]:
        """Return the records of an interrupted run that this one can use; the log says why not."""
        if not self._journal.is_file():
            return []
        head, records = _read_journal(self._journal)
        if head is None:
            log.info("starting anew: the journal of '%s' is damaged", self.out)
            return []
        differing = merge_differences(head["run"], run)
        if differing:
            line = in_one_line(differing)
            log.info("starting anew: '%s' was begun otherwise: %s", self.out, line)
            return []
        # An edit inside a tensor may lie outside of what the fingerprint has of it.
        written_to = inputs_at_other_times(head["run"], run)
        if written_to:
            log.warning(
                "starting anew: '%s' has another size or time than when '%s' was begun",
                written_to[0],
                self.out,
            )
            return []
        return records

    def _remove_all_but(self, weights: Collection[str]) -> None:
        """Remove all but the weights, since the rest is written at the end: what a process that was
        killed then had written, and links.
        """
        if self.draft.is_symlink():
            self.draft.unlink()
        for path in list(self.draft.rglob("*")):
            is_weights = path.relative_to(self.draft).as_posix() in weights
            if path.is_symlink() or (path.is_file() and not is_weights):
                path.unlink()

    def _holds(self, record: Record) -> bool:
        """Tell whether the files have what a record says was written."""
        for file, start, stop, checksum in record["written"]:
            if file not in self._sizes or stop > self._sizes[file]:
                return False
            if file_checksum(self.draft / file, start, stop) != checksum:
                return False
        return True

    def add(self, record: Record, pieces: Iterable[tuple[TensorInfo, Tensor | memoryview]]) -> None:
        """Write the pieces of a tensor of the merge, and note in the journal that it is done.

        A piece comes with the place of the whole of which it is a part, under one of its keys or of
        what the state has of it; those of one place follow each other.
        """
        ends: dict[TensorInfo, tuple[int, int]] = {}  # so far, with the checksum up to there
        for place, piece in pieces:
            data = piece if isinstance(piece, memoryview) else raw_bytes(piece)
            offset, checksum = ends.get(place, (place.start, 0))
            self.write(place.file, data, offset)
            # Of what is to be written: a run that goes on compares it with what is on the disk.
            ends[place] = (offset + len(data), zlib.crc32(data, checksum))
        for place, (end, checksum) in ends.items():
            record["written"].append((place.file, place.start, end, checksum))
        # After all of its bytes: a kill in between leaves no record, and the tensor is made again.
        self.record(record)

    def write(self, file: str, data: memoryview, offset: int) -> None:
        # Opened for this write only, since there may be more files than a process may have open.
        if self._is_closed:
            raise ValueError(f"'{self.work}' is no longer locked by this run: '{file}' not written")
        with (self.draft / file).open("r+b", buffering=0) as stream:
            write_at(stream.fileno(), data, offset)
            if file == STATE_FILE:  # which the next merge reads, and nobody before
                write_back(stream.fileno())

    def record(self, record: Record) -> None:
        """Note in the journal that a tensor is written."""
        # One thread at a time, or two lines would mix, and neither would be believed.
        with self._writing, open(self._journal, "a", encoding="utf-8") as journal:
            journal.write(f"{_line(json.dumps(record))}\n")
            self.done[record["param"]] = record

    def fingerprints(self) -> dict[str, Fingerprint]:
        """Return the fingerprints of the files of weights, once all tensors are written."""
        checksums: dict[str, list[list[int]]] = {}
        for file, header in self._headers.items():
            checksums[file] = [[0, len(header), zlib.crc32(header)]]
        for record in self.done.values():
            for file, start, stop, checksum in record["written"]:
                if start < stop:  # a tensor may have no elements
                    checksums[file].append([start, stop, checksum])
        fingerprints = {}
        for file, size in self._sizes.items():
            fingerprints[file] = Fingerprint(size=size, checksums=sorted(checksums[file]))
        return fingerprints

    def finish(self) -> None:
        """Give the folder its name, once everything is on the disk."""
        put_in_place(self.draft, self.out)
        self.close()
        clear_work_folder(self.out)

    def close(self) -> None:
        """Release the lock; what is written stays for the next run, and nothing is added to it."""
        self._is_closed = True
        self._lock.release()


def work_folder(out: Path) -> Path:
    """Return the place where a folder grows before it gets its name."""
    return out.parent / f".{out.name}.nufilt"


def clear_work_folder(out: Path) -> None:
    """Remove what is left of the work folder of a finished ``out``; what others put there stays."""
    work = work_folder(out)
    if work.is_symlink() or not work.is_dir():
        return
    if (work / LOCK).is_file():  # else it is not ours
        (work / _JOURNAL).unlink(missing_ok=True)
        # The last one, since without it what is left would not be known as ours.
        (work / LOCK).unlink()
    with suppress(OSError):  # not empty
        work.rmdir()


def _line(text: str) -> str:
    """Return a journal's line for a text: its digest, then the text."""
    return f"{hashlib.sha256(text.encode()).hexdigest()[:16]} {text}"


def _read_journal(journal: Path) -> tuple[_JournalStart | None, list[Record]]:
    """Return the first line of a journal, or None if it is damaged, and its records, without lines
    that are incomplete or damaged.
    """
    with journal.open(encoding="utf-8", errors="replace") as lines:
        head = _parse(next(lines, ""), _JOURNAL_START)
        records = [_parse(line, _RECORD) for line in lines]
    return head, [record for record in records if record is not None]


def _parse(line: str, kind: TypeAdapter[_T]) -> _T | None:
    text = line.rstrip("\n").partition(" ")[2]
    if line != f"{_line(text)}\n":
        return None
    with suppress(ValidationError):
        return kind.validate_json(text, strict=True)
    return None
