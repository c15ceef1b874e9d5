"""Files and folders that are either whole or not there, and locks on folders."""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

#: Beside every merged model: ``step`` and ``tasks`` say what is in it.
MANIFEST = "nufilt.json"
#: Every folder that one process at a time may write to has a lock file, and a file that says which process holds it.
LOCK, HOLDER = ".nufilt.lock", ".nufilt.holder"


def lock_folder(folder: Path) -> BaseFileLock:
    """Make a folder and lock it until this process ends, however it ends, or name the process that holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock, holder = FileLock(folder / LOCK), folder / HOLDER
    try:
        lock.acquire(timeout=0)
    except Timeout:
        other = holder.read_text() if holder.exists() else "another process"
        raise ValueError(f"{other} is writing '{folder}': wait until it is done, or name another folder") from None
    write_text(holder, f"process {os.getpid()} on {socket.gethostname()}")
    return lock


@contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``target``; what is written there becomes ``target`` when the block ends well."""
    temporary = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(target: Path, text: str) -> None:
    """Write a text file, atomically."""
    with atomic_file(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``target`` when the block ends well, and is removed otherwise."""
    # The caller holds a lock, so that these are of processes that were killed.
    for left in target.parent.glob(f".{escape(target.name)}-[0-9]*.new"):
        shutil.rmtree(left, ignore_errors=True)
    temporary = target.with_name(f".{target.name}-{os.getpid()}.new")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.rglob("*"):
            sync(file)
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    windows = os.name == "nt"  # Windows has no descriptors of folders, and flushes only files open for writing
    if windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def printable(name: str) -> str:
    """Escape the control characters of a name from elsewhere, so that it can do nothing to a terminal or a page."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in name)
