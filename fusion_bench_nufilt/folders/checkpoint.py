"""A checkpoint folder: which tensors it has, in which files, and everything beside the weights."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fusion_bench_nufilt.core.fusion import is_finite

from . import hub
from .tensors import FLOATS, TensorFile, TensorInfo, digest

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_ADAPTER = "adapter_model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_WEIGHTS = (*_PICKLES, ".safetensors", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")


class Checkpoint:
    """A model in safetensors, as headers until a tensor is asked for.

    Args:
        name: how the user named it, for messages.
        folder: where its small files are, and its weights unless they are still on the hub.
        tensors: by key.
        remote: the weights are on the hub; :meth:`fetch` downloads them.
    """

    def __init__(self, name: str, folder: Path, tensors: Mapping[str, TensorInfo], *, remote: bool = False) -> None:
        self.name, self.folder, self.tensors, self.remote = name, folder, dict(tensors), remote
        self._open: dict[str, TensorFile] = {}

    @classmethod
    def open(cls, name: str) -> "Checkpoint":
        """Read the headers of a folder or, where there is none of this name, of a hub repository.

        Raises:
            ValueError: no such folder or repository, absent or corrupt files, pickled weights; says what to do.
        """
        folder = Path(name).expanduser()
        if folder.is_dir():
            return cls.from_folder(name, folder)
        folder, files = hub.headers(name)
        tensors = {key: info for file in files.values() for key, info in file.items()}
        return cls(name, folder, tensors, remote=True)

    @classmethod
    def from_folder(cls, name: str, folder: Path) -> "Checkpoint":
        """Read the headers of a folder."""
        files = {file: TensorFile(folder / file) for file in _weight_files(name, folder)}
        checkpoint = cls(name, folder, {key: info for file in files.values() for key, info in file.tensors.items()})
        checkpoint._open = files
        if (folder / INDEX).is_file():
            promised = _weight_map(folder)
            if lost := sorted(promised.keys() - checkpoint.tensors.keys()):
                raise ValueError(f"'{name}': {INDEX} names tensors that its files lack: {some(lost)}; fetch it again")
        return checkpoint

    def fetch(self) -> None:
        """Download the weights if they are still on the hub."""
        if self.remote:
            local = self.from_folder(self.name, hub.download(self.name, self.folder, self.files))
            self.folder, self.tensors, self._open, self.remote = local.folder, local.tensors, local._open, False

    @property
    def label(self) -> str:
        """Its name without the user's folders, for files that are passed on."""
        return Path(self.name).absolute().name if Path(self.name).expanduser().is_dir() else self.name

    @property
    def files(self) -> list[str]:
        """Names of the weight files, in order."""
        return list(dict.fromkeys(info.file for info in self.tensors.values()))

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def config(self) -> dict[str, Any]:
        """config.json; empty if there is none."""
        path = self.folder / "config.json"
        try:
            return dict(json.loads(path.read_text())) if path.is_file() else {}
        except (ValueError, TypeError) as error:
            raise ValueError(f"'{path}' is no JSON object: {error}; fetch it again") from error

    def small_files(self) -> list[Path]:
        """Configuration, tokenizer, processor and whatever else is not weights, relative to the folder."""
        found = [path for path in self.folder.iterdir() if path.is_file() and not path.name.endswith(_WEIGHTS)]
        found += (self.folder / "additional_chat_templates").glob("*")
        skip = {"README.md", ".gitattributes", "nufilt.json"}
        return sorted(path.relative_to(self.folder) for path in found if path.name not in skip)

    def identity(self) -> list[object]:
        """What tells this checkpoint from a changed one without reading its weights."""
        files = ((file, (self.folder / file).stat(), self._open[file].header) for file in self.files)
        return [[file, stat.st_size, stat.st_mtime_ns, hashlib.sha256(head).hexdigest()] for file, stat, head in files]

    def file(self, key: str) -> TensorFile:
        """The open file that holds a tensor."""
        return self._open[self.tensors[key].file]

    def read(self, key: str) -> tuple[Tensor, str]:
        """A whole floating-point tensor, and the digest of its bytes.

        Raises:
            ValueError: it has NaN or infinite values, or is not floating point; names it.
        """
        info = self.tensors[key]
        if info.dtype not in FLOATS:
            raise ValueError(
                f"model '{self.name}', tensor '{key}' is stored as {info.dtype}: quantised weights can't be merged, "
                f"only {', '.join(FLOATS)}"
            )
        tensor = self.file(key).read(info)
        if not is_finite(tensor):
            raise ValueError(f"model '{self.name}', tensor '{key}' has NaN or infinite values")
        return tensor, digest(tensor)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds a peft adapter."""
    return (folder / "adapter_config.json").is_file() and (folder / _ADAPTER).is_file()


def some(names: Iterable[str], at_most: int = 4) -> str:
    """A few of many names, for a message."""
    names = list(names)
    more = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return ", ".join(f"'{name}'" for name in names[:at_most]) + more


def _weight_map(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / INDEX).read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"'{folder / INDEX}' is not an index of tensors: {error!r}; fetch it again") from error


def _weight_files(name: str, folder: Path) -> list[str]:
    if is_adapter(folder):
        return [_ADAPTER]
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if (folder / INDEX).is_file():
        files = sorted(set(_weight_map(folder).values()))
        if absent := [file for file in files if Path(file).name != file or not (folder / file).is_file()]:
            raise ValueError(f"'{name}': {INDEX} names shards that are not there: {some(absent)}; fetch them")
        return files
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        raise ValueError(f"'{name}' has {len(files)} safetensors files and no {INDEX} that tells which belong together")
    if pickles := [path.name for path in folder.iterdir() if path.suffix in _PICKLES]:
        raise ValueError(
            f"'{name}' holds pickled weights ({some(pickles)}), which run code when opened and are refused: "
            "load it with transformers where you trust it, then model.save_pretrained(folder, safe_serialization=True)"
        )
    raise ValueError(f"'{name}' holds no safetensors file")
