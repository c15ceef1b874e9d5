"""What an analysis leaves in its folder: its tables, and the few numbers and sentences that they come down to."""

import json
import math
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from fusion_bench_nufilt.storage.files import write_text

from .affinity import Floats, dominance, example_pairs
from .reading import reading
from .results import Analysis
from .surrogates import harmonic_mean, rank_correlation

Json = dict[str, Any]

#: The fields of :class:`LossRow` that hold the two losses, by the way in which these are measured.
READINGS = {
    "fixed": ("stability", "plasticity"),
    "relative": ("relative_stability", "relative_plasticity"),
    "propagated": ("propagated_stability", "propagated_plasticity"),
}


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


def summarise(analysis: Analysis) -> Json:
    """Return all of an analysis for JSON; what was not measured is left out, and what is not finite is None."""
    groups: dict[str, list[int]] = {"all": [], "attention": [], "MLP": []}  # the numbers of their layers
    for number, layer in enumerate(analysis.layers):
        groups["all"].append(number)
        groups[layer.kind].append(number)
    groups = {name: members for name, members in groups.items() if members}
    content: Json = {
        "kind": "analysis",
        "about": analysis.about,
        "tasks": analysis.tasks,
        "names": analysis.names,
        "task_rank": analysis.task_rank,
        "layers": [
            {"name": layer.name, "kind": layer.kind, "depth": layer.depth, "shape": list(layer.shape)}
            for layer in analysis.layers
        ],
        "chance": {name: _chance(analysis, members) for name, members in groups.items()},
        "vectors": _vectors(analysis),
        "overlap": {name: analysis.overlaps[members].mean(axis=0).tolist() for name, members in groups.items()},
        "energy": analysis.energy,
        "layers_of": _by_layer(analysis),
        "versions": {name: version(name) for name in ("fusion-bench-nufilt", "torch", "transformers")},
    }
    if analysis.affinity is not None:
        content["affinity"] = {
            name: {**_affinity(analysis.affinity[members]), "chance": content["chance"][name]}
            for name, members in groups.items()
        }
        content["pairs"] = example_pairs(analysis.affinity.mean(axis=0)) if len(analysis.tasks) > 1 else []
        content["affinity_by_rank"] = _by_rank(analysis)
    if analysis.theorem:
        content["theorem"] = _theorem(analysis)
    if analysis.losses:
        losses = pd.DataFrame(analysis.losses)
        by_method = losses.groupby("method", sort=False)
        content["methods"] = {name: {**analysis.scores.get(name, {}), **_method(rows)} for name, rows in by_method}
        content["corollary"] = _corollary(losses)
        content["failures"] = analysis.failures
    finite: Json = _finite(content)
    return finite


def _finite(content: Any) -> Any:
    """Replace every number that is not finite by None, since JSON has no such numbers."""
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _chance(analysis: Analysis, layers: list[int]) -> float:
    widths = [analysis.layers[number].shape[1] for number in layers]
    return fmean(min(analysis.task_rank, width) / width for width in widths)


def _vectors(analysis: Analysis) -> Json:
    rows = pd.DataFrame(analysis.vectors)
    rows["rank_90"] = rows["rank_90"].astype(float).fillna(math.inf)  # more directions than were solved for
    how = {"relative_norm": "mean", "effective_rank": "median", "rank_90": "median", "energy_in_top": "mean"}
    found: Json = rows.groupby("task", sort=False).agg(how).to_dict("index")
    return found


def _by_layer(analysis: Analysis) -> Json:
    """Return for each layer the means over the tasks, or over pairs of them."""
    names = [layer.name for layer in analysis.layers]
    ranks = pd.DataFrame(analysis.vectors).groupby("layer", sort=False)["effective_rank"].mean()
    content: Json = {"effective rank, mean over the tasks": ranks.to_dict()}

    def pairs(values: Floats) -> dict[str, float]:
        other = ~np.eye(values.shape[-1], dtype=bool)
        return dict(zip(names, values[:, other].mean(axis=1).tolist(), strict=True))

    if len(analysis.names) > 1:
        content["overlap of two task vectors, mean over pairs"] = pairs(analysis.overlaps)
    if analysis.affinity is not None:
        own = np.diagonal(analysis.affinity, axis1=1, axis2=2).mean(axis=1)
        content["affinity, matched"] = dict(zip(names, own.tolist(), strict=True))
        if len(analysis.tasks) > 1:
            content["affinity, mismatched"] = pairs(analysis.affinity)
    return content


