"""The files beside the weights: configurations, tokenizers, code, the licence, and the modules that
sentence-transformers puts behind a model.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from typing_extensions import TypedDict

from fusion_bench_nufilt.utils.files import CARD, read_json

#: What a result takes over from its base, and what is downloaded besides weights.
SMALL_FILES = [
    *("*.json", "*.jinja", "*.py"),
    *("*vocab*.txt", "merges.txt", "dict*.txt", "*.model", "*.spm", "*.bpe", "*.codes"),
    *("*.tiktoken", "LICENSE*", "NOTICE*", "USE_POLICY*", CARD),
]
#: What training leaves beside a model, or a program for itself.
NOT_OF_THE_MODEL = ["trainer_state.json", "training_args.json", "*_results.json", ".*"]
#: Weights that run code when they are opened.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

_MODULES = "modules.json"
_MOST_BYTES = 10**9  # the largest small file, which is held in memory


class _Module(TypedDict):
    path: str


def is_small_file(name: str) -> bool:
    """Tell whether a file of this name, without folders, belongs to a model besides its weights."""
    if any(fnmatchcase(name, pattern) for pattern in NOT_OF_THE_MODEL):
        return False
    return any(fnmatchcase(name, pattern) for pattern in SMALL_FILES)


def module_folders(folder: Path) -> list[str]:
    """Return the folders that modules.json names beside that of the model itself; a ValueError
    names one that is elsewhere.
    """
    modules = read_json(folder / _MODULES, list[_Module]) or []
    paths = [PurePosixPath(module["path"]) for module in modules if module["path"]]
    for path in paths:
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"'{folder / _MODULES}' names '{path}', which is not in the folder")
    return [str(path) for path in paths]


def module_files(folder: Path) -> dict[str, bytes]:
    """Return the content of the modules' files, with their weights, by path in the folder; a
    ValueError names pickled weights.
    """
    paths = []
    for module in module_folders(folder):
        files = [path for path in sorted((folder / module).rglob("*")) if path.is_file()]
        safetensors = [path for path in files if path.suffix == ".safetensors"]
        pickles = [path for path in files if path.suffix in PICKLES]
        # Beside safetensors, pickles are further copies of the weights, and are left behind.
        if pickles and not safetensors:
            raise ValueError(
                f"'{pickles[0]}' holds pickled weights, which run code when opened and are "
                "refused. Where you trust them, load the folder with sentence-transformers and "
                "save it again"
            )
        paths += [path for path in files if is_small_file(path.name)]
        paths += safetensors
    return read_files(folder, paths)


def read_files(folder: Path, paths: Iterable[Path]) -> dict[str, bytes]:
    """Return the content of files of a model, by path in its folder.

    Raises:
        ValueError: a file can't be read, is too large, or is a link out of the folder.
    """
    homes = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":  # beside these, the hub's cache has the files
        homes.append(folder.resolve().parents[1] / "blobs")
    contents = {}
    for path in paths:
        target = path.resolve()
        # What a result holds may be published, and a link may lead to any file of the user's.
        if not any(target.is_relative_to(home) for home in homes):
            raise ValueError(
                f"'{path}' is a link to '{target}', out of the folder: copy the file there"
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
