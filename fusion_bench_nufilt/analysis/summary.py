"""The results of an analysis: its tables, and their summary in a few numbers and sentences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import torch

from fusion_bench_nufilt.pages.names import depth, kind
from fusion_bench_nufilt.pages.page import sentences
from fusion_bench_nufilt.pages.tables import to_csv
from fusion_bench_nufilt.storage.files import write_json, write_text

from .subspaces import Floats, TaskVector, dominance, example_pairs, overlap
from .surrogates import harmonic_mean

Row = dict[str, Any]

LOSSES = ["stability", "plasticity"]

#: The prefix of the two losses' names for each way of measuring them.
_PREFIXES = {"fixed": "", "relative": "relative_"}


@dataclass
class Analysis:
    """Everything that tables, pictures and sentences are made of; what was not measured is empty or
    None.

    The tables leave out ``energy`` by direction, and ``by_rank``, the affinities for each r = r_d =
    r_v.
    """

    about: Row  # where it comes from, for people
    tasks: list[str]
    layers: Mapping[str, Sequence[int]]  # (d_o, d_i) by name
    task_rank: int
    pairs: list[tuple[int, int]] | None = (
        None  # (data, vector) whose affinities are drawn; None: chosen here
    )
    vectors: list[Row] = field(default_factory=list)  # one for each task vector and layer
    overlaps: list[Row] = field(default_factory=list)  # one for each layer and two task vectors
    affinity: list[Row] = field(
        default_factory=list
    )  # one for each layer, task's data and task vector
    losses: list[Row] = field(default_factory=list)  # one for each method, step and layer
    scores: dict[str, dict[str, float | None]] = field(
        default_factory=dict
    )  # ACC and BWT by method
    failures: dict[str, str] = field(default_factory=dict)

    def add_vectors(self, layer: str, size: float, vectors: Mapping[str, TaskVector]) -> None:
        """Add a layer's task vectors, given the norm of its pretrained weight, and compare their
        directions.
        """
        rank = self.task_rank
        for task, vector in vectors.items():
            row = {
                "task": task,
                "layer": layer,
                "norm": vector.norm,
                "relative_norm": vector.norm / (size or 1),
            }
            row |= {"effective_rank": vector.effective_rank, "rank_90": vector.rank_for(0.9)}
            self.vectors.append(
                row | {"energy_in_top": float(vector.energy[:rank].sum()), "energy": vector.energy}
            )
        for (one, a), (other, b) in product(vectors.items(), repeat=2):
            row = {"layer": layer, "kind": kind(layer), "vector": one, "other_vector": other}
            self.overlaps.append(row | {"overlap": overlap(a, b, rank)})


def save_analysis(analysis: Analysis, folder: Path) -> tuple[Row, list[str]]:
    """Write ``analysis.json``, ``reading.md`` and the CSV tables; return the first one's content,
    and all names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = summarise(analysis)
    content["reading"] = reading(content)
    write_json(folder / "analysis.json", content)
    write_text(folder / "reading.md", "".join(f"- {sentence}\n" for sentence in content["reading"]))
    files = ["analysis.json", "reading.md"]
    for name in ("vectors", "overlaps", "losses", "affinity"):
        table = pd.DataFrame(
            getattr(analysis, name), dtype=object
        )  # whole numbers beside None stay whole
        if len(table):
            files.append("task_vectors.csv" if name == "vectors" else f"{name}.csv")
            write_text(
                folder / files[-1],
                to_csv(table.drop(columns=["energy", "by_rank"], errors="ignore")),
            )
    return content, files


