"""The results of an analysis: its tables, and their summary in a few numbers and sentences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from fusion_bench_nufilt.pages.analysis import AnalysisSummary
from fusion_bench_nufilt.pages.metrics import LAYER_MEANS
from fusion_bench_nufilt.pages.names import depth, kind
from fusion_bench_nufilt.pages.page import sentences
from fusion_bench_nufilt.pages.tables import to_csv
from fusion_bench_nufilt.utils.files import escape_html, write_json, write_text

from .subspaces import Floats, VectorSummary, dominance, overlap
from .surrogates import harmonic_mean

Row = dict[str, Any]

LOSSES = ["stability", "plasticity"]
AFFINITY = ["layer", "kind", "data", "vector", "affinity", "chance", "by_rank"]


@dataclass
class Analysis:
    """What was measured, as rows, from which tables and summary are made; what was not measured is
    empty or None.

    A task vector has rows for the layers that it changes, and none for the others, which would pull
    means to zero. The tables leave out ``energy`` by direction, and ``by_rank``, the affinities for
    each r = r_d = r_v.
    """

    about: Row  # where it comes from, for people
    tasks: list[str]
    layers: Mapping[str, Sequence[int]]  # (d_o, d_i) by name
    task_rank: int
    vectors: list[Row] = field(default_factory=list)  # one for each task vector and layer
    overlaps: list[Row] = field(default_factory=list)  # one for each layer and two task vectors
    # One for each layer, task's data and task vector.
    affinity: list[Row] = field(default_factory=list)
    losses: list[Row] = field(default_factory=list)  # one for each method, step and layer
    # ACC and BWT by method.
    scores: dict[str, dict[str, float | None]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add_vectors(self, layer: str, size: float, vectors: Mapping[str, VectorSummary]) -> None:
        """Add a layer's task vectors, given the norm of its pretrained weight, and compare their
        directions.
        """
        d_i = self.layers[layer][1]
        changing = {task: vector for task, vector in vectors.items() if vector.norm}
        for task, vector in changing.items():
            row: Row = {"task": task, "layer": layer}
            row["norm"] = vector.norm
            row["relative_norm"] = vector.norm / (size or 1)
            row["rank"] = vector.rank
            row["effective_rank"] = vector.effective_rank
            row["rank_90"] = vector.rank_for(0.9)
            row["energy_in_top"] = float(vector.energy[: self.task_rank].sum())
            row["energy"] = vector.energy
            self.vectors.append(row)
        for (one, a), (other, b) in product(changing.items(), repeat=2):
            # That of random directions: the larger of the two subspaces counts.
            directions = max(a.directions(self.task_rank), b.directions(self.task_rank))
            row = {"layer": layer, "kind": kind(layer), "vector": one, "other_vector": other}
            row["overlap"] = overlap(a, b, self.task_rank)
            row["chance"] = directions / d_i
            self.overlaps.append(row)


def save_analysis(analysis: Analysis, folder: Path) -> tuple[AnalysisSummary, list[str]]:
    """Write ``analysis.json``, ``reading.md`` and the CSV tables; return the first one's content,
    and all names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    summary = summarise(analysis)
    write_json(folder / "analysis.json", summary)
    items = [f"- {escape_html(sentence)}\n" for sentence in summary["reading"]]
    write_text(folder / "reading.md", "".join(items))
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
    return summary, files


def reading(content: AnalysisSummary) -> list[str]:
    """Return sentences on which tasks collide and where, how many directions they take, and what
    the data shows.
    """
    names = content["names"]
    pairs = []
    for i, j in combinations(range(len(names)), 2):
        value = content["overlap"]["all"][i][j]
        if value is not None:
            pairs.append((value, names[i], names[j], content["common_layers"][i][j]))
    overlaps = content["layers_of"].get(LAYER_MEANS["overlap"], {})
    dominance = content.get("affinity", {}).get("all", {}).get("dominance")
    measured = {name: row for name, row in content.get("methods", {}).items() if "fixed" in row}
    idle_tasks = [task for task in content["tasks"] if task not in names]
    most_overlap_first = sorted(overlaps.items(), key=lambda layer: -layer[1])
    return sentences(
        "reading.txt",
        content=content,
        idle=idle_tasks,
        pairs=sorted(pairs, reverse=True),
        layers=most_overlap_first,
        dominance=dominance,
        methods=measured,
    )


