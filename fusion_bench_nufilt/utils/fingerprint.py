"""What a model is known by before any work: one digest of its content, from small pieces of every
tensor.

It is the same for the same names, dtypes, shapes and bytes, in files or in memory, whatever the
files are called, however the tensors are spread over them, and whatever else is in their headers.
Two models that were trained apart differ in every tensor, and so in their fingerprints. An edit
inside one tensor may lie outside its pieces: sizes and times of files tell of that.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping

from torch import Tensor, nn

from .tensors import TensorFile, TensorInfo, describe, raw_bytes

#: Read of each tensor from its beginning, its middle and its end; a smaller one is read as a whole.
PIECE_BYTES = 4096
#: So many tensors of a model are read at most; the others are known by name, dtype and shape.
MOST_TENSORS = 4096


def fingerprint_files(files: Iterable[TensorFile]) -> str:
    """Return the fingerprint of the tensors in some files, which hold them all together.

    Raises:
        ValueError: a file can't be read; the message names it.
    """
    files_by_key: dict[str, TensorFile] = {}
    for file in files:
        files_by_key |= dict.fromkeys(file.tensors, file)
    tensors = {key: file.tensors[key] for key, file in files_by_key.items()}
    sampled: dict[TensorFile, list[str]] = {}
    for key in _sample(tensors):
        sampled.setdefault(files_by_key[key], []).append(key)
    pieces: dict[str, bytes] = {}
    for file, keys in sampled.items():
        bounds = []
        keys_of_bounds = []
        for key in keys:
            first = tensors[key].start
            for start, stop in _bounds_of_pieces(tensors[key].nbytes):
                bounds.append((first + start, first + stop))
                keys_of_bounds.append(key)
        for key, piece in zip(keys_of_bounds, file.pieces(bounds), strict=True):
            pieces[key] = pieces.get(key, b"") + bytes(raw_bytes(piece))
    return _digest(tensors, pieces)


def fingerprint_tensors(model: nn.Module | Mapping[str, Tensor]) -> str:
    """Return the fingerprint of a model's parameters and buffers, or of other tensors by name, such
    as the factors of an adapter.

    What has several names, such as a tied weight, goes by the first one, as in a saved file.
    """
    if isinstance(model, nn.Module):
        model = model.state_dict()
    values: dict[str, Tensor] = {}
    places: set[object] = set()
    for name, value in model.items():
        # A module may have further state, which is no tensor.
        if not isinstance(value, Tensor):
            continue
        place = (value.device, value.data_ptr(), value.shape, value.stride())
        # Tensors without elements have no place.
        if place not in places or not value.numel():
            values[name] = value
        places.add(place)
    tensors = {name: describe(value) for name, value in values.items()}
    pieces: dict[str, bytes] = {}
    for name in _sample(values):
        value = values[name].detach().flatten()
        itemsize = value.element_size()
        pieces[name] = b""
        for start, stop in _bounds_of_pieces(value.nbytes):
            # Cut before it leaves an accelerator.
            pieces[name] += raw_bytes(value[start // itemsize : stop // itemsize])
    return _digest(tensors, pieces)


def _sample(names: Collection[str]) -> list[str]:
    """Return the names of the tensors of which pieces are read: all, or of very many some from all
    over the model.
    """
    if len(names) <= MOST_TENSORS:
        return list(names)

    # Every n-th one might be of one kind, such as the scales of all experts.
    def digest_of(name: str) -> bytes:
        return hashlib.sha256(name.encode()).digest()

    return sorted(names, key=digest_of)[:MOST_TENSORS]


def _bounds_of_pieces(nbytes: int) -> list[tuple[int, int]]:
    """Return where the pieces of a tensor start and stop, in bytes."""
    if nbytes <= 3 * PIECE_BYTES:
        return [(0, nbytes)]
    last = nbytes - PIECE_BYTES
    # A multiple of the bytes of every dtype's elements, as the size of the tensor is.
    middle = last // 2 // 16 * 16
    return [(start, start + PIECE_BYTES) for start in (0, middle, last)]


def _digest(tensors: Mapping[str, TensorInfo], pieces: Mapping[str, bytes]) -> str:
    sha = hashlib.sha256()
    for name in sorted(tensors):
        info = tensors[name]
        piece = ""
        if name in pieces:
            piece = hashlib.sha256(pieces[name]).hexdigest()
        line = json.dumps([name, info.dtype, list(info.shape), piece])
        sha.update(f"{line}\n".encode())
    return sha.hexdigest()
