"""A checkpoint: a folder, or a repository of the hub, with a model or an adapter.

:class:`Checkpoint` is its tensors, as a source, and what its small files say. Which files of a
folder are its weights, what the hub gives, and which files beside the weights belong to a model
follow in this order. A folder that can't be read is refused with what makes it readable.
"""

import hashlib
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, cast

import huggingface_hub
import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import SafetensorsFileMetadata, filter_repo_objects
from pydantic import FiniteFloat, NonNegativeInt, PositiveInt
from torch import Tensor
from typing_extensions import TypedDict

from fusion_bench_nufilt.utils.files import (
    CARD,
    MANIFEST,
    Input,
    expanded,
    is_inside,
    message_in_one_line,
    printable,
    read_json,
)
from fusion_bench_nufilt.utils.fingerprint import fingerprint_files
from fusion_bench_nufilt.utils.manifest import STATE_FILE
from fusion_bench_nufilt.utils.tensors import TensorFile, TensorInfo

from .quantised import (
    DESCRIPTIONS,
    READABLE,
    ModelOptDescription,
    Quantisation,
    join_encoded,
    other_quantisation,
)
from .source import Source, format_names, program_on_page

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_PICKLED_WEIGHTS = "pytorch_model.bin"

# Weights that run code when they are opened.
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
# What a result takes over from its base, and what is downloaded besides weights.
_SMALL_FILES = [
    *("*.json", "*.jinja", "*.py"),
    *("*vocab*.txt", "merges.txt", "dict*.txt", "*.model", "*.spm", "*.bpe", "*.codes"),
    *("*.tiktoken", "LICENSE*", "NOTICE*", "USE_POLICY*", CARD),
]
# What training leaves beside a model, or a program for itself.
_NOT_OF_THE_MODEL = ["trainer_state.json", "training_args.json", "*_results.json", ".*"]


class _ModelConfig(TypedDict, total=False):
    architectures: list[str] | None
    num_labels: NonNegativeInt | None
    id2label: dict[str, Any] | None
    quantization_config: Quantisation | None
    compression_config: Quantisation | None


class _AnyAdapterConfig(TypedDict, total=False):
    peft_type: str | None
    base_model_name_or_path: str | None


class AdapterConfig(_AnyAdapterConfig, total=False):
    revision: str | None
    r: PositiveInt
    rank_pattern: dict[str, PositiveInt] | None
    lora_alpha: FiniteFloat
    alpha_pattern: dict[str, FiniteFloat] | None
    target_parameters: list[str] | None
    auto_mapping: dict[str, Any] | None
    trainable_token_indices: list[NonNegativeInt] | dict[str, list[NonNegativeInt]] | None


_Files = Mapping[str, Mapping[str, TensorInfo]]  # the tensors of each weight file, by key


