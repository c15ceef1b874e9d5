"""The data of a run: they are loaded before any model, and known by their content, so that a copy
or a renamed folder is the same and a replaced picture is not.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from datasets import ClassLabel, Dataset
from datasets.exceptions import DatasetNotFoundError
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from torch import Tensor
from typing_extensions import TypedDict

from fusion_bench_nufilt.utils.files import message_in_one_line
from fusion_bench_nufilt.utils.tensors import raw_bytes

#: Of so many items of a data set at most the content is read.
MOST_ITEMS = 1000


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
    """Return a configuration as it was given and as JSON has it; an object in it is its class."""
    if OmegaConf.is_config(config):
        config = OmegaConf.to_container(config, resolve=True)
    if isinstance(config, Mapping):
        return {str(key): describe_config(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [describe_config(value) for value in config]
    if isinstance(config, str | bool | int | float) or config is None:
        return config
    return f"{type(config).__module__}.{type(config).__qualname__}"


def load_data(task: str, load: Callable[[], Any], kind: str = "test data") -> Any:
    """Return what ``load`` returns; a ValueError names the task whose data can't be loaded, and
    what to do.
    """
    try:
        return load()
    except Exception as error:  # whatever datasets, the client of the hub and loaders raise
        cause = error
        while isinstance(cause, InstantiationException) and isinstance(cause.__cause__, Exception):
            cause = cause.__cause__
        message = message_in_one_line(cause).rstrip(".")
        raise ValueError(
            f"task '{task}': its {kind} can't be loaded: {type(cause).__name__}: {message}: "
            f"{_remedy(cause)}"
        ) from error


def _remedy(error: Exception) -> str:
    if isinstance(error, ConnectionError):
        return "check the network, or give a pool whose data are here"
    if "gated" in str(error):
        return "ask for access on its page and log in with `hf auth login`"
    if isinstance(error, DatasetNotFoundError):
        # huggingface_hub refuses names without an owner from version 1.16 on.
        return (
            "name its owner as well (OWNER/NAME), or log in with `hf auth login` if it is private"
        )
    return "correct it in the pool"


def refuse_other_spelling(tasks: Iterable[str], names: Iterable[str], place: str) -> None:
    """Raise a ValueError for a task that is not among the ``names`` in a ``place``, where one of
    them differs from it in capitals and signs alone.
    """
    for task in tasks:
        for name in names:
            if task not in names and _spelled(task) == _spelled(name):
                raise ValueError(
                    f"{place} has no '{task}', which is a model's name; did you mean its '{name}'? "
                    "Give both the same name"
                )


def _spelled(name: str) -> str:
    """Return the letters and digits of a name; a name without any as it is."""
    letters = [letter for letter in name.casefold() if letter.isalnum()]
    return "".join(letters) or name


def _spread(count: int) -> Sequence[int]:
    """Return the numbers below ``count``, or :data:`MOST_ITEMS` of them, spread evenly."""
    if count <= MOST_ITEMS:
        return range(count)
    return [number * count // MOST_ITEMS for number in range(MOST_ITEMS)]


def _parts(item: Any) -> Iterator[bytes]:
    """Yield the content of an item of any data set."""
    if isinstance(item, Mapping):
        if item.keys() == {"bytes", "path"}:  # a picture that is not decoded
            yield item["bytes"] or Path(item["path"]).read_bytes()
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
        yield bytes(raw_bytes(item.detach().cpu()))
    elif isinstance(item, np.ndarray):
        yield repr((str(item.dtype), item.shape)).encode()
        yield item.tobytes()
    elif isinstance(item, PIL.Image.Image):
        yield repr((item.mode, item.size)).encode()
        yield item.tobytes()
    elif isinstance(item, str | bytes | bool | int | float) or item is None:
        yield repr(item).encode()
    else:  # its text may have an address, which is another in each process
        yield repr(type(item)).encode()
