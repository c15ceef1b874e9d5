"""Where the tensors of a result lie in its files, and what its config.json and its index say about
it.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from huggingface_hub import split_state_dict_into_shards_factory

from fusion_bench_nufilt.storage.tensors import FLOATS, TensorInfo, make_header, read_header

from .sources.checkpoint import INDEX, Checkpoint
from .sources.fp8 import Quantised, join_scales
from .sources.mxfp4 import Packed
from .sources.source import some, split_rows

Files = dict[str, dict[str, TensorInfo]]
"""The tensors in each file, by key; their places in it are in the file's header alone."""

_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_CONFIG = "config.json"


def as_written(info: TensorInfo, dtype: str) -> TensorInfo:
    """Return a tensor of the base as the result has it with the option ``dtype``."""
    quantised = isinstance(info, Quantised)
    if info.dtype not in FLOATS or (quantised and dtype == "fp8"):
        return info
    name = _NAMES.get(dtype, "BF16" if quantised else info.dtype)
    return (
        info if name == info.dtype and not isinstance(info, Quantised | Packed) else info.of(name)
    )


def arrange(
    base: Checkpoint, rows: Mapping[str, int], dtype: str, max_shard_size: int | None
) -> Files:
    """Arrange the tensors of the result in the base's files, or in new ones of ``max_shard_size``
    bytes at most.

    A larger tensor has a file of its own. ``rows`` has the number of rows of tensors where it is
    not the base's.
    """
    written = {key: as_written(info, dtype) for key, info in base.whole.items()}
    tensors = _stored(
        written | {key: _with_rows(written[key], count) for key, count in rows.items()}
    )
    if max_shard_size is None:
        return _by_file(tensors)
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=attrgetter("nbytes"),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    return {
        file: {key: tensors[key] for key in keys}
        for file, keys in split.filename_to_tensors.items()
    }


def _with_rows(info: TensorInfo, count: int) -> TensorInfo:
    if isinstance(info, Quantised):
        raise ValueError(
            f"{info.what} is stored in FP8 and can't get rows for new tokens: leave dtype out"
        )
    stop = info.start + info.nbytes // info.shape[0] * count
    return replace(info, shape=(count, *info.shape[1:]), stop=stop)


def _stored(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return tensors as files hold them, where an FP8 tensor and its scales are two."""
    found = {}
    for key, info in tensors.items():
        if isinstance(info, Quantised):
            found[key], found[info.scale_key] = info.stored
        else:
            found[key] = info
    return found


def _by_file(tensors: Mapping[str, TensorInfo]) -> Files:
    files: Files = {}
    for key, info in tensors.items():
        files.setdefault(info.file, {})[key] = info
    return files


def make_headers(base: Checkpoint, files: Files) -> dict[str, bytes]:
    """Return the header of each file, which is the base's own where that has the same tensors."""

    def shapes(tensors: Mapping[str, TensorInfo]) -> dict[str, object]:
        return {key: (info.dtype, info.shape) for key, info in tensors.items()}

    found = {}
    for file, tensors in files.items():
        own = base.opened.get(file)
        found[file] = (
            own.header if own and shapes(own.tensors) == shapes(tensors) else make_header(tensors)
        )
    return found


def find_places(base: Checkpoint, headers: Mapping[str, bytes]) -> dict[str, TensorInfo]:
    """Return the place of each tensor in files with these headers, by its key in the base."""
    found: dict[str, TensorInfo] = {}
    for file, header in headers.items():
        found |= read_header(file, header)
    return split_rows(join_scales(base.name, found, base.quantisation)[0], base.parts)


def check_fp8(base: Checkpoint) -> None:
    """Raise a ValueError if the base's FP8 scales can't be computed again from merged weights."""
    what = f"dtype fp8: '{base.name}' has"
    if base.measured:
        why = "which are measured on data; leave dtype out, and quantise the result"
        raise ValueError(f"{what} scales of its activations ({some(base.measured)}), {why}")
    if not any(isinstance(info, Quantised) for info in base.whole.values()):
        raise ValueError(
            f"{what} no weights in FP8 that tell the blocks: leave dtype out, and quantise the "
            "result"
        )
    for key in base.parts:
        info = base.whole[key]
        if (
            isinstance(info, Quantised)
            and len(base.parts[key]) > 1
            and info.block[0] >= info.shape[0]
        ):
            several = (
                f"'{key}' {info.shape} with scales {info.scale.shape} that several layers share"
            )
            raise ValueError(f"{what} {several}: leave dtype out")


def small_files_of(
    small: Mapping[str, bytes], base: Checkpoint, files: Files, dtype: str
) -> dict[str, bytes]:
    """Return the base's small files for the result, with config.json and the index changed where
    they must be.
    """
    found = dict(small)
    if (
        _CONFIG in found
        and (config := _retyped(before := json.loads(found[_CONFIG]), dtype)) != before
    ):
        found[_CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    if files != _by_file(_stored(base.whole)):
        found.pop(INDEX, None)
        if len(files) > 1:
            size = sum(info.nbytes for held in files.values() for info in held.values())
            weight_map = {key: file for file, held in files.items() for key in held}
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            found[INDEX] = (json.dumps(index, indent=2) + "\n").encode()
    return found


def _retyped(config: Any, dtype: str) -> Any:
    """Return a part of config.json with the dtype of the result, and without the base's
    quantisation if it is gone.
    """
    if not isinstance(config, dict):
        return config
    gone = () if dtype == "fp8" else ("quantization_config", "compression_config")
    kept = {key: _retyped(value, dtype) for key, value in config.items() if key not in gone}
    named = {
        key: dtype
        for key in ("torch_dtype", "dtype")
        if isinstance(kept.get(key), str) and dtype in _NAMES
    }
    return kept | named
