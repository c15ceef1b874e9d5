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
from fusion_bench_nufilt.utils.files import write_json, write_text

from .subspaces import Floats, TaskVector, dominance, example_pairs, overlap
from .surrogates import harmonic_mean

Row = dict[str, Any]

LOSSES = ["stability", "plasticity"]
OVERLAP_BY_LAYER = "overlap of two task vectors, mean over pairs"

#: The prefix of the two losses' names for each way of measuring them.
_PREFIXES = {"fixed": "", "relative": "relative_"}


@dataclass
class Analysis:
    """Everything that tables, pictures and sentences are made of; what was not measured is empty or
    None.

    A task vector has rows for the layers that it changes, and none for the others, which would pull
    means to zero. The tables leave out ``energy`` by direction, and ``by_rank``, the affinities for
    each r = r_d = r_v.
    """

    about: Row  # where it comes from, for people
    tasks: list[str]
    layers: Mapping[str, Sequence[int]]  # (d_o, d_i) by name
    task_rank: int
    # (data, vector) whose affinities are drawn; None: chosen here
    pairs: list[tuple[int, int]] | None = None
    vectors: list[Row] = field(default_factory=list)  # one for each task vector and layer
    overlaps: list[Row] = field(default_factory=list)  # one for each layer and two task vectors
    # One for each layer, task's data and task vector.
    affinity: list[Row] = field(default_factory=list)
    losses: list[Row] = field(default_factory=list)  # one for each method, step and layer
    # ACC and BWT by method.
    scores: dict[str, dict[str, float | None]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add_vectors(self, layer: str, size: float, vectors: Mapping[str, TaskVector]) -> None:
        """Add a layer's task vectors, given the norm of its pretrained weight, and compare their
        directions.
        """
        d_i = self.layers[layer][1]
        changing = {task: vector for task, vector in vectors.items() if vector.norm}
        for task, vector in changing.items():
            self.vectors.append(
                {
                    "task": task,
                    "layer": layer,
                    "norm": vector.norm,
                    "relative_norm": vector.norm / (size or 1),
                    "rank": vector.rank,
                    "effective_rank": vector.effective_rank,
                    "rank_90": vector.rank_for(0.9),
                    "energy_in_top": float(vector.energy[: self.task_rank].sum()),
                    "energy": vector.energy,
                }
            )
        for (one, a), (other, b) in product(changing.items(), repeat=2):
            self.overlaps.append(
                {
                    "layer": layer,
                    "kind": kind(layer),
                    "vector": one,
                    "other_vector": other,
                    "overlap": overlap(a, b, self.task_rank),
                    # That of random directions: the larger of the two subspaces counts.
                    "chance": max(a.directions(self.task_rank), b.directions(self.task_rank)) / d_i,
                }
            )


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
    tables = {
        "task_vectors": analysis.vectors,
        "overlaps": analysis.overlaps,
        "losses": analysis.losses,
        "affinity": analysis.affinity,
    }
    for name, rows in tables.items():
        if rows:
            table = pd.DataFrame(rows, dtype=object)  # whole numbers beside None stay whole
            table = table.drop(columns=["energy", "by_rank"], errors="ignore")
            write_text(folder / f"{name}.csv", to_csv(table))
            files.append(f"{name}.csv")
    return content, files


def reading(content: Row) -> list[str]:
    """Return sentences on which tasks collide and where, how many directions they take, and what
    the data shows.
    """
    pairs = []
    for (i, one), (j, other) in combinations(enumerate(content["names"]), 2):
        value = content["overlap"]["all"][i][j]
        if value is not None:
            pairs.append((value, one, other, content["common_layers"][i][j]))
    by_layer = content["layers_of"].get(OVERLAP_BY_LAYER, {})
    return sentences(
        "reading.txt",
        content=content,
        idle=[task for task in content["tasks"] if task not in content["names"]],
        pairs=sorted(pairs, reverse=True),
        layers=sorted(by_layer.items(), key=lambda row: -row[1]),
        dominance=content.get("affinity", {}).get("all", {}).get("dominance"),
        methods={name: row for name, row in content.get("methods", {}).items() if "fixed" in row},
    )


def summarise(analysis: Analysis) -> Row:
    """Return the summary for JSON, without what was not measured; what is not finite is None.

    Raises:
        ValueError: no task vector changes any layer.
    """
    if not analysis.vectors:
        raise ValueError(
            f"none of {', '.join(analysis.tasks)} changes any of the {len(analysis.layers)} layers "
            "that are compared: name other models, or other layers with --target-modules"
        )
    vectors = pd.DataFrame(analysis.vectors)
    overlaps = pd.DataFrame(analysis.overlaps)
    affinity = pd.DataFrame(
        analysis.affinity,
        columns=["layer", "kind", "data", "vector", "affinity", "chance", "by_rank"],
    )
    names = list(vectors["task"].unique())
    changed = set(vectors["layer"])
    layers = [
        {"name": name, "kind": kind(name), "depth": depth(name), "shape": list(shape)}
        for name, shape in analysis.layers.items()
        if name in changed
    ]
    different = overlaps[overlaps["vector"] != overlaps["other_vector"]]
    counts = overlaps.groupby(["vector", "other_vector"]).size()
    content: Row = {
        "kind": "analysis",
        "about": analysis.about,
        "tasks": analysis.tasks,
        "names": names,
        "task_rank": analysis.task_rank,
        "layers": layers,
        "unchanged_layers": len(analysis.layers) - len(layers),
        "chance": _means_by_group(different, "chance"),
        "vectors": _vectors(vectors),
        "overlap": {
            group: _matrix(rows.groupby(["vector", "other_vector"])["overlap"].mean(), names)
            for group, rows in _by_group(overlaps).items()
        },
        "common_layers": [[int(counts.get((one, other), 0)) for other in names] for one in names],
        "energy": _energy(vectors),
        "layers_of": _layers_of(vectors, different, affinity),
        "versions": {
            name: version(name) for name in ("fusion-bench-nufilt", "torch", "transformers")
        },
    }
    if len(affinity):
        affinities = _affinities(affinity, analysis.tasks)
        content["affinity"] = affinities
        chosen = []
        if len(analysis.tasks) > 1:
            chosen = example_pairs(np.nan_to_num(affinities["all"]["mean"]))
        content["pairs"] = analysis.pairs or chosen
        width = fmean(d_i for name, (_, d_i) in analysis.layers.items() if name in changed)
        content["affinity_by_rank"] = _by_rank(affinity, width)
    if analysis.losses:
        content["methods"] = {}
        for name, rows in pd.DataFrame(analysis.losses).groupby("method", sort=False):
            content["methods"][name] = {**analysis.scores.get(name, {}), **_method(rows)}
        content["failures"] = analysis.failures
    finite: Row = _for_json(content)
    return finite


def _for_json(content: Any) -> Any:
    """Turn arrays into lists, and numbers that are not finite, which JSON lacks, into None."""
    if isinstance(content, dict):
        return {key: _for_json(value) for key, value in content.items()}
    if isinstance(content, list | tuple | np.ndarray):
        return [_for_json(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content


def _by_group(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the rows of all layers, and those of attention and of MLP layers where there are
    any.
    """
    groups = {"all": rows}
    for group in ("attention", "MLP"):
        members = rows[rows["kind"] == group]
        if len(members):
            groups[group] = members
    return groups


def _means_by_group(rows: pd.DataFrame, column: str) -> dict[str, float]:
    return {group: float(members[column].mean()) for group, members in _by_group(rows).items()}


def _matrix(values: "pd.Series[float]", names: Sequence[str]) -> Floats:
    """Return values of pairs of names as an array ``(names, names)``; NaN where there is none."""
    pairs = pd.MultiIndex.from_product([names, names])
    return values.reindex(pairs).to_numpy(dtype=float).reshape(len(names), len(names))


def _vectors(rows: pd.DataFrame) -> Row:
    # More directions than were computed are more than any number of them.
    known = rows.assign(
        rank=rows["rank"].astype(float).fillna(math.inf),
        rank_90=rows["rank_90"].astype(float).fillna(math.inf),
    )
    summary: Row = (
        known.groupby("task", sort=False)
        .agg(
            layers=("layer", "size"),
            relative_norm=("relative_norm", "mean"),
            rank=("rank", "median"),
            effective_rank=("effective_rank", "median"),
            rank_90=("rank_90", "median"),
            energy_in_top=("energy_in_top", "mean"),
        )
        .to_dict("index")
    )
    return summary


def _energy(rows: pd.DataFrame) -> Row:
    """Return the share of a task vector's energy in its first 1, 2, … directions, averaged over the
    layers.
    """
    solved = min(map(len, rows["energy"]))
    curves = {}
    for task, members in rows.groupby("task", sort=False):
        shares = [energy[:solved].cumsum(dim=0) for energy in members["energy"]]
        curves[task] = torch.stack(shares).mean(dim=0).tolist()
    return curves


def _layers_of(vectors: pd.DataFrame, different: pd.DataFrame, affinity: pd.DataFrame) -> Row:
    """Return, for each layer, means over the tasks or over pairs of them."""
    matched = affinity["data"] == affinity["vector"]
    columns = {
        "effective rank, mean over the tasks": vectors.set_index("layer")["effective_rank"],
        OVERLAP_BY_LAYER: different.set_index("layer")["overlap"],
        "affinity, matched": affinity[matched].set_index("layer")["affinity"],
        "affinity, mismatched": affinity[~matched].set_index("layer")["affinity"],
    }
    means = {}
    for title, values in columns.items():
        if len(values):
            means[title] = values.groupby("layer", sort=False).mean().to_dict()
    return means


def _affinities(affinity: pd.DataFrame, tasks: Sequence[str]) -> Row:
    summary: Row = {}
    for group, rows in _by_group(affinity).items():
        pairs = rows.groupby(["data", "vector"])["affinity"]
        by_layer = [
            _matrix(members.set_index(["data", "vector"])["affinity"], tasks)
            for _, members in rows.groupby("layer", sort=False)
        ]
        # The layers that all task vectors change.
        whole = [A for A in by_layer if not np.isnan(A).any()]
        summary[group] = {
            "mean": _matrix(pairs.mean(), tasks),
            "p90": _matrix(pairs.quantile(0.9), tasks),
            "chance": float(rows["chance"].mean()),
        }
        if len(tasks) > 1 and whole:
            summary[group]["dominance"] = {**dominance(np.stack(whole)), "layers": len(whole)}
    return summary


def _by_rank(affinity: pd.DataFrame, width: float) -> Row:
    curves = pd.DataFrame(affinity["by_rank"].tolist())
    matched = affinity["data"] == affinity["vector"]
    return {
        "ranks": curves.columns.tolist(),
        "diagonal": curves[matched].mean().tolist(),
        "off_diagonal": [] if matched.all() else curves[~matched].mean().tolist(),
        "chance": [rank / width for rank in curves],
    }


def _method(rows: pd.DataFrame) -> Row:
    later = rows[rows["step"] > 1]
    if later.empty:
        return {}
    content: Row = {
        name: _losses(later, [f"{prefix}{loss}" for loss in LOSSES])
        for name, prefix in _PREFIXES.items()
    }
    content["rank_correlation"] = {
        loss: _correlation(later, [loss, f"data_free_{loss}"]) for loss in LOSSES
    }
    return content


def _losses(rows: pd.DataFrame, columns: list[str]) -> Row:
    """Return the layer means by step, their harmonic and arithmetic means, and the averages over
    the steps.
    """
    by_step = rows.groupby("step")[columns].mean().set_axis(LOSSES, axis=1)
    by_step["harmonic"] = [harmonic_mean(*pair) for pair in by_step.itertuples(index=False)]
    by_step["arithmetic"] = by_step[LOSSES].mean(axis=1, skipna=False)
    mean = by_step.mean().to_dict()
    mean["harmonic_of_means"] = harmonic_mean(mean["stability"], mean["plasticity"])
    return {"steps": by_step.index.tolist(), **by_step.to_dict("list"), "mean": mean}


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