class Checkpoint(Source):
    """A model in safetensors files, of which only headers are read until a tensor is asked for.

    ``name`` is the user's name for it, ``folder`` has its small files, and ``files`` has those of
    its weights. None is ``opened`` while they are still on the hub, from where :meth:`fetch`
    downloads them. ``tensors`` are those that a merge works on, by key: a weight in FP8 or MXFP4
    and its scales are one tensor, and a tensor that was :meth:`split` is several.
    """

    def __init__(self, name: str, folder: Path, files: Sequence[str], inside: str = "") -> None:
        self.name = name
        self.name_in_adapters: str | None = name  # None of a base that no adapter names
        self.revision: str | None = None
        if not expanded(name).is_dir():
            self.revision = folder.name  # in the hub's cache, that of the commit
        self.folder = folder / inside
        self.files = files
        is_here = all((self.folder / file).is_file() for file in files)
        self.remote = self.revision is not None and not is_here
        self._inside = inside
        self._fingerprint = ""  # until it is asked for
        self.tensors: dict[str, TensorInfo] = {}
        if self.remote:
            headers = _hub_headers(name, folder.name, self._paths)
        else:
            self.opened = {file: TensorFile(self.folder / file) for file in files}
            headers = {file: weights.tensors for file, weights in self.opened.items()}
        for file, tensors in headers.items():
            twice = sorted(self.tensors.keys() & tensors.keys())
            if twice:
                raise ValueError(
                    f"'{name}' has {format_names(twice)} in '{file}' and in another file: remove "
                    "one of them"
                )
            self.tensors |= tensors
        promised = {key for key, file in _weight_map(self.folder).items() if file in files}
        lost = sorted(promised - self.tensors.keys())
        if lost:
            raise ValueError(
                f"'{name}': {INDEX} names tensors that its files lack: {format_names(lost)}; fetch "
                "it again"
            )
        other = other_quantisation(self.tensors, self.quantisation)
        if other:
            raise ValueError(
                f"model '{name}' is quantised by {other}, and only {READABLE} can be merged: "
                "name the model that it was quantised from, or remove quantization_config if it is "
                "not quantised"
            )
        self.tensors = join_encoded(name, self.tensors, self.quantisation)
        self.whole = self.tensors  # before they are split
        self.copies: dict[str, str] = {}  # further keys, and those of which they have the tensors

    # How it is opened

    @classmethod
    def open(cls, name: str) -> "Checkpoint":
        """Read the headers of a folder or, where there is none, of a hub repository
        ``owner/model@revision``.
        """
        folder = expanded(name)
        if folder.is_dir():
            return cls(name, folder, _weight_files(name, folder, _local_paths(folder)))
        _refuse_path(name)
        folder = _download(name, name.partition("@")[2] or None, [ADAPTER_WEIGHTS])
        files = list(_weight_map(folder).values())
        if not files or (folder / _SINGLE).is_file():
            files = [_SINGLE]
        # What lies in the cache needs no network. Of all else, headers come first: weights are
        # downloaded once these have passed all checks.
        if is_adapter(folder) or all((folder / file).is_file() for file in files):
            paths = _local_paths(folder)
        else:
            # The folder is named after its commit: headers and weights are of one version.
            paths = list(_hub_digests(name, folder.name))
        try:
            files = _weight_files(name, folder, paths)
        except ValueError as error:
            raise ValueError(
                f"{error}; get it with `{_hub_command(name)}`, and give FOLDER"
            ) from error
        return cls(name, folder, files)

    def open_inside(self, file: str) -> "Checkpoint | None":
        """Read the header of a weight file in a folder inside this one, if there is such a folder;
        on the hub, it must be there.
        """
        path = PurePosixPath(file)
        inside = str(path.parent)
        if self.revision is not None:
            return Checkpoint(self.name, self.folder, [path.name], inside)
        home = self.folder / inside
        return self.open(str(home)) if home.is_dir() else None

    def fetch(self) -> None:
        """Download the weights, if they are on the hub."""
        if not self.remote:
            return
        folder = _download(self.name, self.revision, self._paths)
        local = Checkpoint(self.name, folder, self.files, self._inside)
        self.folder = local.folder
        copies = {key: local.whole[of] for key, of in self.copies.items()}
        self.whole = {**local.whole, **copies}
        self.opened = local.opened
        self.remote = False
        self.split(self.row_ranges)

    @property
    def _paths(self) -> list[str]:
        """The paths of the files of weights in the repository."""
        return [str(PurePosixPath(self._inside, file)) for file in self.files]

    def folder_with(self, *files: str) -> Path:
        """Return the folder; if it is the hub's, download the files that match these patterns
        first.
        """
        if self.revision is None:
            return self.folder
        return _download(self.name, self.revision, files)

    # What it is called, and what tells it from others

    @property
    def label(self) -> str:
        """The name without the user's directories, for files that others will see."""
        if self.revision is None:
            return printable(Path(self.name).absolute().name)
        return printable(self.name)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of its tensors as they are stored, whose files must be on this disk."""
        if not self._fingerprint:
            self._fingerprint = fingerprint_files(self.opened.values())
        return self._fingerprint

    @cached_property
    def hub_digests(self) -> dict[str, str]:
        """The digests that the hub gives for the files of weights, as far as they can be had: for a
        folder, there are none.
        """
        if self.revision is None:
            return {}
        if not self.remote:
            return _cached_digests(self.opened)
        digests_by_path = _hub_digests(self.name, self.revision)
        digests = {}
        for file, path in zip(self.files, self._paths, strict=True):
            digest = digests_by_path.get(path)
            if digest is None:
                return {}
            digests[file] = digest
        return digests

    def identity(self) -> Input:
        """Return what this checkpoint is known by, without reading all of its weights: their
        fingerprint, or while they are on the hub what the hub says of them.
        """
        identity = Input(name=self.label)
        if self.revision is not None:
            identity["revision"] = self.revision
        if self.hub_digests:
            identity["hub"] = self.hub_digests
        if not self.remote:
            identity["fingerprint"] = self.fingerprint
            identity["stamps"] = self.stamps
        identity["files"] = self._config_files
        return identity

    @property
    def stamps(self) -> dict[str, list[int]]:
        """The size in bytes and the time in nanoseconds of each file when it was opened."""
        return {name: list(file.stamp[:2]) for name, file in self.opened.items()}

    def is_changed(self) -> bool:
        """Tell whether a file was written to or replaced since it was opened: it has another size
        or time, or, as after `cp -p` of another model, other content.
        """
        stamps = self.stamps
        if not any(file.changed() for file in self.opened.values()):
            return False
        return not self.reopen() or self.stamps != stamps

    @cached_property
    def _config_files(self) -> dict[str, dict[str, Any]]:
        """The files whose edit changes a merge though the weights are the same: lora_alpha, for
        one, scales an adapter's update.
        """
        files: dict[str, dict[str, Any]] = {}
        for name in ("config.json", ADAPTER_CONFIG):
            path = self.folder / name
            if path.is_file():
                sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
                files[name] = {"sha256": sha256}
        return files

    def reopen(self) -> bool:
        """Open the files again, and tell whether they hold the same tensors in the same places, as
        they do after a copy.
        """
        reopened = {name: TensorFile(file.path) for name, file in self.opened.items()}
        for name, file in self.opened.items():
            if reopened[name].header != file.header:
                return False
        if fingerprint_files(reopened.values()) != self.fingerprint:
            return False
        self.opened = reopened
        return True

    # What is beside the weights

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.json, empty if there is none."""
        return _read_config(self.folder)

    @property
    def quantisation(self) -> Quantisation:
        """What config.json, or else ModelOpt's own file, says about how the weights are quantised;
        empty if they say nothing.
        """
        config: _ModelConfig = cast("_ModelConfig", self.config)
        told = config.get("quantization_config") or config.get("compression_config")
        if told:
            return told
        of_modelopt = read_json(self.folder / DESCRIPTIONS[0], ModelOptDescription) or {}
        if not of_modelopt.get("quantization"):
            return {}
        return {**of_modelopt["quantization"], "quant_method": "modelopt"}

    @cached_property
    def adapter_config(self) -> AdapterConfig:
        """The content of adapter_config.json, which scales an adapter's update; empty if there is
        none.
        """
        path = self.folder / ADAPTER_CONFIG
        config = read_json(path, _AnyAdapterConfig) or {}
        # A field means something else in another kind: OFT has r=0 where it has a block size.
        if config.get("peft_type") != "LORA":
            return cast("AdapterConfig", config)
        return read_json(path, AdapterConfig) or {}

    def small_files(self, names: str = ".*") -> dict[str, bytes]:
        """Return the content of the files beside the weights whose names match an expression, by
        path in the folder.

        Raises:
            ValueError: a file can't be read, is too large, or is a link out of the folder.
        """
        paths = _small_files(self.folder.iterdir())
        paths += (self.folder / "additional_chat_templates").glob("*.jinja")
        wanted = []
        for path in sorted(paths):
            is_index = path.name.endswith(".index.json")
            if is_index and (path.name != INDEX or self.files == [_SINGLE]):
                continue  # of other weights
            # The result gets a card and a manifest of its own.
            if path.name in (CARD, MANIFEST):
                continue
            if path.is_file() and re.fullmatch(names, path.name):
                wanted.append(path)
        return _read_files(self.folder, wanted)

    @cached_property
    def unread_weights(self) -> Sequence[str]:
        """The files of weights beside those that are read, by path in the folder; of folders in it,
        those of the ones that are no model by themselves. The state of a merge is no part of it.
        """
        files = _local_paths(self.folder)
        if self.revision is not None and is_adapter(self.folder):
            # Not all were downloaded; without a network, those that were are looked at.
            with suppress(ValueError):
                files = list(_hub_digests(self.name, self.revision))
        paths = [PurePosixPath(file) for file in files]
        models = {path.parent for path in paths if path.name.endswith("config.json")}
        unread = []
        for path in paths:
            inside = path.parent
            is_own = inside == PurePosixPath() or inside not in models
            is_of_trainer = any(_STEP.fullmatch(part) for part in inside.parts)
            is_read = str(path) in self.files or str(path) == STATE_FILE
            if is_own and not (is_of_trainer or is_read) and _has_weights(path.name):
                unread.append(str(path))
        return sorted(unread)

    def module_files(self) -> dict[str, bytes]:
        """Return the files of the modules that sentence-transformers puts behind the model, with
        their weights, by path in the folder; a ValueError names pickled weights.
        """
        modules = _module_folders(self.folder)
        if not modules:
            return {}
        # Pickles, too: a module that has nothing else is refused, wherever it comes from.
        suffixes = (".safetensors", *_PICKLE_SUFFIXES)
        folder = self.folder_with(*(f"{module}/*{end}" for module in modules for end in suffixes))
        paths = []
        for module in modules:
            files = [path for path in sorted((folder / module).rglob("*")) if path.is_file()]
            safetensors = [path for path in files if path.suffix == ".safetensors"]
            pickles = [path for path in files if path.suffix in _PICKLE_SUFFIXES]
            # Beside safetensors, pickles are further copies of the weights, and are left behind.
            if pickles and not safetensors:
                raise ValueError(
                    f"'{pickles[0]}' holds pickled weights, which run code when opened and are "
                    "refused. Where you trust them, load the folder with sentence-transformers and "
                    "save it again"
                )
            paths += [*_small_files(files), *safetensors]
        return _read_files(folder, paths)

    # Its tensors

    def same(self, key: str, other: str) -> bool:
        """Tell whether two tensors hold the same values, which are fetched for that."""
        if key != other:
            self.fetch()
        return super().same(key, other)

    def add_copy(self, key: str, of: str) -> None:
        """Present a tensor under a further key."""
        self.copies[key] = of
        self.whole = {**self.whole, key: self.whole[of]}
        self.split(self.row_ranges)

    def read(self, key: str, device: torch.device | str = "cpu") -> Tensor:
        tensor = self.tensors[key].read(self.opened).to(device)
        self.check_finite(key, tensor)
        return tensor

    def elements(self, key: str, start: int, stop: int) -> Tensor:
        return self.tensors[key].elements(self.opened, start, stop)

    # How names are mended

    def _unwrapping(self, wrapper: str) -> str:
        if wrapper == "module":
            return self.stripping(r"^module\.")  # elsewhere, a layer may be called so
        return self.stripping(rf"{wrapper}\.")

    def stripping(self, pattern: str) -> str:
        """Return what takes what matches an expression out of the names of the tensors."""
        folder = f"'{self.folder}'"
        if self.revision is not None:
            folder = f"FOLDER, which `{_hub_command(self.name)}` makes,"
        return (
            f"{program_on_page('names-of-a-wrapper')} takes it out in place, given {folder} and "
            f"{pattern!r}"
        )


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json, empty if there is none."""
    return dict(read_json(folder / "config.json", _ModelConfig) or {})


def folder_at_hand(name: str, revision: str | None = None) -> Path | None:
    """Return the folder that has the config.json of a model: its own on this disk, or that in the
    cache of the hub, which is not asked; None if there is none.
    """
    if not name:
        return None
    try:
        folder = expanded(name)
        if not folder.is_dir():
            cached = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision)
            if not isinstance(cached, str):
                return None
            folder = Path(cached).parent
        return folder if (folder / "config.json").is_file() else None
    # Names from elsewhere may be of no repository, or too long for a path.
    except (OSError, ValueError):
        return None


def config_at_hand(name: str, revision: str | None = None) -> dict[str, Any]:
    """Return the configuration of a model, empty if it is not at hand, or damaged."""
    folder = folder_at_hand(name, revision)
    try:
        return _read_config(folder) if folder else {}
    except (OSError, ValueError):
        return {}


def _refuse_path(name: str) -> None:
    """Raise a ValueError for the path of a file, or of a folder that is not there."""
    path = expanded(name)
    if path.is_file():
        raise ValueError(f"'{name}' is a file: name the folder that it is in, '{path.parent}'")
    # A name on the hub has one slash at most.
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ValueError(f"no folder '{name}'")


def is_adapter(folder: Path) -> bool:
    """Tell whether a folder holds an adapter that can be read."""
    return (folder / ADAPTER_CONFIG).is_file() and (folder / ADAPTER_WEIGHTS).is_file()


def _refuse_both(name: str, paths: Collection[str]) -> None:
    """Refuse a folder with an adapter and a whole model, of which either may be meant."""
    for file in (_SINGLE, INDEX, _PICKLED_WEIGHTS, f"{_PICKLED_WEIGHTS}.index.json"):
        if file in paths:
            raise ValueError(
                f"'{name}' holds an adapter ('{ADAPTER_WEIGHTS}') and a whole model ('{file}'): "
                "give a folder with only the one that you mean"
            )


class _Index(TypedDict):
    weight_map: dict[str, str]


def _weight_map(folder: Path) -> dict[str, str]:
    """Return each tensor's file as in the index, or nothing without one; files outside the folder
    are refused.
    """
    index = read_json(folder / INDEX, _Index)
    if not index:
        return {}
    files = index["weight_map"]
    if not files:
        raise ValueError(f"'{folder / INDEX}' names no tensor; fetch it again")
    # Any other name may belong to a file that is not weights, or that lies elsewhere.
    wrong = []
    for file in files.values():
        if Path(file).name != file or not file.endswith(".safetensors"):
            wrong.append(file)
    if wrong:
        raise ValueError(
            f"'{folder / INDEX}' names {format_names(dict.fromkeys(wrong))}: no safetensors files "
            "of this folder"
        )
    return files


# What a Trainer or accelerate saves beside weights.
_OF_A_TRAINER = re.compile(
    r"(training_args|optimizer|scheduler|scaler|sampler|rng_state|random_states"
    r"|custom_checkpoint|(dl|dataloader)_state_dict)(_\d+)*\.\w+"
)
# The folder of a step of training, whose weights are others.
_STEP = re.compile(r"(checkpoint|global_step|pytorch_model_fsdp_|optimizer_)-?\d+")
# The same weights as transformers and peft saved them before: they read safetensors alone.
_COPY = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin|adapter_model\.bin")


def _local_paths(folder: Path) -> list[str]:
    """Return the paths of what is in a folder and the folders in it, if only a link that leads
    nowhere, as a pruned cache of the hub has: whoever opens it says what it is.
    """
    paths = [*folder.glob("*"), *folder.glob("*/*")]
    return [path.relative_to(folder).as_posix() for path in paths]


def _weight_files(name: str, folder: Path, paths: Collection[str]) -> list[str]:
    """Return the names of the files of weights in a folder, given the paths of all files that are
    there, or on the hub; a ValueError says what else it holds.
    """
    if is_adapter(folder):
        _refuse_both(name, paths)
        return [ADAPTER_WEIGHTS]
    # Before the index, in the order in which transformers looks for weights.
    if _SINGLE in paths:
        return [_SINGLE]
    files = sorted(set(_weight_map(folder).values()))
    if files:
        absent = [file for file in files if file not in paths]
        if absent:
            raise ValueError(
                f"'{name}': {INDEX} names shards that are not there: {format_names(absent)}; fetch "
                "them"
            )
        return files
    names = sorted(path for path in paths if "/" not in path)
    files = [file for file in names if file.endswith(".safetensors")]
    if len(files) == 1:
        return files
    if files:
        raise ValueError(
            f"'{name}' has {len(files)} safetensors files and no {INDEX} that tells which belong "
            "together"
        )
    # Before pickles: a Trainer's folder may hold its pickled arguments beside checkpoints.
    inside = [Path(name) / path for path in _models_inside(paths)]
    if inside:
        raise ValueError(
            f"'{name}' holds no safetensors file, and {format_names(inside)} does: give that one"
        )
    pickles = [file for file in names if file.endswith(_PICKLE_SUFFIXES)]
    pickles = [file for file in pickles if not _OF_A_TRAINER.fullmatch(file)]
    if pickles:
        raise ValueError(
            f"'{name}' holds {_kind_of_pickle(folder / pickles[0])} ({format_names(pickles)}), "
            "which run code when opened and are refused. Where you trust them, "
            f"{program_on_page('pickled-weights')} saves them as safetensors"
        )
    raise ValueError(f"'{name}' holds no safetensors file")


def _has_weights(name: str) -> bool:
    """Tell whether a file of this name holds weights of a model that are nowhere else."""
    if not name.endswith((".safetensors", *_PICKLE_SUFFIXES)):
        return False
    return not (_OF_A_TRAINER.fullmatch(name) or _COPY.fullmatch(name))


def _models_inside(paths: Iterable[str]) -> list[str]:
    """Return the folders that hold a model or an adapter, given the paths of all files: of a
    Trainer's checkpoints, the newest.
    """
    files = [PurePosixPath(path) for path in paths]
    with_config = {file.parent for file in files if file.name.endswith("config.json")}
    with_weights = {file.parent for file in files if file.match("*model*.safetensors")}
    models = sorted(str(folder) for folder in with_config & with_weights)
    checkpoints = {}  # by their numbers
    for path in models:
        match = re.fullmatch(r"checkpoint-(\d+)", path)
        if match:
            checkpoints[int(match[1])] = path
    if checkpoints:
        return [checkpoints[max(checkpoints)]]
    return models


def _kind_of_pickle(file: Path) -> str:
    """Return what a pickled file holds, of which no code is run."""
    classes: list[str] = []
    # Of tensors alone, there are none. Files of PyTorch before 1.6 are not told.
    with suppress(Exception):
        classes = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if classes:
        return f"pickled objects of {format_names(sorted(classes))}"
    return "pickled weights"


def _download(name: str, revision: str | None, files: Sequence[str]) -> Path:
    """Download the small files and some others into a folder that is named after their commit, and
    return it.
    """
    try:
        folder = huggingface_hub.snapshot_download(
            _repository(name),
            revision=revision,
            allow_patterns=[*_SMALL_FILES, *files],
            ignore_patterns=_NOT_OF_THE_MODEL,
        )
    except HFValidationError as error:
        raise ValueError(
            f"'{name}' is neither a folder nor the name of a hub repository"
        ) from error
    except Exception as error:  # no network, no such repository, no access
        raise ValueError(
            f"'{name}' is no folder, and the hub can't give it: {message_in_one_line(error)}"
        ) from error
    return Path(folder)


def _repository(name: str) -> str:
    """Return the hub's ``owner/model`` of a user's ``owner/model@revision``."""
    return name.partition("@")[0]


def _hub_command(name: str) -> str:
    """Return the command that gets a hub repository, in the revision named, into a folder."""
    command = f"hf download {_repository(name)}"
    revision = name.partition("@")[2]
    if revision:
        command += f" --revision {shlex.quote(revision)}"
    return f"{command} --local-dir FOLDER"


def _cached_digests(opened: Mapping[str, TensorFile]) -> dict[str, str]:
    """Return the hub's digests of files in its cache, which names a file by them; none if one is
    named otherwise.
    """
    targets = {file: weights.path.resolve() for file, weights in opened.items()}
    if any(target.parent.name != "blobs" for target in targets.values()):
        return {}
    return {file: target.name for file, target in targets.items()}


def _hub_digests(name: str, commit: str) -> Mapping[str, str | None]:
    """Return the digests of all files of a hub repository, by path, as its cache names them; None
    where a mirror of the hub gives none.
    """
    try:
        repository = huggingface_hub.model_info(
            _repository(name), revision=commit, timeout=10, files_metadata=True
        )
    except Exception as error:  # no network, or no access any more
        raise ValueError(
            f"'{name}': the hub can't list its files: {message_in_one_line(error)}"
        ) from error
    digests = {}
    for file in repository.siblings or ():
        digests[file.rfilename] = file.lfs.sha256 if file.lfs else file.blob_id
    return digests


def _hub_headers(name: str, commit: str, paths: Sequence[str]) -> _Files:
    """Return the tensors of files of a hub repository, by the name of the file."""

    def read(path: str) -> SafetensorsFileMetadata:
        return huggingface_hub.parse_safetensors_file_metadata(
            _repository(name), path, revision=commit
        )

    headers: dict[str, dict[str, TensorInfo]] = {}
    try:
        with ThreadPoolExecutor() as threads:
            all_metadata = list(threads.map(read, paths))
    except Exception as error:
        raise ValueError(
            f"'{name}': the hub can't give the headers of its weights: {message_in_one_line(error)}"
        ) from error
    for path, metadata in zip(paths, all_metadata, strict=True):
        file = PurePosixPath(path).name
        headers[file] = {}
        for key, tensor in metadata.tensors.items():
            start, stop = tensor.data_offsets  # which do not count the header
            shape = tuple(tensor.shape)
            headers[file][key] = TensorInfo(file, str(tensor.dtype), shape, start, stop)
    return headers


def _small_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files that belong to a model besides its weights, whatever folder they are in."""
    small = filter_repo_objects(
        paths,
        allow_patterns=_SMALL_FILES,
        ignore_patterns=_NOT_OF_THE_MODEL,
        key=lambda path: path.name,
    )
    return list(small)


