"""The few numbers that an analysis comes down to, as ``analysis.json`` has them."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from statistics import fmean, median
from typing import Any

import numpy as np

from .affinity import chance, dominance, example_pairs
from .results import GROUPS, Analysis, LossRow, TheoremRow
from .surrogates import harmonic_mean, rank_correlation

Json = dict[str, Any]

#: The readings of the two losses: fields of :class:`LossRow`.
READINGS = {
    "fixed": ("stability", "plasticity"),
    "relative": ("relative_stability", "relative_plasticity"),
    "propagated": ("propagated_stability", "propagated_plasticity"),
}


def summarise(analysis: Analysis) -> Json:
    """All of it for JSON; what was not measured is left out."""
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
        "vectors": _vectors(analysis),
        "overlap": {name: _of_group(analysis, name, analysis.overlaps) for name in _groups(analysis)},
        "energy": analysis.energy,
        "layers_of": _by_layer(analysis),
        "versions": {name: version(name) for name in ("fusion-bench-nufilt", "torch", "transformers")},
    }
    if analysis.affinity is not None:
        content["affinity"] = {name: _affinity(analysis, name) for name in _groups(analysis)}
        content["pairs"] = example_pairs(analysis.affinity.mean(axis=0)) if len(analysis.tasks) > 1 else []
        content["affinity_by_rank"] = _by_rank(analysis)
    if analysis.theorem:
        content["theorem"] = _theorem(analysis.theorem)
    if analysis.losses:
        content["methods"] = {method: _method(analysis, method) for method in analysis.methods}
        content["corollary"] = _corollary(analysis.losses)
        content["failures"] = analysis.failures
    return content


def _groups(analysis: Analysis) -> list[str]:
    return [name for name in GROUPS if analysis.group(name)]


def _of_group(analysis: Analysis, name: str, values: np.ndarray) -> list[list[float]]:
    found: list[list[float]] = values[analysis.group(name)].mean(axis=0).tolist()
    return found


def _by_layer(analysis: Analysis) -> Json:
    """Means over the tasks, or over pairs of them, for each layer."""
    names = [layer.name for layer in analysis.layers]
    ranks = {name: [row.effective_rank for row in analysis.vectors if row.layer == name] for name in names}
    content: Json = {"effective rank, mean over the tasks": {name: fmean(ranks[name]) for name in names}}

    def pairs(values: np.ndarray) -> dict[str, float]:
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


def _affinity(analysis: Analysis, name: str) -> Json:
    assert analysis.affinity is not None
    members = analysis.group(name)
    A = analysis.affinity[members]
    widths = [analysis.layers[number].shape[1] for number in members]
    content: Json = {
        "mean": A.mean(axis=0).tolist(),
        "p90": np.quantile(A, 0.9, axis=0).tolist(),
        "chance": fmean(chance(analysis.task_rank, width) for width in widths),
        "layers": A.tolist(),
    }
    if len(analysis.tasks) > 1:
        found = dominance(A)
        content["dominance"] = {**dataclasses.asdict(found), "ratio": _finite(found.ratio)}
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


def _vectors(analysis: Analysis) -> Json:
    content = {}
    for name in analysis.names:
        rows = [row for row in analysis.vectors if row.task == name]
        ranks = [math.inf if row.rank_90 is None else row.rank_90 for row in rows]
        content[name] = {
            "relative_norm": fmean(row.relative_norm for row in rows),
            "effective_rank": median(row.effective_rank for row in rows),
            "rank_90": _finite(median(ranks)),
            "energy_in_top": fmean(row.energy_in_top for row in rows),
        }
    return content


def _theorem(rows: Sequence[TheoremRow]) -> list[Json]:
    content = []
    for rank in sorted({row.r_d for row in rows}):
        own = [row for row in rows if row.r_d == rank]
        content.append(
            {
                "r_d": rank,
                "pairs": len(own),
                "condition_holds": sum(math.isfinite(row.zeta) for row in own),
                "condition_holds_spectral": sum(math.isfinite(row.zeta_spectral) for row in own),
                "median_affinity": 1 - median(row.misalignment for row in own),
                "violations": sum(row.misalignment > min(row.zeta, row.zeta_spectral) ** 2 + 1e-5 for row in own),
            }
        )
    return content


def _method(analysis: Analysis, method: str) -> Json:
    rows = [row for row in analysis.losses if row.method == method]
    later = [row for row in rows if row.step > 1]
    content: Json = {**analysis.scores.get(method, {})}
    if not later:
        return content
    for reading, (stability, plasticity) in READINGS.items():
        if any(getattr(row, plasticity) is not None for row in later):
            content[reading] = _losses(later, stability, plasticity)
    content["rank_correlation"] = {
        "stability": _correlation(later, "stability"),
        "plasticity": _correlation(later, "plasticity"),
    }
    return content


def _losses(rows: Sequence[LossRow], stability: str, plasticity: str) -> Json:
    """Layer means by step, their harmonic and arithmetic means, and all that averaged over the steps."""
    steps = sorted({row.step for row in rows})
    s = [_mean(getattr(row, stability) for row in rows if row.step == step) for step in steps]
    p = [_mean(getattr(row, plasticity) for row in rows if row.step == step) for step in steps]
    harmonic = [_of_both(harmonic_mean, a, b) for a, b in zip(s, p, strict=True)]
    arithmetic = [_of_both(_arithmetic_mean, a, b) for a, b in zip(s, p, strict=True)]
    mean_s, mean_p = _mean(s), _mean(p)
    return {
        "steps": steps,
        "stability": s,
        "plasticity": p,
        "harmonic": harmonic,
        "arithmetic": arithmetic,
        "mean": {
            "stability": mean_s,
            "plasticity": mean_p,
            "harmonic": _mean(harmonic),
            "harmonic_of_means": _of_both(harmonic_mean, mean_s, mean_p),
            "arithmetic": _of_both(_arithmetic_mean, mean_s, mean_p),
        },
    }


def _of_both(mean: Callable[[float, float], float], a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else mean(a, b)


def _arithmetic_mean(a: float, b: float) -> float:
    return (a + b) / 2


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are known, or None if there are none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _correlation(rows: Sequence[LossRow], loss: str) -> Json:
    """Spearman's rank correlation of a loss with its data-free counterpart: over all layers and steps, and over the
    layers of a step, averaged over the steps."""

    def of(some: Iterable[LossRow]) -> float | None:
        pairs = [(getattr(row, loss), getattr(row, f"data_free_{loss}")) for row in some]
        return rank_correlation([a for a, _ in pairs], [b for _, b in pairs])

    by_step = [of(row for row in rows if row.step == step) for step in sorted({row.step for row in rows})]
    known = [value for value in by_step if value is not None]
    return {"layers_and_steps": of(rows), "layers": fmean(known) if known else None}


def _corollary(losses: Sequence[LossRow]) -> Json:
    """Corollary 1 where it was evaluated: the left side as a share of the right."""
    content: Json = {}
    for loss in ("stability", "plasticity"):
        shares = [
            getattr(row, loss) / bound
            for row in losses
            if (bound := getattr(row, f"{loss}_bound")) is not None and bound
        ]
        if shares:
            content[loss] = {
                "median_share": median(shares),
                "largest_share": max(shares),
                "violations": sum(share > 1 + 1e-5 for share in shares),
                "pairs": len(shares),
            }
    return content


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
