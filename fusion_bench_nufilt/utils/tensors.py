"""Read and write safetensors files tensor by tensor, so that memory holds only what is worked on.

`safetensors.safe_open` maps a file, and every page that was read counts as the process's memory.
Here, it checks the file, and plain reads at the offsets in the header fetch the bytes.
"""

import json
import math
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

#: Of a tensor that is read, computed and written in pieces: small enough that what a piece takes
#: is memory that the last one gave back, and not fresh from the system.
CHUNK_BYTES = 2**21
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# All that safetensors stores of torch's.
_DTYPES = FLOATS | {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}


@dataclass(frozen=True)
class TensorInfo:
    """What the header of a file says about a tensor."""

    file: str  # name of the file in its folder
    dtype: str  # as safetensors names it: BF16, F32, I64, ...
    shape: tuple[int, ...]
    start: int  # offset of the first byte in the file
    stop: int  # offset after the last byte

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def unit(self) -> int:
        """The number of elements that are read together, or not at all."""
        return 1

    @property
    def is_quantised(self) -> bool:
        """Whether its values are not what is stored, but decoded from it."""
        return False

    @property
    def eps(self) -> float:
        """The distance of 1 from the next larger value."""
        return torch.finfo(FLOATS[self.dtype]).eps

    def rows(self, first: int, last: int) -> Self:
        """Return these entries of the first dimension, which are contiguous, as a tensor of its
        own.
        """
        row_bytes = self.nbytes // self.shape[0]
        shape = (last - first, *self.shape[1:])
        start = self.start + first * row_bytes
        stop = self.start + last * row_bytes
        return replace(self, shape=shape, start=start, stop=stop)

    def read(self, files: Mapping[str, "TensorFile"]) -> Tensor:
        """Return the values, given the files by name."""
        return files[self.file].read(self)

    def elements(self, files: Mapping[str, "TensorFile"], start: int, stop: int) -> Tensor:
        """Return some elements of the flattened tensor."""
        return files[self.file].elements(self, start, stop)

    def with_dtype(self, dtype: str) -> "TensorInfo":
        """Return the same tensor in another floating dtype, without a place in a file."""
        nbytes = math.prod(self.shape) * FLOATS[dtype].itemsize
        return TensorInfo(self.file, dtype, self.shape, 0, nbytes)


class TensorFile:
    """A safetensors file to read from; a ValueError names one that is truncated or corrupt."""

    def __init__(self, path: Path) -> None:
        try:
            self.stamp = _stamp(path)
            if not path.is_file():  # opening a pipe would wait for a writer
                raise ValueError(f"'{path}' is no regular file")
            with open(path, "rb") as file:
                # This checks sizes and offsets. NumPy's view needs no memory; torch's reserves all
                # of it.
                with safe_open(path, framework="np"):
                    pass
                # The file begins with the length of its header, then the header, in JSON.
                length = file.read(8)
                self.header = length + file.read(int.from_bytes(length, "little"))
        except SafetensorError as error:
            raise ValueError(
                f"'{path}' is truncated or corrupt: {error}; fetch it again"
            ) from error
        except OSError as error:
            raise ValueError(f"'{path}' can't be read: {error.strerror or error}") from error
        self.path = path
        self.tensors = read_header(path.name, self.header)

    def changed(self) -> bool:
        """Tell whether the file may have been written to or replaced since it was opened; its
        content may still be the same.
        """
        try:
            return _stamp(self.path) != self.stamp
        except OSError:  # it was removed
            return True

    def __getstate__(self) -> dict[str, Any]:
        """Make the path absolute, for a process with another working directory."""
        return {**vars(self), "path": self.path.absolute()}

    def read(self, info: TensorInfo) -> Tensor:
        return self.read_bytes(info.start, info.stop).view(_DTYPES[info.dtype]).reshape(info.shape)

    def read_bytes(self, start: int, stop: int) -> Tensor:
        """Read a part of the file."""
        return next(self.pieces([(start, stop)]))

    def elements(self, info: TensorInfo, start: int, stop: int) -> Tensor:
        """Read some elements of a tensor, without their shape."""
        dtype = FLOATS[info.dtype]
        first_byte = info.start + start * dtype.itemsize
        last_byte = info.start + stop * dtype.itemsize
        return self.read_bytes(first_byte, last_byte).view(dtype)

    def pieces(self, bounds: Iterable[tuple[int, int]]) -> Iterator[Tensor]:
        """Read the bytes of pieces of the file, given where each starts and stops."""
        try:
            # Opened once, and without a buffer, which would read more than the pieces.
            with open(self.path, "rb", buffering=0) as file:
                for start, stop in bounds:
                    buffer = torch.empty(stop - start, dtype=torch.uint8, device="cpu")
                    unread = buffer.numpy().data
                    file.seek(start)
                    while len(unread) > 0:  # one call reads 2 GB at most
                        count = file.readinto(unread)
                        if not count:
                            raise ValueError(
                                f"'{self.path}' ended before its header says: was it changed "
                                "during the run?"
                            )
                        unread = unread[count:]
                    yield buffer
        except OSError as error:
            raise ValueError(
                f"'{self.path}' can't be read: {error.strerror or error}; once it is back, the "
                "same command goes on"
            ) from error

    def checksums(self) -> list[list[int]]:
        """Return where the header and each tensor start and stop, and the CRC-32 of these bytes."""
        bounds = {(info.start, info.stop) for info in self.tensors.values() if info.nbytes}
        ranges = [(0, len(self.header)), *sorted(bounds)]
        return [[start, stop, file_checksum(self.path, start, stop)] for start, stop in ranges]


