"""What an analysis says, in words."""

from itertools import combinations
from typing import Any

import numpy as np

from .affinity import chance
from .results import Analysis

Json = dict[str, Any]


def reading(analysis: Analysis, summary: Json) -> list[str]:
    """A few sentences: which tasks collide and where, how many directions they take, and what the data says."""
    words = _collisions(analysis) + _spectra(analysis, summary)
    if (found := summary.get("affinity", {}).get("all", {}).get("dominance")) is not None:
        chance_level = summary["affinity"]["all"]["chance"]
        count = len(analysis.tasks)
        words.append(
            f"Data and task vectors: matched pairs have a mean affinity of {found['diagonal']:.2f}, mismatched ones of "
            f"{found['off_diagonal']:.2f}, chance would be {chance_level:.2f}. The largest value is on the diagonal in "
            f"{found['rows']} of {count} rows and {found['columns']} of {count} columns; a matched pair is above a "
            f"mismatched one in {100 * found['matched_above']:.0f} % of cases."
        )
    if rows := summary.get("theorem"):
        holds = ", ".join(f"{row['condition_holds_spectral']} with r_d = {row['r_d']}" for row in rows)
        strict = sum(row["condition_holds"] for row in rows)
        words.append(
            f"Theorem 1: of {rows[0]['pairs']} pairs of a layer and a task its condition holds, with the spectral "
            f"norm, in {holds} ({strict} in all with the paper's bound on the rows); violations: "
            f"{sum(row['violations'] for row in rows)}."
        )
    return words + _methods(summary)


def _collisions(analysis: Analysis) -> list[str]:
    names, level = analysis.names, _chance(analysis)
    pairs = [(float(analysis.overlaps[:, i, j].mean()), i, j) for i, j in combinations(range(len(names)), 2)]
    if not pairs:
        return [f"There is one task vector, '{names[0]}', and nothing that it could collide with."]
    pairs.sort(reverse=True)
    most = ", ".join(f"{names[i]} and {names[j]} ({value:.2f})" for value, i, j in pairs[:3])
    words = [
        f"The task vectors share {np.mean([value for value, _, _ in pairs]):.2f} of their top {analysis.task_rank} "
        f"directions on average; chance would be {level:.2f}. Those that collide most: {most}."
    ]
    upper = np.triu_indices(len(names), 1)
    by_layer = analysis.overlaps[:, upper[0], upper[1]].mean(axis=1)
    order = by_layer.argsort()[::-1]
    worst = ", ".join(f"{analysis.layers[k].name} ({by_layer[k]:.2f})" for k in order[:3])
    least = analysis.layers[order[-1]]
    words.append(f"They collide most in {worst} and least in {least.name} ({by_layer[order[-1]]:.2f}).")
    return words


def _spectra(analysis: Analysis, summary: Json) -> list[str]:
    words = []
    rows = summary["vectors"]
    looked = len(next(iter(analysis.energy.values())))
    known = [row["rank_90"] for row in rows.values() if row["rank_90"] is not None]
    top = [row["energy_in_top"] for row in rows.values()]
    span = f"{100 * min(top):.0f} to {100 * max(top):.0f} %" if max(top) - min(top) > 0.005 else f"{100 * top[0]:.0f} %"
    text = f"The top {analysis.task_rank} directions of a layer hold {span} of a task vector's energy"
    if len(known) == len(rows):
        low, high = min(known), max(known)
        text += f"; 90 % of it takes {low:.0f}{f' to {high:.0f}' if high > low else ''} directions in the median layer."
    else:
        text += f"; 90 % of it takes more than the {looked} directions that were looked at."
    words.append(text)
    return words


def _methods(summary: Json) -> list[str]:
    methods: Json = {name: row for name, row in summary.get("methods", {}).items() if "fixed" in row}
    if not methods:
        return []

    def lowest(loss: str) -> str:
        name = min(methods, key=lambda name: methods[name]["fixed"]["mean"][loss])
        return f"{name} ({methods[name]['fixed']['mean'][loss]:.3g})"

    words = [
        f"Losses with fixed inputs, mean over the steps: the lowest stability loss is that of {lowest('stability')}, "
        f"the lowest plasticity loss that of {lowest('plasticity')}, the lowest harmonic mean that of "
        f"{lowest('harmonic')}. A method that changes little has small losses, whatever it does for "
        "accuracy: read them beside ACC and BWT."
    ]
    known = []
    for name, row in methods.items():
        values = [row["rank_correlation"][loss]["layers"] for loss in ("stability", "plasticity")]
        shown = " / ".join("none" if value is None else f"{value:.2f}" for value in values)
        known.append(f"{name} {shown}")
    words.append(
        "Over the layers of a step, the data-free losses rank as the measured ones with Spearman's rho (stability / "
        f"plasticity) of {', '.join(known)}."
    )
    return words


def _chance(analysis: Analysis) -> float:
    return float(np.mean([chance(analysis.task_rank, layer.shape[1]) for layer in analysis.layers]))
