"""From the folder of a run, a comparison or an analysis to its tables, pictures and page."""

import logging
from collections.abc import Callable
from pathlib import Path

from .analysis import write_analysis
from .comparison import write_comparison
from .run import write_run

log = logging.getLogger(__name__)

#: The file that tells what a folder is, and what writes all that is made of it.
KINDS: dict[str, Callable[[Path], list[str]]] = {
    "accuracy_matrix.json": write_run,
    "results.json": write_comparison,
    "analysis.json": write_analysis,
}


def write_results(folder: Path) -> list[str]:
    """Write tables, pictures and ``index.html``, which opens from disk, and return the names of the files.

    Raises:
        ValueError: the folder is none of the three, or one of its files is damaged; names it.
    """
    name = next((name for name in KINDS if (folder / name).is_file()), None)
    if name is None:
        names = ", ".join(KINDS)
        raise ValueError(f"'{folder}' is the folder of no run, comparison or analysis: it has none of {names}")
    try:
        return KINDS[name](folder)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"'{folder / name}' is damaged or of another version: {error!r}") from error


def leave_results(folder: Path) -> list[str]:
    """Write the same as a by-product of work that is done: if it can't be written, that is a warning."""
    try:
        return write_results(folder)
    except Exception as error:
        log.warning("there are no tables, pictures and page in '%s': %s", folder, error)
        return []