def reading(content: Row) -> list[str]:
    """Return sentences on which tasks collide and where, how many directions they take, and what
    the data shows.
    """
    named, overlaps = list(enumerate(content["names"])), content["overlap"]["all"]
    pairs = [(overlaps[i][j], i, j, one, other) for (i, one), (j, other) in combinations(named, 2)]
    by_layer = content["layers_of"].get("overlap of two task vectors, mean over pairs", {})
    return sentences(
        "reading.txt",
        content=content,
        pairs=[(value, one, other) for value, _, _, one, other in sorted(pairs, reverse=True)],
        layers=sorted(by_layer.items(), key=lambda row: -row[1]),
        dominance=content.get("affinity", {}).get("all", {}).get("dominance"),
        methods={name: row for name, row in content.get("methods", {}).items() if "fixed" in row},
    )


def summarise(analysis: Analysis) -> Row:
    """Return the summary for JSON, without what was not measured; what is not finite is None."""
    vectors, overlaps = pd.DataFrame(analysis.vectors), pd.DataFrame(analysis.overlaps)
    affinity = pd.DataFrame(
        analysis.affinity, columns=["layer", "kind", "data", "vector", "affinity", "by_rank"]
    )
    layers = pd.DataFrame(
        {"name": name, "kind": kind(name), "depth": depth(name), "shape": list(shape)}
        for name, shape in analysis.layers.items()
    )
    widths = {group: [d_i for _, d_i in rows["shape"]] for group, rows in _by_group(layers).items()}
    chance = {
        group: fmean(min(analysis.task_rank, d_i) / d_i for d_i in own)
        for group, own in widths.items()
    }
    content: Row = {
        "kind": "analysis",
        "about": analysis.about,
        "tasks": analysis.tasks,
        "names": list(vectors["task"].unique()),
        "task_rank": analysis.task_rank,
        "layers": layers.to_dict("records"),
        "chance": chance,
        "vectors": _vectors(vectors),
        "overlap": {
            group: _matrices(own, "overlap").mean(axis=0)
            for group, own in _by_group(overlaps).items()
        },
        "energy": _energy(vectors),
        "layers_of": _layers_of(vectors, overlaps, affinity),
        "versions": {
            name: version(name) for name in ("fusion-bench-nufilt", "torch", "transformers")
        },
    }
    if len(affinity):
        by_group = {
            group: _affinity(_matrices(own, "affinity"))
            for group, own in _by_group(affinity).items()
        }
        content["affinity"] = {
            group: {**found, "chance": chance[group]} for group, found in by_group.items()
        }
        chosen = example_pairs(by_group["all"]["mean"]) if len(analysis.tasks) > 1 else []
        content["pairs"] = analysis.pairs or chosen
        content["affinity_by_rank"] = _by_rank(affinity, fmean(widths["all"]))
    if analysis.losses:
        losses = pd.DataFrame(analysis.losses)
        by_method = losses.groupby("method", sort=False)
        content["methods"] = {
            name: {**analysis.scores.get(name, {}), **_method(rows)} for name, rows in by_method
        }
        content["failures"] = analysis.failures
    finite: Row = _for_json(content)
    return finite