def summarise(analysis: Analysis) -> AnalysisSummary:
    """Return the summary, without what was not measured; what is not finite is None.

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
    affinity = pd.DataFrame(analysis.affinity, columns=AFFINITY)
    names = list(vectors["task"].unique())
    changed = set(vectors["layer"])
    layers = []
    for name, shape in analysis.layers.items():
        if name in changed:
            about = {"name": name, "kind": kind(name), "depth": depth(name), "shape": list(shape)}
            layers.append(about)
    different = overlaps[overlaps["vector"] != overlaps["other_vector"]]
    packages = ("fusion-bench-nufilt", "torch", "transformers")
    summary = AnalysisSummary(
        about=analysis.about,
        tasks=analysis.tasks,
        names=names,
        task_rank=analysis.task_rank,
        layers=layers,
        unchanged_layers=len(analysis.layers) - len(layers),
        chance=_chances(different),
        vectors=_vectors(vectors),
        overlap=_overlaps(overlaps, names),
        common_layers=_common_layers(overlaps, names),
        energy=_energy(vectors),
        layers_of=_layer_means(vectors, different, affinity),
        versions={name: version(name) for name in packages},
        reading=[],
    )
    if analysis.affinity:
        summary["affinity"] = _affinities(affinity, analysis.tasks)
        widths = affinity["layer"].map(lambda name: analysis.layers[name][1])
        summary["affinity_by_rank"] = _by_rank(affinity, widths)
    if analysis.losses:
        summary["methods"] = {}
        # In the order in which they were asked for; pandas would sort by name.
        for name, rows in pd.DataFrame(analysis.losses).groupby("method", sort=False):
            summary["methods"][name] = {**analysis.scores.get(name, {}), **_method(rows)}
        summary["failures"] = analysis.failures
    finite: AnalysisSummary = _for_json(summary)
    finite["reading"] = reading(finite)
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


def _matrix(values: "pd.Series[float]", names: Sequence[str]) -> Floats:
    """Return values of pairs of names as an array ``(names, names)``; NaN where there is none."""
    pairs = pd.MultiIndex.from_product([names, names])
    return values.reindex(pairs).to_numpy(dtype=float).reshape(len(names), len(names))


def _chances(different: pd.DataFrame) -> Row:
    """Return the overlap of random directions, mean over pairs of different task vectors."""
    groups = _by_group(different)
    return {group: float(members["chance"].mean()) for group, members in groups.items()}


def _overlaps(overlaps: pd.DataFrame, names: Sequence[str]) -> Row:
    """Return the overlap of each two task vectors, mean over the layers that both change."""
    matrices = {}
    for group, rows in _by_group(overlaps).items():
        pairs = rows.groupby(["vector", "other_vector"])["overlap"]
        matrices[group] = _matrix(pairs.mean(), names)
    return matrices


def _common_layers(overlaps: pd.DataFrame, names: Sequence[str]) -> list[list[int]]:
    """Return the number of layers that each two task vectors change."""
    counts = overlaps.groupby(["vector", "other_vector"]).size()
    matrix: list[list[int]] = np.nan_to_num(_matrix(counts, names)).astype(int).tolist()
    return matrix


def _vectors(rows: pd.DataFrame) -> Row:
    rows = rows.copy()
    for name in ("rank", "rank_90"):
        # More directions than were computed are more than any number of them.
        rows[name] = rows[name].astype(float).fillna(math.inf)
    by_task = rows.groupby("task", sort=False)
    columns = by_task.agg(
        {
            "relative_norm": "mean",
            "rank": "median",
            "effective_rank": "median",
            "rank_90": "median",
            "energy_in_top": "mean",
        }
    )
    columns.insert(0, "layers", by_task.size())
    summary: Row = columns.to_dict("index")
    return summary


def _energy(rows: pd.DataFrame) -> Row:
    """Return the share of a task vector's energy in its first 1, 2, … directions, averaged over the
    layers.
    """
    # Narrow layers have fewer directions, and a mean takes all layers or none.
    solved = min(len(energy) for energy in rows["energy"])
    curves = {}
    for task, members in rows.groupby("task", sort=False):
        shares = [energy[:solved].cumsum(dim=0) for energy in members["energy"]]
        curves[task] = torch.stack(shares).mean(dim=0).tolist()
    return curves


def _layer_means(
    vectors: pd.DataFrame, different: pd.DataFrame, affinity: pd.DataFrame
) -> dict[str, Row]:
    """Return, by the title of a quantity, its mean over the tasks or over pairs of them in each
    layer.
    """
    is_matched = affinity["data"] == affinity["vector"]
    measured = [
        ("effective_rank", vectors, "effective_rank"),
        ("overlap", different, "overlap"),
        ("matched_affinity", affinity[is_matched], "affinity"),
        ("mismatched_affinity", affinity[~is_matched], "affinity"),
    ]
    means = {}
    for name, rows, column in measured:
        if len(rows):  # else there is one task, or no data
            by_layer = rows.groupby("layer", sort=False)[column].mean()
            means[LAYER_MEANS[name]] = by_layer.to_dict()
    return means


def _affinities(affinity: pd.DataFrame, tasks: Sequence[str]) -> Row:
    """Return the affinity of each task's data and each task vector over the layers of a group."""
    summary: Row = {}
    for group, rows in _by_group(affinity).items():
        pairs = rows.groupby(["data", "vector"])["affinity"]
        summary[group] = {
            "mean": _matrix(pairs.mean(), tasks),
            "p90": _matrix(pairs.quantile(0.9), tasks),
            "chance": float(rows["chance"].mean()),
        }
        complete = []  # the layers that all task vectors change
        for _, members in rows.groupby("layer", sort=False):
            A = _matrix(members.set_index(["data", "vector"])["affinity"], tasks)
            if not np.isnan(A).any():
                complete.append(A)
        if len(tasks) > 1 and complete:
            measures = dominance(np.stack(complete))
            summary[group]["dominance"] = {**measures, "layers": len(complete)}
    return summary


