"""What data and configurations are known by: the content that a run would read, and no path, name
or time, so that a copy or a renamed folder is the same and a replaced picture is not.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from datasets import ClassLabel, Dataset
from omegaconf import OmegaConf
from torch import Tensor, nn
from typing_extensions import TypedDict

from fusion_bench_nufilt.utils.files import CARD
from fusion_bench_nufilt.utils.fingerprint import fingerprint_tensors
from fusion_bench_nufilt.utils.tensors import raw_bytes

#: Of so many items of a data set, and files of a folder, at most the content is read.
MOST_ITEMS = 1000
#: Of a larger picture or file, a piece of this size is read, from its middle.
PIECE_BYTES = 2**16

# What changes no score, wherever it stands in the configuration of a pool.
_WITHOUT_EFFECT = (
    "_usage_",
    "_version_",
    "cache_dir",
    "fast_dev_run",  # a description has it by itself
    "layer_wise_feature_first_token_only",
    "layer_wise_feature_max_num",
    "layer_wise_feature_save_path",
    "move_to_device",
    "num_workers",
    "persistent_workers",
    "pin_memory",
    "prefetch_factor",
    "python",
)

# What may be the name of a folder, also without a separator in it.
_PATHS = (
    "base_model",
    "clip_model",
    "data_dir",
    "data_files",
    "dataset_path",
    "include_path",
    "path",
    "pretrained_model_name_or_path",
    "processor",
    "tokenizer",
)


class Items(TypedDict):
    """What a data set is known by."""

    items: int  # how many there are
    sha256: str  # of a sample of them, spread evenly


def describe_items(items: Any) -> Items:
    """Return what a data set is known by; it has a length and is read by number."""
    # FusionBench wraps the data in a processor, whose digits depend on its version.
    dataset = getattr(items, "dataset", items)
    if len(dataset) != len(items):  # a part of the data
        dataset = items
    sha = hashlib.sha256()
    if isinstance(dataset, Dataset):
        dataset = dataset.with_format(None)
        for column, feature in dataset.features.items():
            if isinstance(feature, ClassLabel):
                sha.update(repr((column, feature.names)).encode())
            if hasattr(feature, "decode"):  # the bytes of pictures and sounds, as they are stored
                dataset = dataset.cast_column(column, replace(feature, decode=False))
    count = len(dataset)
    for position in _spread(count):
        for part in _parts(dataset[position]):
            sha.update(part)
    return Items(items=count, sha256=sha.hexdigest())


def describe_config(config: Any) -> Any:
    """Return a configuration as JSON has it, without what changes no score.

    A folder or a file on this disk, and a module in memory, are known by their content.
    """
    if OmegaConf.is_config(config):
        config = OmegaConf.to_container(config, resolve=True)
    if isinstance(config, Mapping):
        content = {}
        for key, value in config.items():
            if key not in _WITHOUT_EFFECT:
                content[str(key)] = _describe_value(str(key), value)
        return content
    if isinstance(config, list | tuple):
        return [describe_config(value) for value in config]
    if isinstance(config, str | bool | int | float) or config is None:
        return config
    if isinstance(config, nn.Module):
        return {"content": fingerprint_tensors(config)}
    return {"class": f"{type(config).__module__}.{type(config).__qualname__}"}


def _describe_value(key: str, value: Any) -> Any:
    """Return the value of a key of a configuration, or what is known of the path that it is."""
    if isinstance(value, str) and (os.sep in value or key in _PATHS):
        path = Path(value).expanduser()
        if path.exists():
            return {"content": digest_of_path(path)}
    return describe_config(value)


def digest_of_path(path: Path) -> str:
    """Return a digest of a file, or of the names, sizes and content of the files in a folder but
    for hidden files and the card.
    """
    files = {"": path}
    if path.is_dir():
        files = {}
        for folder, subfolders, names in os.walk(path):
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
            for name in names:
                if not name.startswith(".") and name != CARD:
                    file = Path(folder, name)
                    files[file.relative_to(path).as_posix()] = file
    sha = hashlib.sha256()
    names = sorted(files)
    read_names = {names[position] for position in _spread(len(names))}
    for name in names:
        size = files[name].stat().st_size
        sha.update(repr((name, size)).encode())
        if name in read_names:
            sha.update(_piece_of_file(files[name]))
    return sha.hexdigest()


def _spread(count: int) -> Sequence[int]:
    """Return the numbers below ``count``, or :data:`MOST_ITEMS` of them, spread evenly."""
    if count <= MOST_ITEMS:
        return range(count)
    return [number * count // MOST_ITEMS for number in range(MOST_ITEMS)]


def _piece_of_file(file: Path) -> bytes:
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        stream.seek(max(0, (size - PIECE_BYTES) // 2))
        return stream.read(PIECE_BYTES)


def _piece(content: bytes) -> bytes:
    start = max(0, (len(content) - PIECE_BYTES) // 2)
    return content[start : start + PIECE_BYTES]


def _parts(item: Any) -> Iterator[bytes]:
    """Yield the content of an item of any data set."""
    if isinstance(item, Mapping):
        if item.keys() == {"bytes", "path"}:  # a picture that is not decoded
            yield _picture(item)
            return
        for key in sorted(item, key=str):
            yield repr(key).encode()
            yield from _parts(item[key])
    elif isinstance(item, list | tuple):
        yield repr(len(item)).encode()
        for value in item:
            yield from _parts(value)
    elif isinstance(item, Tensor):
        yield repr((str(item.dtype), tuple(item.shape))).encode()
        yield _piece(bytes(raw_bytes(item.detach().cpu())))
    elif isinstance(item, np.ndarray):
        yield repr((str(item.dtype), item.shape)).encode()
        yield _piece(item.tobytes())
    elif isinstance(item, PIL.Image.Image):
        yield repr((item.mode, item.size)).encode()
        yield _piece(item.tobytes())
    elif isinstance(item, str | bytes | bool | int | float) or item is None:
        yield repr(item).encode()
    else:  # its text may have an address, which is another in each process
        yield repr(type(item)).encode()


def _picture(stored: Mapping[str, Any]) -> bytes:
    content = stored["bytes"]
    if content is not None:
        return repr(len(content)).encode() + _piece(content)
    file = Path(stored["path"])
    return repr(file.stat().st_size).encode() + _piece_of_file(file)
