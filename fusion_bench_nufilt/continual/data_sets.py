"""Look up the data sets of a run, by name, access and split, before any model or data set is
downloaded.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
from datasets.exceptions import DatasetNotFoundError
from fusion_bench.compat.taskpool.flan_t5_glue_text_generation import (
    FlanT5GLUETextGenerationTaskPool,
)
from hydra.utils import get_method
from omegaconf import OmegaConf

from fusion_bench_nufilt.utils.files import message_in_one_line

_LOADERS_OF_GPT2 = (
    "fusion_bench.modelpool.huggingface_gpt2_classification.load_gpt2_dataset",
    "fusion_bench.taskpool.gpt2_text_classification.load_gpt2_dataset",
)
_LOCAL_LOADERS = (
    "datasets.load_from_disk",
    "fusion_bench_nufilt.continual.taskpools.local_tasks.load_image_task",
    "fusion_bench_nufilt.continual.taskpools.local_tasks.load_images",
)
_KEYS_OF_HYDRA = ("_target_", "_args_", "_convert_", "_partial_", "_recursive_")
_OPTIONS_OF_LOADING = ("verification_mode", "keep_in_memory", "save_infos", "streaming", "num_proc")


class DataSet(NamedTuple):
    """A data set that a pool will load."""

    name: str
    # Asks the hub for its files and its configuration, or opens it where it is local.
    find: Callable[[], Any]
    split: Any = None


def check_test_sets(taskpool: Any) -> None:
    """Raise a ValueError, naming task, data set and remedy, for test data of a task pool that can't
    be loaded.

    Data in memory, and loaders that are unknown here, are left to the task pool.
    """
    if type(taskpool) is FlanT5GLUETextGenerationTaskPool:
        cache = taskpool.config.get("cache_dir")
        for task in taskpool.config.tasks:
            name = task.dataset.name
            # Where FusionBench has cached the task's data, it asks the hub for nothing.
            if cache is None or not Path(cache, "flan-t5", f"_load_{name}_dataset_cached").exists():
                _check(task.name, _of_glue(name, task.dataset.split))
    elif not getattr(taskpool, "_is_setup", False):  # else the data are loaded already
        _check_all(getattr(taskpool, "_test_datasets", None))


def check_train_sets(modelpool: Any) -> None:
    """Do the same for the training data of a model pool, whose names are compared with those of the
    models.
    """
    train_datasets = getattr(modelpool, "_train_datasets", None)
    refuse_other_spelling(modelpool.model_names, train_datasets or (), "train_datasets")
    _check_all(train_datasets)


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


def _check_all(configs: Any) -> None:
    if not isinstance(configs, Mapping) and not OmegaConf.is_dict(configs):
        return
    for task, config in configs.items():
        if OmegaConf.is_config(config):
            config = OmegaConf.to_container(config, resolve=True)
        for data_set in _data_sets(config):
            _check(str(task), data_set)


def _data_sets(config: Any) -> Iterator[DataSet]:
    """Yield the data sets in the configuration of a task's data."""
    if isinstance(config, str):
        yield DataSet(config, partial(datasets.load_dataset_builder, config))
    if not isinstance(config, dict):
        return
    if config.get("_partial_"):
        return  # the pool calls it later, with arguments that are unknown here
    target = config.get("_target_")
    arguments = config.get("_args_", [])
    options = {key: value for key, value in config.items() if key not in _KEYS_OF_HYDRA}
    if target == "datasets.load_dataset":
        yield _of_datasets(arguments, **options)
    elif target in _LOADERS_OF_GPT2:
        name = arguments[0] if arguments else options["name"]
        if not Path(f"outputs/gpt2/_load_{name}_dataset_cached").exists():
            yield _of_glue(name, options.get("split"))
    elif target in _LOCAL_LOADERS:
        path = options.get("path", options.get("dataset_path", arguments and arguments[-1]))
        yield DataSet(str(path), partial(get_method(target), *arguments, **options))
    else:
        for value in config.values():
            if isinstance(value, dict):
                yield from _data_sets(value)


def _of_glue(task: str, split: str | None) -> DataSet:
    return DataSet("glue", partial(datasets.load_dataset_builder, "glue", task), split)


def _of_datasets(arguments: Sequence[Any], split: Any = None, **options: Any) -> DataSet:
    builder_options = {key: options[key] for key in options if key not in _OPTIONS_OF_LOADING}
    name = arguments[0] if arguments else options.get("path")
    find = partial(datasets.load_dataset_builder, *arguments, **builder_options)
    return DataSet(str(name), find, split)


def _check(task: str, data: DataSet) -> None:
    try:
        builder = data.find()
        if isinstance(builder, datasets.DatasetBuilder):
            # Both are by split; a builder that has not read its card knows the files alone.
            splits = builder.info.splits or builder.config.data_files or ()
            _check_split(data.split, [str(split) for split in splits])
    except Exception as error:  # whatever datasets and the client of the hub raise
        message = message_in_one_line(error).rstrip(".")
        raise ValueError(
            f"task '{task}': its data set '{data.name}': {message}: {_remedy(data.name, error)}"
        ) from error


def _check_split(split: Any, splits: list[str]) -> None:
    """Raise a ValueError for a split such as ``test``, ``train[:10%]`` or ``train+test`` that is
    none of those that there are, as far as these are known.
    """
    if not isinstance(split, str) or not splits:
        return
    for part in split.split("+"):
        name = part.partition("[")[0].strip()
        if name not in (*splits, "all"):
            raise ValueError(f"it has no split '{name}', only {', '.join(splits)}")


def _remedy(name: str, error: Exception) -> str:
    if isinstance(error, ConnectionError):
        return "check the network, or give a task pool whose data are here"
    if "gated" in str(error):
        return "ask for access on its page and log in with `hf auth login`"
    # huggingface_hub refuses names without an owner from version 1.16 on.
    if isinstance(error, DatasetNotFoundError) and "/" not in name:
        return f"name its owner as well (OWNER/{name})"
    if isinstance(error, DatasetNotFoundError):
        return "correct its name in the pool, or log in with `hf auth login` if it is private"
    return "correct it in the pool"
