"""Options of a method that were typed without ``method.``, which FusionBench would ignore, or by a
name that there is not.
"""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from .options import EntryPoint, as_typed, unknown

_PACKAGE = Path(__file__).parents[1]
#: The configurations: a wheel carries them inside the package, a checkout has them beside it.
CONFIG = _PACKAGE / "config"
if not CONFIG.is_dir():
    CONFIG = _PACKAGE.parent / "config"


def refuse_misplaced(
    words: Sequence[str], entry_point: EntryPoint, folders: Sequence[str] = ()
) -> None:
    """Raise a ValueError, with the right spelling, for a word such as ``+null_rank=0.1667``, and in
    `fusion_bench` for an option that the method does not have.

    Hydra adds a key that begins with ``+`` at the top level of the configuration, where nothing
    reads it: the run would have the method's default, and nothing would say so. For an option that
    there is not, it suggests the ``+``.

    Args:
        words: the words of the command line of `fusion_bench`, where they matter only if they
            name a method that comes with this package, or of `nufilt compare`.
        entry_point: where they were typed.
        folders: Hydra's search path (``file://…``) ahead of this package's configurations: a method
            of the same name there is another one.
    """
    options_of_method: set[str] = set()
    if entry_point == "fusion_bench":
        file = method_file(words, folders)
        if file is None:
            return
        options_of_method = _options_in(file)
    for word in words:
        match = re.fullmatch(r"\+{0,2}(method\.)?([A-Za-z]\w*)=(.*)", word, re.DOTALL)
        if match is None:
            continue
        section, name, value = match.groups()
        if section is None:
            if name in _options_of_methods():
                _refuse(word, name, value, words, entry_point)
        elif entry_point == "fusion_bench" and name not in options_of_method:
            raise ValueError(f"'{word}': {unknown('option', name, options_of_method)}")


def _refuse(
    word: str, name: str, value: str, words: Sequence[str], entry_point: EntryPoint
) -> None:
    for_all_methods = as_typed("fusion_bench", {name: value})
    if entry_point == "nufilt compare":
        for_one_method = as_typed(entry_point, {name: value})
        spelling = f"{for_one_method} in --methods, or {for_all_methods} for all methods"
        if name == "seed":
            spelling = f"--seeds {value} (in nufilt analyze: --seed {value})"
        raise ValueError(f"'{word}': {name} is an option of the methods: say {spelling}")
    if name == "seed":
        if any(other.startswith("method.seed=") for other in words):
            return
        raise ValueError(
            f"'{word}' is FusionBench's own seed, on which neither the order of the models nor the "
            f"method depends: say {for_all_methods}, or both"
        )
    raise ValueError(f"'{word}': {name} is an option of the method: say {for_all_methods}")


def method_file(words: Sequence[str], folders: Sequence[str] = ()) -> Path | None:
    """Return the file of the method of this package that the words name, of which none of the
    folders has another, or None.
    """
    # In a checkout, FusionBench finds this package's own folder as ./config, too.
    paths = [Path(folder.removeprefix("file://")).resolve() for folder in folders]
    folders_ahead = [path for path in paths if path != CONFIG.resolve()]
    for word in words:
        if not word.startswith("method="):
            continue
        file = Path("method") / f"{word.removeprefix('method=')}.yaml"
        is_elsewhere = any((folder / file).is_file() for folder in folders_ahead)
        if (CONFIG / file).is_file() and not is_elsewhere:
            return CONFIG / file
    return None


@cache
def _options_of_methods() -> set[str]:
    options: set[str] = set()
    for file in CONFIG.glob("method/**/*.yaml"):
        options |= _options_in(file)
    return options


def _options_in(file: Path) -> set[str]:
    """Return the keys of a method's configuration, with those that it takes over from others."""
    content: Any = OmegaConf.load(file)
    options = {str(key) for key in content if not str(key).startswith("_")}
    for entry in content.get("defaults", []):
        source, _, package = str(entry).partition("@")
        if package == "_here_":
            options |= _options_in(CONFIG / f"{source.lstrip('/')}.yaml")
    return options - {"defaults"}
