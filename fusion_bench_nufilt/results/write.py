"""From the folder of a run, a comparison, an analysis or a merge to its tables, pictures and page."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fusion_bench_nufilt.storage.files import MANIFEST, read_json, write_text

from .analysis import Content, analysis_files
from .comparison import comparison_files
from .content import Results
from .merge import Merge, merge_files
from .page import PAGE, Files
from .run import Run, run_files
from .theme import save_chart

log = logging.getLogger(__name__)


class Kind(NamedTuple):
    """What a folder can be of."""

    content: type  # of the file that tells so
    advice: str  # what to do if that is damaged
    files: Callable[[Any, Path], Files]  # makes all that is to be written from this content and other files
    pictures: tuple[str, ...] = ("png",)


KINDS = {
    "accuracy_matrix.json": Kind(Run, "run the method again", run_files),
    "results.json": Kind(Results, "run the comparison again", comparison_files),
    "analysis.json": Kind(Content, "run the analysis again", analysis_files, ("png", "pdf")),
    MANIFEST: Kind(Merge, "merge again", merge_files),
}


def write_results(folder: Path) -> list[str]:
    """Write tables, pictures and ``index.html``, which opens from disk, each whole or not at all; return their names.

    Raises:
        ValueError: the folder is of none of these, or one of its files is damaged; names it, and the field.
    """
    for name, kind in KINDS.items():
        if (content := read_json(folder / name, kind.content, kind.advice)) is not None:
            break
    else:
        names = ", ".join(KINDS)
        raise ValueError(f"'{folder}' is the folder of no run, comparison, analysis or merge: it has none of {names}")
    try:
        files = kind.files(content, folder)
        page = files.page.render()
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"'{folder / name}' is damaged or of another version: {error!r}") from error
    for file, text in {**files.texts, PAGE: page}.items():
        write_text(folder / file, text)
    for picture, chart in files.charts.items():
        if chart is None:
            (folder / f"{picture}.png").unlink(missing_ok=True)
        else:
            save_chart(chart, *(folder / f"{picture}.{suffix}" for suffix in kind.pictures))
    return [*files.texts, *(f"{picture}.png" for picture, chart in files.charts.items() if chart is not None), PAGE]


def leave_results(folder: Path) -> list[str]:
    """Write the same as a by-product of work that is done: if it can't be written, that is a warning."""
    try:
        return write_results(folder)
    except Exception as error:
        log.warning("there are no tables, pictures and page in '%s': %s", folder, error)
        return []
