"""Options of a method that were typed without ``method.``, which FusionBench would ignore."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from .options import EntryPoint, as_typed, current_names

_PACKAGE = Path(__file__).parents[1]
#: The configurations: a wheel carries them inside the package, a checkout has them beside it.
CONFIG = _PACKAGE / "config"
if not CONFIG.is_dir():
    CONFIG = _PACKAGE.parent / "config"


def refuse_misplaced(
    words: Sequence[str], entry_point: EntryPoint, folders: Sequence[str] = ()
) -> None:
    """Raise a ValueError, with the right spelling, for a word such as ``+null_rank=0.1667``, and in
    `fusion_bench` for an option of a method by a former name.

    Hydra adds a key that begins with ``+`` at the top level of the configuration, where nothing
    reads it: the run would have the method's default, and nothing would say so.

    Args:
        words: the words of the command line of `fusion_bench`, where they matter only if they
            name a method that comes with this package, or of `nufilt compare`.
        entry_point: where they were typed.
        folders: Hydra's search path (``file://…``) ahead of this package's configurations: a method
            of the same name there is another one.
    """
    if entry_point == "fusion_bench" and not _name_a_method(words, folders):
        return
    for word in words:
        match = re.fullmatch(r"\+{0,2}(method\.)?(\w+)=(.*)", word, re.DOTALL)
        if match is None:
            continue
        section, given_name, value = match.groups()
        name = current_names().get(given_name, given_name)
        if section is None:
            if name in _options_of_methods():
                _refuse(word, name, value, words, entry_point)
        elif entry_point == "fusion_bench" and name != given_name:
            # Hydra does not find it in the method's configuration.
            spelling = as_typed(entry_point, {name: value})
            raise ValueError(f"'{word}': {given_name} is called {name} now: say {spelling}")


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


def _name_a_method(words: Sequence[str], folders: Sequence[str]) -> bool:
    """Tell whether the words name a method of this package, of which none of the folders has
    another.
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
            return True
    return False


@cache
def _options_of_methods() -> set[str]:
    files = list(CONFIG.glob("method/**/*.yaml"))
    # These two have what the others take over.
    files.append(CONFIG / "nufilt" / "protocol.yaml")
    files.append(CONFIG / "nufilt" / "order_free.yaml")
    options: set[str] = set()
    for file in files:
        content: Any = OmegaConf.load(file)
        options.update(str(key) for key in content if not str(key).startswith("_"))
    return options - {"defaults"}
