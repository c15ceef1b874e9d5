"""From a folder to its page."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusion_bench_nufilt.storage.files import write_text

from .analysis import ANALYSIS, write_analysis
from .comparison_page import comparison_page
from .page import Page
from .run_page import run_page

log = logging.getLogger(__name__)

PAGE = "index.html"
#: The file that tells what a folder is, and what makes its page.
KINDS: dict[str, Callable[[Path, Any], Page]] = {
    "accuracy_matrix.json": run_page,
    "results.json": comparison_page,
}


def write_page(folder: Path) -> Path:
    """Write ``index.html``, which opens from disk and needs no network.

    Args:
        folder: what a run, a comparison or an analysis left.

    Raises:
        ValueError: it is none of the three, or its file is damaged; names it.
    """
    known = (*KINDS, ANALYSIS)
    name = next((name for name in known if (folder / name).is_file()), None)
    if name is None:
        raise ValueError(
            f"'{folder}' is the folder of no run, comparison or analysis: it has none of {', '.join(known)}"
        )
    try:
        if name == ANALYSIS:
            write_analysis(folder)
            return folder / PAGE
        page = KINDS[name](folder, json.loads((folder / name).read_text(encoding="utf-8")))
    except (json.JSONDecodeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"'{folder / name}' is damaged or of another version: {error!r}") from error
    write_text(folder / PAGE, page.render())
    return folder / PAGE


def leave_page(folder: Path) -> list[str]:
    """Write the page as a by-product of work that is done: if it can't be written, that is a warning.

    Returns:
        The names of what was written.
    """
    try:
        return [write_page(folder).name]
    except Exception as error:
        log.warning("there is no %s in '%s': %s", PAGE, folder, error)
        return []
