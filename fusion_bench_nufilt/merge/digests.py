"""The digests of files that grow: what is finished of a file is brought to the disk, and from its
beginning on digested, while the rest is made, so that the end waits for little of either.
"""

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from threading import Lock

from fusion_bench_nufilt.utils.files import Fingerprint

# So much of a file is brought to the disk together.
_SYNCED_BYTES = 2**28
_CHUNK_BYTES = 2**18  # which a core's cache holds
_THREADS = 8  # each digests a file at a time, or waits for the disk


class GrowingFiles:
    """Files of which each part is written once, in any order, and digested as soon as all parts
    before it are.

    Whoever writes says what is finished; nothing here does.
    """

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self._files = {name: _GrowingFile(folder / name) for name in names}
        self._pool = ThreadPoolExecutor(_THREADS)
        self._failures: list[BaseException] = []

    def add(self, name: str, start: int, stop: int) -> None:
        """Note that the bytes between two offsets of a file are written."""
        file = self._files[name]
        if file.add(start, stop):
            self._start(file.go_on)
        if file.unsynced >= _SYNCED_BYTES:
            file.unsynced = 0
            self._start(file.sync)

    def _start(self, job: Callable[[], None]) -> None:
        """Have a thread do a job, of which nothing is kept but its failure: what is kept lies in
        the room of a layer, which the next one then lacks.
        """
        self._pool.submit(job).add_done_callback(self._note_failure)

    def _note_failure(self, job: Future[None]) -> None:
        if job.cancelled():
            return
        failure = job.exception()
        if failure is not None:
            self._failures.append(failure)

    def fingerprints(self) -> dict[str, Fingerprint]:
        """Return the fingerprint of each file, once all of it is written."""
        self._pool.shutdown()
        # The system tells of a disk that failed but once, and it may have told a job.
        if self._failures:
            raise self._failures[0]
        with ThreadPoolExecutor(_THREADS) as pool:
            fingerprints = pool.map(_GrowingFile.fingerprint, self._files.values())
            return dict(zip(self._files, fingerprints, strict=True))

    def close(self) -> None:
        """End without what is not digested yet."""
        for file in self._files.values():
            file.is_closed = True
        self._pool.shutdown(cancel_futures=True)


class _GrowingFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._sha = hashlib.sha256()
        self._digested = 0  # bytes
        self.unsynced = 0  # bytes
        self._finished: dict[int, int] = {}  # where parts behind these bytes stop, by their starts
        self._turn = Lock()
        self.is_closed = False

    def add(self, start: int, stop: int) -> bool:
        """Note a part that is written; return whether it may be the next to be digested."""
        if start == stop:  # of a tensor without elements
            return False
        self.unsynced += stop - start
        self._finished[start] = stop
        return self._digested in self._finished

    def go_on(self) -> None:
        """Digest the parts that follow."""
        # Whoever has the turn goes on with what is added meanwhile. What comes as it ends is left
        # to the next part, or to the end.
        if not self._turn.acquire(blocking=False):
            return
        try:
            with self._path.open("rb", buffering=0) as stream:
                while self._digested in self._finished and not self.is_closed:
                    self._digest(stream, self._finished.pop(self._digested))
        finally:
            self._turn.release()

    def sync(self) -> None:
        """Bring to the disk what is written, wherever it stands."""
        with self._path.open("rb", buffering=0) as stream:
            os.fsync(stream.fileno())

    def _digest(self, stream: FileIO, stop: int) -> None:
        """Digest what is between the bytes that are digested and an offset."""
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        stream.seek(self._digested)
        while self._digested < stop:
            count = stream.readinto(buffer[: stop - self._digested])
            if not count:
                raise ValueError(f"'{self._path}' was cut short while it was written")
            self._sha.update(buffer[:count])
            self._digested += count

    def fingerprint(self) -> Fingerprint:
        with self._turn, self._path.open("rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            self._digest(stream, size)
            return Fingerprint(size=size, sha256=self._sha.hexdigest())
