"""Write the tables, pictures and page for the folder of a run, a comparison, an analysis or a
merge.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fusion_bench_nufilt.utils.files import MANIFEST, RUN, read_json, write_text

from .analysis import AnalysisSummary, analysis_outputs
from .comparison import comparison_outputs
from .content import Comparison
from .merge import MergeContent, merge_outputs
from .page import PAGE, Layers, Outputs
from .pictures import save_picture
from .run import RunContent, run_outputs

log = logging.getLogger(__name__)

#: The columns of tables that hold no numbers.
_NAMES = ["task", "layer", "shape"]


class Kind(NamedTuple):
    """A kind of folder."""

    content: type  # of the file that identifies it
    advice: str  # for when that file is damaged
    make: Callable[[Any, Layers], Outputs]
    pictures: tuple[str, ...] = ("png",)


#: By the file that tells what a folder is; the first that is there decides.
KINDS = {
    "accuracy_matrix.json": Kind(RunContent, "run the method again", run_outputs),
    "results.json": Kind(Comparison, "run the comparison again", comparison_outputs),
    "analysis.json": Kind(
        AnalysisSummary, "run the analysis again", analysis_outputs, ("png", "pdf")
    ),
    MANIFEST: Kind(MergeContent, "merge again", merge_outputs),
}


def read_layers(file: Path) -> pd.DataFrame:
    """Read ``layers.csv``; a ValueError names a column that is missing or not finite."""
    try:
        # A task may be called 1 or NA.
        rows = pd.read_csv(file, dtype=str, keep_default_na=False, na_values=[""])
        missing = {"task", "layer", "step"} - set(rows)
        if missing:
            raise ValueError(f"it has no column '{min(missing)}'")
        for column in rows.columns.difference(_NAMES):
            rows[column] = _numbers(rows[column])
            if np.isinf(rows[column]).any():
                raise ValueError(f"column '{column}' is not finite")
        return rows
    except (ValueError, OSError) as error:
        raise ValueError(f"'{file}' is damaged: {' '.join(str(error).split())}") from error


def _numbers(words: pd.Series) -> pd.Series:
    """Return words as numbers to the last bit, which pandas' own reader missed before 3.1."""
    if words.str.fullmatch(r"-?\d{1,15}", na=False).all():
        return words.astype(int)
    return words.astype(float)


def write_results(folder: Path) -> list[str]:
    """Write tables, pictures and ``index.html``, which opens from disk, each atomically; return
    their names.

    Raises:
        ValueError: the folder holds no results, or a file is damaged; the message names the file
            and the field.
    """
    for name, kind in KINDS.items():
        content = read_json(folder / name, kind.content, kind.advice)
        if content is not None:
            break
    else:
        if (folder / RUN).is_file():
            raise ValueError(
                f"'{folder}' is the folder of a run without scores, which has no page: run it "
                "again with a task pool, such as the model pool's own (without taskpool=dummy)"
            )
        names = ", ".join(KINDS)
        raise ValueError(
            f"'{folder}' is the folder of no run, comparison, analysis or merge: it has none of "
            f"{names}"
        )
    file = folder / "layers.csv"
    layers = read_layers(file) if file.is_file() else None
    try:
        outputs = kind.make(content, layers)
    except ValueError as error:
        raise ValueError(f"'{folder / name}' has no page: {error}") from error
    except Exception as error:  # whatever the drawing libraries make of the content
        raise ValueError(
            f"'{folder / name}' is damaged or of another version: {error!r}"
        ) from error
    for file, text in {**outputs.texts, PAGE: outputs.page}.items():
        write_text(folder / file, text)
    written = list(outputs.texts)
    for picture, drawing in outputs.pictures.items():
        files = [folder / f"{picture}.{suffix}" for suffix in kind.pictures]
        if drawing is not None:
            save_picture(drawing, *files)
            written += [file.name for file in files]
            continue
        for file in files:
            # An earlier picture would stand beside numbers that it does not show.
            file.unlink(missing_ok=True)
    return [*written, PAGE]


def try_write_report(folder: Path) -> list[str]:
    """Do the same as a by-product of finished work, where any error but an OSError is only a
    warning.
    """
    try:
        return write_results(folder)
    except OSError:  # the disk may be full
        raise
    except Exception as error:
        log.warning("there are no tables, pictures and page in '%s': %s", folder, error)
        return []
