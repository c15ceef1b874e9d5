"""Where the tensors of a result lie in its files, and what its config.json and its index say about
it.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from huggingface_hub import split_state_dict_into_shards_factory

from fusion_bench_nufilt.models.checkpoint import INDEX, Checkpoint
from fusion_bench_nufilt.models.quantised import Encoded
from fusion_bench_nufilt.models.source import split_rows
from fusion_bench_nufilt.utils.tensors import FLOATS, TensorInfo, make_header, read_header

Files = dict[str, dict[str, TensorInfo]]
"""The tensors in each file, by key; their places in it are in the file's header alone."""

_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_CONFIG = "config.json"


def as_written(info: TensorInfo, dtype: str) -> TensorInfo:
    """Return a tensor of the base as the result has it with the option ``dtype``."""
    if info.dtype not in FLOATS:
        return info
    # No merge can quantise again: scales may come from data, which only a quantiser has.
    if isinstance(info, Encoded):
        return info.with_dtype(_NAMES.get(dtype, "BF16"))
    name = _NAMES.get(dtype, info.dtype)
    if name == info.dtype:
        return info
    return info.with_dtype(name)


def is_rounded(info: TensorInfo) -> bool:
    """Return whether a tensor is stored in fewer digits than float32."""
    return isinstance(info, Encoded) or FLOATS[info.dtype].itemsize < 4


def arrange(
    base: Checkpoint, rows: Mapping[str, int], dtype: str, max_shard_size: int | None
) -> Files:
    """Arrange the tensors of the result in the base's files, or in new ones of ``max_shard_size``
    bytes at most.

    A larger tensor has a file of its own. ``rows`` has the number of rows of tensors where it is
    not the base's.
    """
    tensors = {key: as_written(info, dtype) for key, info in base.whole.items()}
    for key, count in rows.items():
        tensors[key] = _with_rows(tensors[key], count)
    if max_shard_size is None:
        return _by_file(tensors)
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=attrgetter("nbytes"),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    files: Files = {}
    for file, keys in split.filename_to_tensors.items():
        files[file] = {key: tensors[key] for key in keys}
    return files


def _with_rows(info: TensorInfo, count: int) -> TensorInfo:
    bytes_of_row = info.nbytes // info.shape[0]
    return replace(info, shape=(count, *info.shape[1:]), stop=info.start + bytes_of_row * count)


def _by_file(tensors: Mapping[str, TensorInfo]) -> Files:
    files: Files = {}
    for key, info in tensors.items():
        files.setdefault(info.file, {})[key] = info
    return files


def make_headers(base: Checkpoint, files: Files) -> dict[str, bytes]:
    """Return the header of each file, which is the base's own where that has the same tensors."""
    headers = {}
    for file, tensors in files.items():
        of_base = base.opened.get(file)
        if of_base and _shapes(of_base.tensors) == _shapes(tensors):
            # Byte for byte, so that a file without a changed tensor is the base's own.
            headers[file] = of_base.header
        else:
            headers[file] = make_header(tensors)
    return headers


def _shapes(tensors: Mapping[str, TensorInfo]) -> dict[str, object]:
    return {key: (info.dtype, info.shape) for key, info in tensors.items()}


def find_places(base: Checkpoint, headers: Mapping[str, bytes]) -> dict[str, TensorInfo]:
    """Return the place of each tensor in files with these headers, by its key in the base."""
    places: dict[str, TensorInfo] = {}
    for file, header in headers.items():
        places |= read_header(file, header)
    return split_rows(places, base.parts)


def small_files_of(
    small: Mapping[str, bytes], base: Checkpoint, files: Files, dtype: str, untied: bool
) -> dict[str, bytes]:
    """Return the base's small files for the result, with config.json and the index changed where
    they must be.

    ``untied`` says that the result has a head of its own where the base's config ties it.
    """
    result = dict(small)
    if _CONFIG in result:
        of_base = json.loads(result[_CONFIG])
        config = _retyped(of_base, dtype)
        if untied:
            # Also where the base's config is silent, since many classes tie by default.
            config = {**_untied(config), "tie_word_embeddings": False}
        if config != of_base:
            result[_CONFIG] = _json_file(config)
    # A copy is how the base presents one weight as two; its files and index lack it.
    stored = {key: info for key, info in base.whole.items() if key not in base.copies}
    if files != _by_file(stored):
        # The base's would send a loader to files that the result does not have.
        result.pop(INDEX, None)
        if len(files) > 1:
            result[INDEX] = _index(files)
    return result


def _index(files: Files) -> bytes:
    """Return the index of files of weights, which says where each tensor is."""
    total_size = 0
    weight_map = {}
    for file, tensors in files.items():
        for key, info in tensors.items():
            total_size += info.nbytes
            weight_map[key] = file
    return _json_file({"metadata": {"total_size": total_size}, "weight_map": weight_map})


def _json_file(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _retyped(config: Any, dtype: str) -> Any:
    """Return a part of config.json with the dtype of the result, and without the base's
    quantisation, which the result does not have.
    """
    if not isinstance(config, dict):
        return config
    retyped = {}
    for key, value in config.items():
        if key not in ("quantization_config", "compression_config"):
            # Parts of a composite model, such as text_config, have a dtype of their own.
            retyped[key] = _retyped(value, dtype)
    # transformers 4 writes the one, transformers 5 the other.
    for key in ("torch_dtype", "dtype"):
        if isinstance(retyped.get(key), str) and dtype in _NAMES:
            retyped[key] = dtype
    return retyped


def _untied(config: Any) -> Any:
    """Return a part of config.json that ties nothing."""
    if not isinstance(config, dict):
        return config
    untied = {key: _untied(value) for key, value in config.items()}
    if "tie_word_embeddings" in untied:
        untied["tie_word_embeddings"] = False
    return untied
