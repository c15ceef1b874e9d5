"""Put the findings of an analysis into sentences."""

from itertools import combinations
from statistics import fmean
from typing import Any

Json = dict[str, Any]


def reading(content: Json) -> list[str]:
    """Return sentences on which tasks collide and where, how many directions they take, and what the data shows."""
    return [*_collisions(content), _spectra(content), *_affinity(content), *_theorem(content), *_methods(content)]


def _collisions(content: Json) -> list[str]:
    names, overlap = content["names"], content["overlap"]["all"]
    pairs = sorted(((overlap[i][j], i, j) for i, j in combinations(range(len(names)), 2)), reverse=True)
    if not pairs:
        return [f"There is one task vector, '{names[0]}', and nothing that it could collide with."]
    most = ", ".join(f"{names[i]} and {names[j]} ({value:.2f})" for value, i, j in pairs[:3])
    by_layer = content["layers_of"]["overlap of two task vectors, mean over pairs"]
    *others, least = sorted(by_layer, key=lambda layer: -by_layer[layer])
    sentences = [
        f"The task vectors share {fmean(value for value, _, _ in pairs):.2f} of their top {content['task_rank']} "
        f"directions on average; chance would be {content['chance']['all']:.2f}. Those that collide most are {most}."
    ]
    if others:
        worst = ", ".join(f"{layer} ({by_layer[layer]:.2f})" for layer in others[:3])
        sentences.append(f"They collide most in {worst} and least in {least} ({by_layer[least]:.2f}).")
    return sentences


def _spectra(content: Json) -> str:
    rows = content["vectors"].values()
    top = _span([100 * row["energy_in_top"] for row in rows])
    begin = f"The top {content['task_rank']} directions of a layer hold {top} % of a task vector's energy; 90 % of it"
    ranks = [row["rank_90"] for row in rows]
    if None in ranks:
        solved = len(next(iter(content["energy"].values())))
        return f"{begin} takes more than the {solved} directions that were solved for."
    return f"{begin} takes {_span(ranks)} directions in the median layer."


def _span(values: list[float]) -> str:
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low} to {high}"


def _affinity(content: Json) -> list[str]:
    found, count = content.get("affinity", {}).get("all", {}).get("dominance"), len(content["tasks"])
    if found is None:
        return []
    return [
        f"Data and task vectors: matched pairs have a mean affinity of {found['diagonal']:.2f}, mismatched ones of "
        f"{found['off_diagonal']:.2f}; chance would be {content['chance']['all']:.2f}. The largest value is on the "
        f"diagonal in {found['rows']} of {count} rows and {found['columns']} of {count} columns; a matched pair is "
        f"above a mismatched one in {100 * found['matched_above']:.0f} % of cases."
    ]


def _theorem(content: Json) -> list[str]:
    rows = content.get("theorem")
    if not rows:
        return []
    holds = ", ".join(f"{row['condition_holds_spectral']} with r_d = {row['r_d']}" for row in rows)
    return [
        f"Theorem 1: of {rows[0]['pairs']} pairs of a layer and a task, its condition holds with the spectral norm in "
        f"{holds}, and with the paper's bound on the rows in {sum(row['condition_holds'] for row in rows)} of all. "
        f"There are {sum(row['violations'] for row in rows)} violations."
    ]


def _methods(content: Json) -> list[str]:
    methods: Json = {name: row for name, row in content.get("methods", {}).items() if "fixed" in row}
    if not methods:
        return []

    def lowest(loss: str) -> str:
        name = min(methods, key=lambda name: methods[name]["fixed"]["mean"][loss])
        return f"{name} ({methods[name]['fixed']['mean'][loss]:.3g})"

    def rho(row: Json, loss: str) -> str:
        value = row["rank_correlation"][loss]["layers"]
        return "none" if value is None else f"{value:.2f}"

    known = ", ".join(f"{name} {rho(row, 'stability')} / {rho(row, 'plasticity')}" for name, row in methods.items())
    return [
        f"Losses with fixed inputs, mean over the steps: {lowest('stability')} has the lowest stability loss, "
        f"{lowest('plasticity')} the lowest plasticity loss, and {lowest('harmonic')} the lowest harmonic mean. A "
        "method that changes little has small losses whatever it does for accuracy: read them beside ACC and BWT.",
        "Over the layers of a step, Spearman's rank correlation (rho) of the data-free losses with the measured ones, "
        f"for stability / plasticity, is: {known}.",
    ]