def read_header(file: str, header: bytes) -> dict[str, TensorInfo]:
    """Return the tensors that a file's header describes, which begins with the eight bytes of its
    length.
    """
    content = json.loads(header[8:])
    content.pop("__metadata__", None)
    tensors = {}
    for key, entry in content.items():
        start, stop = entry["data_offsets"]  # counted from the end of the header
        tensors[key] = TensorInfo(
            file,
            entry["dtype"],
            tuple(entry["shape"]),
            len(header) + start,
            len(header) + stop,
        )
    return tensors


def end_of_file(header: bytes) -> int:
    """Return the size of the file that begins with a header."""
    stops = [info.stop for info in read_header("", header).values()]
    return max(stops, default=len(header))


def describe(tensor: Tensor) -> TensorInfo:
    """Return the description of a tensor, without a place in a file; it may be of a dtype that no
    file here has.
    """
    dtype_name = str(tensor.dtype)
    for name, dtype in _DTYPES.items():
        if dtype == tensor.dtype:
            dtype_name = name
    return TensorInfo("", dtype_name, tuple(tensor.shape), 0, tensor.nbytes)


def read_metadata(header: bytes) -> dict[str, str]:
    """Return what a file's header says besides its tensors."""
    metadata: dict[str, str] = json.loads(header[8:]).get("__metadata__") or {}
    return metadata


def make_header(
    tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the header of a file with these tensors, the largest first, in which order a merge
    makes them; those of one size stay in their order.

    All are aligned: what is no multiple of 8 bytes comes last, the widest dtypes of it first.
    """

    def order(key: str) -> tuple[bool, int]:
        info = tensors[key]
        if info.nbytes % 8 == 0:
            return False, -info.nbytes
        itemsize = -(-info.nbytes // max(1, math.prod(info.shape)))  # rounded up
        return True, -itemsize

    # Without a format, transformers 4 loads no file.
    content: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    start = 0
    for key in sorted(tensors, key=order):
        info = tensors[key]
        stop = start + info.nbytes
        content[key] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def _stamp(path: Path) -> tuple[int, ...]:
    """Return what no writing to a file or replacing of it leaves as it was.

    The time of the content can be set to an earlier one, as `cp -p` and `tar` do; the file's number
    and the time of its entry can't.
    """
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes, not copied if it is contiguous and in main memory."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at an offset; threads may write side by side."""
    while data:
        count = os.pwrite(descriptor, data, offset)
        data = data[count:]
        offset += count


def write_back(descriptor: int) -> None:
    """Have the system begin to write a file to the disk, and take back the memory of what is there:
    for a file that is not read soon, which would keep gigabytes of memory in use.
    """
    if sys.platform == "linux":
        # A file system may not know of it.
        with suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def file_checksum(path: Path, start: int, stop: int) -> int:
    checksum = 0
    with path.open("rb") as file:
        file.seek(start)
        for offset in range(start, stop, CHUNK_BYTES):
            checksum = zlib.crc32(file.read(min(CHUNK_BYTES, stop - offset)), checksum)
    return checksum


def compute_dtype(values: Tensor) -> torch.dtype:
    """Return the dtype in which to compute with stored values: float32 at least."""
    return torch.promote_types(values.dtype, torch.float32)


def to_compute_dtype(values: Tensor) -> Tensor:
    """Return the values in the dtype of :func:`compute_dtype`."""
    return values.to(compute_dtype(values))


def is_finite(values: Tensor) -> bool:
    """Tell whether no value is NaN or infinite, as a rule in one pass and without a temporary of
    their size.
    """
    # A sum shows every NaN and infinity. Finite values may overflow it, so that each is then
    # checked. It has the dtype of the values, since torch copies them to sum them in another.
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def in_dtype(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a merged tensor of this name in a dtype; refuse values too large for that, and NaN."""
    converted = value.to(dtype)
    if not is_finite(converted):
        if value.isnan().any():
            raise ValueError(f"tensor '{name}' was merged to NaN")
        raise ValueError(
            f"tensor '{name}' has values that {dtype} can't hold: choose another dtype"
        )
    return converted


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of one shape as one; a single one is not copied."""
    if len(tensors) == 1:
        return tensors[0][None]
    return torch.stack(list(tensors))


def select_rows(stacked: Tensor, rows: Sequence[int]) -> Tensor:
    """Return some tensors of a stack as a stack."""
    # One by one: a list as an index goes to an accelerator by way of the host, which waits.
    return stack([stacked[row] for row in rows])


def replace_rows(stacked: Tensor, rows: Sequence[int], values: Tensor) -> Tensor:
    """Return a stack in which some tensors are replaced by those of another stack."""
    tensors = list(stacked)
    for row, value in zip(rows, values, strict=True):
        tensors[row] = value
    return stack(tensors)