def _for_json(content: Any) -> Any:
    """Turn arrays into lists, and numbers that are not finite, which JSON lacks, into None."""
    if isinstance(content, dict):
        return {key: _for_json(value) for key, value in content.items()}
    if isinstance(content, list | tuple | np.ndarray):
        return [_for_json(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _by_group(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the rows of all layers, and those of attention and of MLP layers where there are
    any.
    """
    return {"all": rows} | {
        kind: own for kind in ("attention", "MLP") if len(own := rows[rows["kind"] == kind])
    }


def _matrices(rows: pd.DataFrame, value: str) -> Floats:
    """Return a column of a table of pairs as an array ``(layers, names, names)``."""
    count = rows["vector"].nunique()
    return rows[value].to_numpy().reshape(-1, count, count)


def _vectors(rows: pd.DataFrame) -> Row:
    ranks = rows["rank_90"].astype(float).fillna(math.inf)  # more directions than were computed
    how = {
        "relative_norm": "mean",
        "effective_rank": "median",
        "rank_90": "median",
        "energy_in_top": "mean",
    }
    found: Row = rows.assign(rank_90=ranks).groupby("task", sort=False).agg(how).to_dict("index")
    return found


def _energy(rows: pd.DataFrame) -> Row:
    """Return the share of a task vector's energy in its first 1, 2, … directions, averaged over the
    layers.
    """
    solved = min(map(len, rows["energy"]))
    curves = (
        rows["energy"]
        .map(lambda energy: energy[:solved].cumsum(-1))
        .groupby(rows["layer"], sort=False)
    )
    mean = torch.stack([torch.stack(list(of_layer)) for _, of_layer in curves]).mean(dim=0)
    return dict(zip(rows["task"].unique(), mean.tolist(), strict=True))


def _layers_of(vectors: pd.DataFrame, overlaps: pd.DataFrame, affinity: pd.DataFrame) -> Row:
    """Return, for each layer, means over the tasks or over pairs of them."""
    two, own = (
        overlaps[overlaps["vector"] != overlaps["other_vector"]],
        affinity["data"] == affinity["vector"],
    )
    found = {
        "effective rank, mean over the tasks": vectors.set_index("layer")["effective_rank"],
        "overlap of two task vectors, mean over pairs": two.set_index("layer")["overlap"],
        "affinity, matched": affinity[own].set_index("layer")["affinity"],
        "affinity, mismatched": affinity[~own].set_index("layer")["affinity"],
    }
    return {
        title: rows.groupby("layer", sort=False).mean().to_dict()
        for title, rows in found.items()
        if len(rows)
    }


def _affinity(A: Floats) -> Row:
    known = {"dominance": dominance(A)} if A.shape[-1] > 1 else {}
    return {"mean": A.mean(axis=0), "p90": np.quantile(A, 0.9, axis=0), **known}


def _by_rank(affinity: pd.DataFrame, width: float) -> Row:
    curves, own = pd.DataFrame(affinity["by_rank"].tolist()), affinity["data"] == affinity["vector"]
    return {
        "ranks": curves.columns.tolist(),
        "diagonal": curves[own].mean().tolist(),
        "off_diagonal": [] if own.all() else curves[~own].mean().tolist(),
        "chance": [rank / width for rank in curves],
    }


def _method(rows: pd.DataFrame) -> Row:
    later = rows[rows["step"] > 1]
    if later.empty:
        return {}
    content = {
        name: _losses(later, [f"{prefix}{loss}" for loss in LOSSES])
        for name, prefix in _PREFIXES.items()
    }
    return content | {
        "rank_correlation": {
            loss: _correlation(later, [loss, f"data_free_{loss}"]) for loss in LOSSES
        }
    }


def _losses(rows: pd.DataFrame, columns: list[str]) -> Row:
    """Return the layer means by step, their harmonic and arithmetic means, and the averages over
    the steps.
    """
    by_step = rows.groupby("step")[columns].mean().set_axis(LOSSES, axis=1)
    by_step["harmonic"] = [harmonic_mean(*pair) for pair in by_step.itertuples(index=False)]
    by_step["arithmetic"] = by_step[LOSSES].mean(axis=1, skipna=False)
    mean = by_step.mean()
    return {
        "steps": by_step.index.tolist(),
        **by_step.to_dict("list"),
        "mean": {
            **mean.to_dict(),
            "harmonic_of_means": harmonic_mean(mean["stability"], mean["plasticity"]),
        },
    }


def _correlation(rows: pd.DataFrame, columns: list[str]) -> Row:
    """Return Spearman's rank correlation of two losses over all rows, and the mean of that over
    each step's layers.
    """

    def rho(some: pd.DataFrame) -> float:
        return float(some[columns].corr("spearman", min_periods=3).iloc[0, 1])

    return {
        "layers_and_steps": rho(rows),
        "layers": rows.groupby("step")[columns].apply(rho).mean(),
    }
