"""The files that an analysis leaves in its folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fusion_bench_nufilt.storage.files import write_text

from .affinity import Floats
from .reading import reading
from .results import Analysis
from .summary import summarise


def save_analysis(analysis: Analysis, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Write ``analysis.json``, ``reading.md`` and the tables as CSV.

    Returns:
        The content of ``analysis.json``, with the sentences under ``reading``, and the names of the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = summarise(analysis)
    content["reading"] = reading(content)
    write_text(folder / "analysis.json", json.dumps(content, indent=1, allow_nan=False))
    write_text(folder / "reading.md", "".join(f"- {sentence}\n" for sentence in content["reading"]))
    return content, ["analysis.json", "reading.md", *_save_tables(analysis, folder)]


def _save_tables(analysis: Analysis, folder: Path) -> list[str]:
    tables = {
        "task_vectors.csv": pd.DataFrame(analysis.vectors).astype({"rank_90": "Int64"}),
        "overlaps.csv": _pairs(analysis, analysis.overlaps, ("vector", "other_vector"), "overlap"),
        "theorem.csv": pd.DataFrame(analysis.theorem),
        "losses.csv": pd.DataFrame(analysis.losses),
    }
    if analysis.affinity is not None:
        tables["affinity.csv"] = _pairs(analysis, analysis.affinity, ("data", "vector"), "affinity")
    for name, table in tables.items():
        if len(table):
            write_text(folder / name, table.to_csv(index=False, lineterminator="\n"))
    return [name for name, table in tables.items() if len(table)]


def _pairs(analysis: Analysis, values: Floats, labels: Sequence[str], name: str) -> pd.DataFrame:
    """One row for each layer and pair of names, from ``values``, ``(layers, names, names)``."""
    rows = [
        (analysis.layers[layer].name, analysis.layers[layer].kind, analysis.names[i], analysis.names[j], value)
        for (layer, i, j), value in np.ndenumerate(values)
    ]
    return pd.DataFrame(rows, columns=["layer", "kind", *labels, name])
