"""Files and folders that are either whole or not there, locks on folders, and JSON files checked against a schema."""

import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from glob import escape
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from filelock import BaseFileLock, FileLock, Timeout
from pydantic import Field, TypeAdapter, ValidationError

_T = TypeVar("_T")

#: Beside every merged model: ``step`` and ``tasks`` say what is in it.
MANIFEST = "nufilt.json"
#: The model card of a result.
CARD = "README.md"
#: Every folder that one process at a time may write to has a lock file, and a file that says which process holds it.
LOCK, HOLDER = ".nufilt.lock", ".nufilt.holder"
#: A number of models: nobody merges a million of them, and a larger one is damage.
Count = Annotated[int, Field(ge=1, le=10**6)]


def lock_folder(folder: Path) -> BaseFileLock:
    """Make a folder and lock it until this process ends, however it ends, or name the process that holds it."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder}: there is a file of that name")
    folder.mkdir(parents=True, exist_ok=True)
    lock, holder = FileLock(folder / LOCK), folder / HOLDER
    try:
        lock.acquire(timeout=0)
    except Timeout:
        other = holder.read_text() if holder.exists() else "another process"
        raise ValueError(f"{other} is writing '{folder}': wait until it is done, or name another folder") from None
    write_text(holder, f"process {os.getpid()} on {socket.gethostname()}")
    return lock


def refuse_foreign(folder: Path, mark: str) -> None:
    """Refuse a folder for results that has files but not the one that marks earlier results."""
    there = {path.name for path in folder.iterdir()} - {LOCK, HOLDER} if folder.is_dir() else set()
    if there and mark not in there:
        raise ValueError(f"--out {folder}: it has '{min(there)}' and no {mark}; name a new or an empty folder")


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


def read_json(path: Path, kind: type[_T], advice: str = "fetch it again") -> _T | None:
    """Return what a JSON file holds; None where there is no such file.

    Its content must be of a type such as ``dict[str, str]`` or a ``TypedDict``, or make a dataclass; further fields are
    allowed. Otherwise, a ValueError names the file and the field, and gives the advice.
    """
    try:
        return parse_json(path.read_bytes(), kind) if path.is_file() else None
    except OSError as error:
        raise ValueError(f"'{path}' can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"'{path}' is damaged, {error}; {advice}") from error


def parse_json(text: bytes, kind: type[_T]) -> _T:
    """Return what a JSON text holds, or raise a ValueError that says what is wrong, and where."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"it is no JSON: {error}") from error
    return checked(content, kind)


def checked(content: Any, kind: type[_T]) -> _T:
    """Return a content from JSON or YAML unchanged if it is of a type, or the dataclass that it makes.

    Otherwise, a ValueError names the first field that is missing or of another type.
    """
    try:
        adapter = TypeAdapter(kind)
        if not is_dataclass(kind):
            adapter.validate_python(content, strict=True)
            return cast("_T", content)
        return adapter.validate_json(json.dumps(content), strict=True)  # strict Python would want a dataclass already
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        got = repr(first["input"])
        what = f"{first['msg'][0].lower()}{first['msg'][1:]}, got {got if len(got) <= 60 else f'{got[:57]}...'}"
        raise ValueError(f"field '{'.'.join(map(str, first['loc']))}': {what}" if first["loc"] else what) from error
    except RecursionError:
        raise ValueError("it is nested too deep") from None