def _by_rank(affinity: pd.DataFrame, widths: pd.Series) -> Row:
    """Return the mean affinity for each r = r_d = r_v, given d_i of each row's layer."""
    curves = pd.DataFrame(affinity["by_rank"].tolist())
    is_matched = affinity["data"] == affinity["vector"]
    mismatched = []
    if not is_matched.all():
        mismatched = curves[~is_matched].mean().tolist()
    return {
        "ranks": curves.columns.tolist(),
        "diagonal": curves[is_matched].mean().tolist(),
        "off_diagonal": mismatched,
        "chance": [float((rank / widths).mean()) for rank in curves],
    }


def _method(rows: pd.DataFrame) -> Row:
    """Return a method's losses beyond the first step, and how they rank the layers."""
    later = rows[rows["step"] > 1]
    if later.empty:
        return {}
    correlations = {}
    for loss in LOSSES:
        correlations[loss] = _correlation(later, [loss, f"data_free_{loss}"])
    return {
        "fixed": _losses(later, ["stability", "plasticity"]),
        "relative": _losses(later, ["relative_stability", "relative_plasticity"]),
        "rank_correlation": correlations,
    }


def _losses(rows: pd.DataFrame, columns: list[str]) -> Row:
    """Return the layer means by step, their harmonic and arithmetic means, and the averages over
    the steps.
    """
    by_step = rows.groupby("step")[columns].mean().set_axis(LOSSES, axis=1)
    # Of the means over layers, at each step; the mean over steps comes after it.
    by_step["harmonic"] = [harmonic_mean(*pair) for pair in by_step.itertuples(index=False)]
    # pandas would take the one loss that is known for the mean of both.
    by_step["arithmetic"] = by_step[LOSSES].mean(axis=1, skipna=False)
    mean = by_step.mean().to_dict()
    # The paper does not say of what it takes the harmonic mean, so the files have both.
    mean["harmonic_of_means"] = harmonic_mean(mean["stability"], mean["plasticity"])
    return {"steps": by_step.index.tolist(), **by_step.to_dict("list"), "mean": mean}


def _correlation(rows: pd.DataFrame, columns: list[str]) -> Row:
    """Return Spearman's rank correlation of two losses over all rows, and the mean of that over
    each step's layers.
    """

    def rho(members: pd.DataFrame) -> float:
        # Any two points have a correlation of 1 or -1.
        return float(members[columns].corr("spearman", min_periods=3).iloc[0, 1])

    return {
        "layers_and_steps": rho(rows),
        "layers": rows.groupby("step")[columns].apply(rho).mean(),
    }