_MOST_BYTES = 10**9  # the largest small file, which is held in memory


def _read_files(folder: Path, paths: Iterable[Path]) -> dict[str, bytes]:
    """Return the content of files of a model, by path in its folder.

    Raises:
        ValueError: a file can't be read, is too large, or is a link out of the folder.
    """
    contents = {}
    for path in paths:
        # What a result holds may be published, and a link may lead to any file of the user's.
        if not is_inside(path, folder):
            raise ValueError(
                f"'{path}' is a link to '{path.resolve()}', out of the folder: copy the file there"
            )
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise ValueError(
                f"'{path}' has {size / 1e9:.1f} GB and is no weight file: move it elsewhere"
            )
        try:
            contents[path.relative_to(folder).as_posix()] = path.read_bytes()
        except OSError as error:
            raise ValueError(f"'{path}' can't be read: {error.strerror}") from error
    return contents


class _Module(TypedDict):
    path: str


def _module_folders(folder: Path) -> list[str]:
    """Return the folders that modules.json names beside that of the model itself; a ValueError
    names one that is elsewhere.
    """
    file = folder / "modules.json"
    modules = read_json(file, list[_Module]) or []
    paths = [PurePosixPath(module["path"]) for module in modules if module["path"]]
    for path in paths:
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"'{file}' names '{path}', which is not in the folder")
    return [str(path) for path in paths]