def _affinity(A: Floats) -> Json:
    """Summarise the affinities ``(layers, T, T)`` of a group of layers."""
    content: Json = {"mean": A.mean(axis=0).tolist(), "p90": np.quantile(A, 0.9, axis=0).tolist()}
    if A.shape[-1] > 1:
        content["dominance"] = dominance(A)
    return content


def _by_rank(analysis: Analysis) -> Json:
    assert analysis.affinity_by_rank is not None
    M = analysis.affinity_by_rank.mean(axis=0)  # (data, vectors, ranks)
    own = np.eye(len(M), dtype=bool)
    width = fmean(layer.shape[1] for layer in analysis.layers)
    return {
        "ranks": analysis.ranks,
        "diagonal": M[own].mean(axis=0).tolist(),
        "off_diagonal": M[~own].mean(axis=0).tolist() if len(M) > 1 else [],
        "chance": [rank / width for rank in analysis.ranks],
    }


def _theorem(analysis: Analysis) -> list[Json]:
    return [
        {
            "r_d": int(str(rank)),
            "pairs": len(own),
            "condition_holds": int(np.isfinite(own["zeta"]).sum()),
            "condition_holds_spectral": int(np.isfinite(own["zeta_spectral"]).sum()),
            "median_affinity": 1 - float(own["misalignment"].median()),
            "violations": int(own["violated"].sum()),
        }
        for rank, own in pd.DataFrame(analysis.theorem).groupby("r_d")
    ]


def _method(rows: pd.DataFrame) -> Json:
    """Summarise the losses of one method from the second step on."""
    later = rows[rows["step"] > 1]
    if later.empty:
        return {}
    known = {name: list(pair) for name, pair in READINGS.items() if later[pair[1]].notna().any()}
    content = {name: _losses(later, columns) for name, columns in known.items()}
    content["rank_correlation"] = {loss: _correlation(later, loss) for loss in ("stability", "plasticity")}
    return content


def _losses(rows: pd.DataFrame, columns: list[str]) -> Json:
    """Return the layer means by step, their harmonic and arithmetic means, and the averages of these over the steps."""
    by_step = rows.groupby("step")[columns].mean().set_axis(["stability", "plasticity"], axis=1)
    by_step["harmonic"] = [harmonic_mean(*pair) for pair in by_step.itertuples(index=False)]
    by_step["arithmetic"] = by_step[["stability", "plasticity"]].mean(axis=1, skipna=False)
    mean = by_step.mean()
    return {
        "steps": by_step.index.tolist(),
        **by_step.to_dict("list"),
        "mean": {**mean.to_dict(), "harmonic_of_means": harmonic_mean(mean["stability"], mean["plasticity"])},
    }


def _correlation(rows: pd.DataFrame, loss: str) -> Json:
    """Return Spearman's rank correlation of a loss with its data-free counterpart.

    It is taken over all layers and steps, and over the layers of a step, averaged over the steps where it is defined.
    """

    def of(some: pd.DataFrame) -> float | None:
        return rank_correlation(some[loss].tolist(), some[f"data_free_{loss}"].tolist())

    known = [value for _, step in rows.groupby("step") if (value := of(step)) is not None]
    return {"layers_and_steps": of(rows), "layers": fmean(known) if known else None}


def _corollary(losses: pd.DataFrame) -> Json:
    """Return the left side of Corollary 1 as a share of the right, where it was evaluated."""
    content: Json = {}
    for loss in ("stability", "plasticity"):
        known = losses[losses[f"{loss}_bound"].astype(float) > 0]
        shares = known[loss].astype(float) / known[f"{loss}_bound"].astype(float)
        if len(shares):
            content[loss] = {
                "median_share": float(shares.median()),
                "largest_share": float(shares.max()),
                "violations": int((shares > 1 + 1e-5).sum()),
                "pairs": len(shares),
            }
    return content
