"""Read ``KEY=VALUE`` words with Hydra's own parser."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import expanded, message_in_one_line
from .options import unknown

# Hydra is imported where there is a word to read, which most merges do without.
if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

#: The name of this plugin in Hydra's search path.
PLUGIN = "fusion-bench-nufilt"
_PACKAGE = Path(__file__).parents[1]
#: The configurations: a wheel carries them inside the package, a checkout has them beside it.
CONFIG = _PACKAGE / "config"
if not CONFIG.is_dir():
    CONFIG = _PACKAGE.parent / "config"


def user_folders(words: Sequence[str]) -> list[str]:
    """Return the folders of configurations (``file://…``) that a command line names by
    ``--config-dir`` and ``hydra.searchpath``.
    """
    from hydra._internal.utils import get_args_parser

    try:
        options, other_words = get_args_parser().parse_known_args(list(words))
        overrides = [_parse(word) for word in [*options.overrides, *other_words]]
    except (SystemExit, ValueError):
        return []  # Hydra itself says what is wrong with the words
    folders = []
    if options.config_dir is not None:
        folders.append(f"file://{Path(options.config_dir).resolve()}")
    for override in overrides:
        value = override.value()
        if override.key_or_group == "hydra.searchpath" and isinstance(value, list):
            folders += map(str, value)
    return folders


def names_in(group: str, folders: Iterable[str]) -> set[str]:
    """Return the names of a group, such as ``continual/opcm`` of methods, of which folders
    (``file://…``) have files.
    """
    names = set()
    for folder in folders:
        path = Path(folder.removeprefix("file://"), group)
        if folder.startswith("file://"):
            names |= {file.relative_to(path).as_posix()[:-5] for file in path.rglob("*.yaml")}
    return names


def refuse_unknown_names(words: Sequence[str], folders: Sequence[str]) -> None:
    """Raise a ValueError of one line for a word of `fusion_bench` that Hydra can't read, or that
    names a method, a pool or the like of which no folder (``file://…``) has a file; Hydra would
    list them all.
    """
    from hydra._internal.utils import get_args_parser

    options, other_words = get_args_parser().parse_known_args(list(words))
    if options.config_dir is not None:
        _refuse_missing_folder(Path(options.config_dir))
    for word in [*options.overrides, *other_words]:
        if word.startswith("-"):
            continue  # Hydra itself says what is wrong with it
        override = _parse(word)
        group = override.key_or_group
        name = override.value()
        # Of its own groups, Hydra has names in its package.
        if not isinstance(name, str) or override.is_sweep_override() or group.startswith("hydra"):
            continue
        names = names_in(group, folders)
        if names and name not in names:
            listing = (
                f"one of your own is found in the folder of --config-dir, as {group}/{name}.yaml"
            )
            raise ValueError(unknown(group, name, names, listing))


def key_value(word: str) -> tuple[str, Any]:
    """Return the key and the value of a word that sets one value; refuse any other."""
    from hydra.core.override_parser.types import OverrideType

    override = _parse(word)
    if override.type is not OverrideType.CHANGE or override.is_sweep_override():
        hint = ""
        key, _, values = word.partition("=")
        if override.is_sweep_override():
            hint = f"; a list is in brackets: '{key}=[{values}]'"
        raise ValueError(f"'{word}' is not of the form KEY=VALUE with one value{hint}")
    return override.key_or_group, override.value()


def key_of(word: str) -> str:
    """Return the key of a word of any form, such as ``+method.x=1`` or ``~taskpool``."""
    return _parse(word).key_or_group


def with_config_dir(folder: Path | None, words: Sequence[str]) -> list[str]:
    """Add the word that makes Hydra look for configurations in a folder of the user's."""
    if folder is None:
        return list(words)
    _refuse_missing_folder(expanded(folder))
    path = str(expanded(folder).resolve()).replace("\\", "\\\\").replace("'", "\\'")
    return [*words, f"hydra.searchpath=['file://{path}']"]


def _refuse_missing_folder(config_dir: Path) -> None:
    if not config_dir.is_dir():
        raise ValueError(f"--config-dir: there is no folder '{config_dir}'")


def without_method(words: Iterable[str]) -> list[str]:
    return [word for word in words if not key_of(word).startswith("method.")]


def _parse(word: str) -> "Override":
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(word)
    except HydraException as error:
        reason = message_in_one_line(error)
        key, _, value = word.partition("=")
        if set(value) & set("={}") and "'" not in value:
            reason += f"; a value with = or braces is in both kinds of quotes: \"{key}='{value}'\""
        raise ValueError(f"'{word}' is not of the form KEY=VALUE: {reason}") from None
