"""Locks on folders; files and folders that are whole or not there; names from elsewhere; YAML; and
the JSON files beside models and results, with the schemas that they are checked against.

A schema names what is read back; the files hold more, for people.
"""

import errno
import fcntl
import hashlib
import html
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache
from glob import escape as without_wildcards
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Required, TypeVar, cast

import psutil
import yaml
from filelock import BaseFileLock, FileLock, Timeout
from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    TypeAdapter,
    ValidationError,
)
from rich.markup import escape
from safetensors import SafetensorError
from typing_extensions import TypedDict

_T = TypeVar("_T")

#: Beside every merged model: ``step`` and ``tasks`` say what is in it.
MANIFEST = "nufilt.json"
#: In a log directory: what the run in it depends on.
RUN = "run.json"
#: The model card of a result.
CARD = "README.md"
#: The lock file of a folder that only one process may write to.
LOCK = ".nufilt.lock"


def lock_folder(folder: Path) -> BaseFileLock:
    """Make a folder and lock it until this process ends, however it ends; a ValueError says that
    another process holds it.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"'{folder}' can't be a folder: there is a file of that name")
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"another process is writing '{folder}': wait until it is done, or name another folder"
        ) from None
    return lock


def expanded(path: str | Path) -> Path:
    """Return a path with the home of ``~`` in it, which a shell leaves in ``--out=~/merged``; a
    path of a user that there is not stays as it is, where pathlib would end with a trace.
    """
    return Path(os.path.expanduser(path))


def existing_parent(path: Path) -> Path:
    """Return what exists and is nearest above a path."""
    return next(parent for parent in path.absolute().parents if parent.exists())


def is_writable(folder: Path) -> bool:
    """Tell whether a path is a folder in which files can be made."""
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def refuse_foreign(folder: Path, mark: str, begun: Collection[str] = ()) -> None:
    """Refuse a folder for results that can't be made or written to, or that has files, but not the
    one that marks earlier results.

    ``begun`` names what is written before the mark: a process that was killed leaves it, with its
    lock.
    """
    nearest = folder if folder.exists() else existing_parent(folder)
    if not is_writable(nearest):
        raise ValueError(f"--out {folder}: '{nearest}' is no folder that can be written to")
    if nearest != folder:
        return
    names = {path.name for path in folder.iterdir()}
    if mark in names:
        return
    if LOCK in names:
        names -= {LOCK, *begun, *(leftover.name for leftover in _leftovers(folder / mark))}
    if names:
        raise ValueError(
            f"--out {folder}: it has '{min(names)}' and no {mark}; name a new or an empty folder"
        )


def _leftovers(target: Path) -> Iterator[Path]:
    """Yield the temporary files of a file, of this process and of others, which may be dead."""
    yield from target.parent.glob(f".{without_wildcards(target.name)}-[0-9]*")


def _is_abandoned(leftover: Path) -> bool:
    """Tell whether the process that wrote a temporary file is dead."""
    process = leftover.name.rpartition("-")[2]
    if not process.isdecimal() or psutil.pid_exists(int(process)):
        return False
    # On a file system that hosts share, the number may be that of a process of another host.
    try:
        with leftover.open("r+b") as stream:
            return _lock(stream)
    except OSError:  # it has become the file, or is another user's
        return False


def _lock(stream: BinaryIO) -> bool:
    """Lock an open file until it is closed; return whether no other process of any host, or thread,
    holds it. Where there are no locks, none does.
    """
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


@contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``target``, which becomes ``target`` when the block ends
    without an error.
    """
    for leftover in _leftovers(target):
        if _is_abandoned(leftover):
            leftover.unlink(missing_ok=True)
    temporary = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        with disk_full_errors(target.parent), temporary.open("ab") as stream:
            _lock(stream)
            yield temporary
            put_in_place(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(target: Path, text: str) -> None:
    """Write a text file, atomically."""
    with atomic_file(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(target: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, atomically."""
    write_text(target, json.dumps(content, indent=2))


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder, which becomes ``target`` when the block ends without an error, or
    else is removed.

    An earlier ``target`` is moved aside meanwhile; :func:`restore_folder` finds it if the process
    is killed.
    """
    restore_folder(target)
    # The caller holds a lock: processes that were killed left these.
    for leftover in target.parent.glob(f".{without_wildcards(target.name)}-[0-9]*.new"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = target.with_name(f".{target.name}-{os.getpid()}.new")
    temporary.mkdir(parents=True)
    try:
        with disk_full_errors(target):
            yield temporary
            put_in_place(temporary, target, _aside(target))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        restore_folder(target)


def put_in_place(draft: Path, target: Path, aside: Path | None = None) -> None:
    """Give a file or folder its name, once all of it is on the disk: after a power cut, what has
    the name is whole.

    A file of that name is replaced. A folder is moved ``aside``, or else an OSError.
    """
    for path in [draft, *draft.rglob("*")]:
        if path.is_file():
            _give_usual_mode(path)
        _sync(path)
    if aside is not None and target.exists():
        target.rename(aside)
    draft.replace(target)
    _sync(target.parent)


def restore_folder(target: Path) -> None:
    """Give a folder that was moved aside its name back, or delete it if another has the name; the
    caller has a lock.
    """
    aside = _aside(target)
    if aside.exists() and target.exists():
        shutil.rmtree(aside)
    elif aside.exists():
        aside.rename(target)


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def _give_usual_mode(file: Path) -> None:
    """Let those read a file whom the user's umask lets; safetensors lets its owner alone."""
    umask = os.umask(0o077)  # it can only be read by setting it
    os.umask(umask)
    file.chmod(0o666 & ~umask)


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FullDiskError(OSError, ValueError):
    """A disk is full; the message says what was to be written there."""


@contextmanager
def disk_full_errors(folder: Path, size: str = "") -> Iterator[None]:
    """Turn the error of a full disk into one that names the folder, and the ``size`` of what it
    should hold.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        # A block inside this one may have named a folder already: the outer one says more.
        cause = error.__cause__ if isinstance(error, FullDiskError) else error
        if _error_number(cause) not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise FullDiskError(
            f"no room left on the disk for '{folder}'{size}: {cause}. Make room and run the same "
            "command again"
        ) from cause


def _error_number(error: BaseException | None) -> int | None:
    """Return the number of an operating system's error, which safetensors gives in its text."""
    number: int | None = getattr(error, "errno", None)
    match = re.search(r"os error (\d+)", str(error))
    if number is None and match is not None:
        return int(match[1])
    return number


def printable(name: str) -> str:
    """Escape the control characters of a name from elsewhere, which could act on a terminal or a
    page.
    """
    letters = []
    for letter in name:
        if not letter.isprintable():
            letter = repr(letter).strip("'")  # such as \x1b
        letters.append(letter)
    return "".join(letters)


def message_in_one_line(error: Exception) -> str:
    """Return the message of an error, which may be of several lines."""
    return " ".join(str(error).split())


def escape_html(text: str) -> str:
    """Escape HTML and control characters in a line of Markdown, which may hold names from
    elsewhere.
    """
    return html.escape(printable(text), quote=False)


def escape_markup(text: str) -> str:
    """Escape markup and control characters in lines for a console, which may hold names from
    elsewhere.
    """
    lines = [printable(line) for line in text.split("\n")]
    return escape("\n".join(lines))


def file_name(name: str) -> str:
    """Turn a name from elsewhere into a file name that is neither hidden, nor in another folder,
    nor too long.
    """
    safe = re.sub(r"[^\w.=,+-]+|^\.", "_", name)
    if len(safe.encode()) <= 200:
        return safe
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f"{safe[:40]}-{digest[:16]}"


def is_inside(path: Path, folder: Path) -> bool:
    """Tell whether a file of a folder lies in it, and is no link to one that is elsewhere."""
    homes = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":  # beside these, the hub's cache has the files
        homes.append(folder.resolve().parents[1] / "blobs")
    target = path.resolve()
    return any(target.is_relative_to(home) for home in homes)


class _YamlLoader(yaml.SafeLoader):
    """Reads ``1e-3`` as a number, as Hydra does; YAML 1.1 wants a dot in it."""


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789")
)


def read_yaml(file: Path) -> Any:
    """Return the content of a YAML file, ``{}`` if it is empty; a YAMLError says what is wrong with
    it.
    """
    content = yaml.load(file.read_text(encoding="utf-8"), Loader=_YamlLoader)
    if content is None:
        return {}
    return content


def counted(number: int, noun: str) -> str:
    """Return words such as ``1 model`` and ``8 models``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size_text(count: float) -> str:
    """Return a number of bytes in GB, or in MB where it is less than a tenth of one."""
    if count < 1e8:
        return f"{count / 1e6:.1f} MB"
    return f"{count / 1e9:.2f} GB"


def read_json(path: Path, kind: type[_T], advice: str = "fetch it again") -> _T | None:
    """Return the content of a JSON file, as :func:`validate` does, or None if there is no file.

    A ValueError names the file and the field, and gives the advice.
    """
    try:
        if not path.is_file():
            return None
        return parse_json(path.read_bytes(), kind)
    except OSError as error:
        raise ValueError(f"'{path}' can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"'{path}' is damaged, {error}; {advice}") from error


def parse_json(text: bytes, kind: type[_T]) -> _T:
    """Return the content of a JSON text, or raise a ValueError that says what is wrong, and
    where.
    """
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"it is no JSON: {error}") from error
    return validate(content, kind)


def validate(content: Any, kind: type[_T]) -> _T:
    """Return content from JSON or YAML unchanged if it is of a type, such as a ``TypedDict``, or as
    a dataclass.

    Further fields are allowed. A ValueError names the first field that is missing or of another
    type.
    """
    try:
        adapter = _type_adapter(cast("Any", kind))
        if not is_dataclass(kind):
            adapter.validate_python(content, strict=True)
            return cast("_T", content)
        # Strict validation of Python objects would want an instance of the dataclass already.
        return adapter.validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        raise ValueError(_message(error)) from error
    except RecursionError:
        raise ValueError("it is nested too deep") from None


@cache  # making one takes milliseconds
def _type_adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _message(error: ValidationError) -> str:
    """Return what pydantic found first, in a line: the field, what is wrong, and what it got."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":  # a dataclass itself says what it got
        message = str(first["ctx"]["error"])
    else:
        value = repr(first["input"])
        if len(value) > 60:
            value = f"{value[:57]}..."
        message = f"{first['msg'][0].lower()}{first['msg'][1:]}, got {value}"
    if first["loc"]:
        field = ".".join(map(str, first["loc"]))
        message = f"field '{field}': {message}"
    return message


#: A number of models: nobody merges a million, so that a larger number means damage.
Count = Annotated[int, Field(ge=1, le=10**6)]
#: A task's score: a fraction, or a metric of another scale, none of which reaches these bounds.
Score = Annotated[float, Field(ge=-(10**4), le=10**4)]
Seconds = Annotated[float, Field(ge=0, le=10**9)]


_Checksum = Annotated[list[NonNegativeInt], Field(min_length=3, max_length=3)]


class Fingerprint(TypedDict, total=False):
    size: Required[int]  # in bytes
    sha256: str
    #: Of a file of weights instead: where the header and each tensor start and stop in it, and the
    #: CRC-32 of these bytes.
    checksums: list[_Checksum]


class Input(TypedDict, total=False):
    """What a model is known by: its content. Name and revision are for people and for finding
    it.
    """

    name: str
    source: Any  # of a model pool's entry: a folder, a hub name or a configuration
    revision: str  # its commit on the hub
    #: Of its tensors, see :mod:`fusion_bench_nufilt.utils.fingerprint`.
    fingerprint: str
    #: That of a pool's model as it was loaded, which may have another dtype than its files, and
    #: tensors that they lack; without files, the only one.
    loaded: str
    hub: dict[str, str]  # the hub's digests of its files of weights
    #: The ``sha256`` of files beside the weights, which change a merge, too.
    files: dict[str, dict[str, Any]]
    stamps: dict[str, list[int]]  # size and time (ns) of each file of weights as it was read


def _head_file(name: str) -> str:
    # A manifest from elsewhere must name no other file of a result, and none outside of it.
    if re.fullmatch(r"heads/[\w.=,+-]+\.safetensors", name) is None:
        raise ValueError(f"must be heads/NAME.safetensors, got {name!r}")
    return name


class Head(TypedDict):
    #: With its tensors, relative to the folder of the merged model.
    file: Annotated[str, AfterValidator(_head_file)]
    modules: list[str]  # their modules' names, as the base would have them
    config: dict[str, Any]  # of the task's model, with its id2label, label2id and problem_type


class Share(TypedDict):
    parameters: int
    share: float  # of the model's elements, 0 to 1


class CoverageShares(TypedDict):
    merged: Share
    averaged: Share
    kept: Share
    left_out: dict[str, int]


class LayerStep(TypedDict):
    """What a step did to a layer; there is more, which depends on the method."""

    step: Count
    shape: list[int]
    task_norm: float


class VocabularyEntry(TypedDict, total=False):
    #: The sum of the weights of the models in the mean of a new token's rows, where it is not 1.
    token_weights: dict[str, Annotated[float, Field(ge=0, le=10**9)]]


class Manifest(TypedDict, total=False):
    """The file ``nufilt.json`` of a merged model, whether a step of a run or a merge of folders
    made it.
    """

    method: str
    step: Count  # the number of models merged so far
    tasks: list[str]  # their names, in merging order
    order: list[str]  # all models of the stream, of which `tasks` are the first ones
    inputs: dict[str, Input]
    task_inputs: list[Input]  # what each of `tasks` is known by
    settings: dict[str, Any]
    training_data: dict[str, Any]  # of a run: what the data of each task are known by
    #: Models in the mean of a tensor, where that is not `step`.
    mean_counts: dict[str, NonNegativeInt]
    #: What rounding has added to the update of each layer: the energy of the errors over that of
    #: the weights.
    rounding: dict[str, NonNegativeFloat]
    #: All files of the folder but the manifest, by their relative paths.
    files: dict[str, Fingerprint]
    vocabulary: VocabularyEntry
    heads: dict[str, Head]  # by the names of their tasks
    merge_seconds: list[float]
    data_seconds: Seconds  # of setting up data, if the method needs any
    coverage: dict[str, Any]
    energy_kept: dict[str, Any]  # of an adapter: shares of the update's, in all and by tensor
