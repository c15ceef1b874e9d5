"""An analysis as pictures, laid out as in the paper. Colours are those of Okabe and Ito, and viridis."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fusion_bench_nufilt.analysis.affinity import Floats
from fusion_bench_nufilt.analysis.results import GROUPS, Analysis
from fusion_bench_nufilt.analysis.summary import READINGS
from fusion_bench_nufilt.storage.files import atomic_file

Json = dict[str, Any]

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
_MARKERS = "osD^vP*Xp<>hd"


def save_pictures(analysis: Analysis, summary: Json, folder: Path) -> list[str]:
    """Write those there are numbers for as PNG and PDF, each whole or not at all; returns the names of the PNGs."""
    wanted: dict[str, Callable[[Analysis, Json], Figure]] = {"spectra": spectra}
    if len(analysis.names) > 1:
        wanted["overlap"] = overlap
    if "affinity" in summary:
        wanted |= {"affinity": affinity, "affinity_by_rank": affinity_by_rank}
    if any("fixed" in row for row in summary.get("methods", {}).values()):
        wanted |= {"losses": losses, "data_free": data_free}
    for name, draw in wanted.items():
        figure = draw(analysis, summary)
        for kind in ("png", "pdf"):
            with atomic_file(folder / f"{name}.{kind}") as temporary:
                figure.savefig(temporary, dpi=160, format=kind)
    return [f"{name}.png" for name in wanted]


def affinity(analysis: Analysis, summary: Json) -> Figure:
    """Columns: all layers, attention, MLP. Rows: mean over layers, 90th percentile, distribution for three pairs."""
    A = np.asarray(analysis.affinity)
    groups = [name for name in GROUPS if name in summary["affinity"]]
    figure = Figure(figsize=(4.6 * len(groups) + 0.8, 13), layout="constrained")
    panels = figure.subplots(3, len(groups), squeeze=False, height_ratios=[1, 1, 0.8])
    top = max(np.max(summary["affinity"][name]["p90"]) for name in groups)
    for column, name in enumerate(groups):
        found = summary["affinity"][name]
        for row, (key, words) in enumerate((("mean", "mean"), ("p90", "90th percentile"))):
            axes = panels[row, column]
            image = _heat_map(axes, np.array(found[key]), analysis.tasks, top)
            axes.set_title(f"{name}: {words} over {len(analysis.group(name))} layers", fontsize=10)
            if column == 0:
                axes.set_ylabel("data of")
            axes.set_xlabel("task vector of")
        _distributions(panels[2, column], A[analysis.group(name)], analysis, summary["pairs"], found["chance"])
    figure.colorbar(image, ax=panels[:2], label="affinity", shrink=0.6)
    return figure


def _heat_map(axes: Axes, values: Floats, names: list[str], top: float) -> Any:
    image = axes.imshow(values, vmin=0, vmax=top, cmap="viridis")
    size = 8 if len(names) <= 10 else 5
    for (i, j), value in np.ndenumerate(values):
        if np.isnan(value):
            continue
        text = f"{value:.2f}".lstrip("0") if value < 1 else "1"
        axes.text(j, i, text, ha="center", va="center", fontsize=size, color="white" if value < 0.6 * top else "black")
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor", fontsize=size)
    axes.set_yticks(range(len(names)), names, fontsize=size)
    axes.tick_params(length=0)
    return image


def _distributions(axes: Axes, A: Floats, analysis: Analysis, pairs: list[tuple[int, int]], level: float) -> None:
    for number, (i, j) in enumerate(pairs):
        label = f"{analysis.tasks[i]} → {analysis.tasks[j]}"
        axes.ecdf(A[:, i, j], color=COLOURS[number], linestyle=("-", "--", ":")[number], linewidth=2, label=label)
    axes.axvline(level, color="0.5", linewidth=1)
    axes.text(level, 1.0, " chance", fontsize=8, color="0.4", va="top")
    axes.set_xlim(0, 1)
    axes.set_xlabel("affinity a (data → task vector)")
    axes.set_ylabel("share of layers with A ≤ a")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")


def affinity_by_rank(analysis: Analysis, summary: Json) -> Figure:
    """Matched and mismatched pairs over r = r_d = r_v, and chance."""
    found = summary["affinity_by_rank"]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(found["ranks"], found["diagonal"], "o-", color=COLOURS[0], label="matched: the task's own vector")
    if found["off_diagonal"]:
        axes.plot(found["ranks"], found["off_diagonal"], "s--", color=COLOURS[1], label="mismatched: another task's")
    axes.plot(found["ranks"], found["chance"], ":", color="0.5", label="chance")
    axes.set_xscale("log", base=2)
    axes.set_xticks(found["ranks"], [str(rank) for rank in found["ranks"]])
    axes.set_ylim(0, 1)
    axes.set_xlabel("rank r = $r_d$ = $r_v$")
    axes.set_ylabel("affinity, mean over layers and pairs")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def overlap(analysis: Analysis, summary: Json) -> Figure:
    """Shared directions of the task vectors among themselves, for all, attention and MLP layers."""
    groups = [name for name in GROUPS if name in summary["overlap"]]
    size = max(4.0, 0.45 * len(analysis.names) + 1.5)
    figure = Figure(figsize=(size * len(groups) + 0.8, size), layout="constrained")
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    values = {name: np.array(summary["overlap"][name]) for name in groups}
    other = ~np.eye(len(analysis.names), dtype=bool)
    top = max(float(found[other].max()) for found in values.values())
    for axes, name in zip(panels, groups, strict=True):
        shown = np.where(other, values[name], np.nan)  # a vector's overlap with itself is 1 and says nothing
        image = _heat_map(axes, shown, analysis.names, top)
        axes.set_title(f"{name}: overlap of the top {analysis.task_rank} directions", fontsize=9)
    figure.colorbar(image, ax=panels, shrink=0.7)
    return figure


def spectra(analysis: Analysis, summary: Json) -> Figure:
    """Energy in the first directions of each task vector, and effective ranks by depth."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (name, curve) in enumerate(analysis.energy.items()):
        left.plot(range(1, len(curve) + 1), curve, color=COLOURS[number % 7], label=name, **_line(number))
    left.axhline(0.9, color="0.6", linewidth=1)
    left.set_ylim(0, 1.02)
    left.set_xlabel("directions")
    left.set_ylabel("share of the energy, mean over layers")
    left.grid(alpha=0.3)
    for number, kind in enumerate(kind for kind in GROUPS[1:] if kind in summary["overlap"]):
        places = [analysis.layers[k] for k in analysis.group(kind)]
        names = {layer.name: layer.depth for layer in places}
        rows = [(names[row.layer], row.effective_rank) for row in analysis.vectors if row.layer in names]
        jitter = (number - 0.5) * 0.2
        x, y = [depth + jitter for depth, _ in rows], [rank for _, rank in rows]
        right.plot(x, y, "os"[number], color=COLOURS[number], markersize=4, alpha=0.6, label=kind)
    right.set_ylim(bottom=0)
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_xlabel("block")
    right.set_ylabel("effective rank $\\|\\tau\\|_F^2 / \\sigma_1^2$")
    right.grid(alpha=0.3)
    right.legend(fontsize=8)
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure


def losses(analysis: Analysis, summary: Json) -> Figure:
    """Stability, plasticity, their harmonic and arithmetic mean by step; a row for each reading of whose inputs."""
    methods = {name: row for name, row in summary["methods"].items() if "fixed" in row}
    readings = [name for name in READINGS if all(name in row for row in methods.values())]
    figure = Figure(figsize=(15, 3.4 * len(readings)), layout="constrained")
    panels = figure.subplots(len(readings), 4, squeeze=False)
    for row, reading in enumerate(readings):
        for number, (name, found) in enumerate(methods.items()):
            values, steps = found[reading], found[reading]["steps"]
            keys = ("stability", "plasticity", "harmonic", "arithmetic")
            curves = [np.array(values[key], dtype=float) for key in keys]
            for axes, curve in zip(panels[row], curves, strict=True):
                style = {"marker": _MARKERS[number % 13], **_line(number)}
                axes.plot(steps, curve, color=COLOURS[number % 7], markersize=4, label=name, **style)
        titles = ("stability loss", "plasticity loss", "harmonic mean", "arithmetic mean")
        for axes, title in zip(panels[row], titles, strict=True):
            axes.set_title(f"{title}, {_WORDS[reading]}", fontsize=9)
            _scale(axes)
            axes.set_xlabel("step")
            axes.grid(alpha=0.3)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    return figure


_WORDS = {"fixed": "fixed inputs", "relative": "fixed inputs, relative", "propagated": "propagated inputs"}


def _scale(axes: Axes) -> None:
    """From 0 upwards, or a logarithmic axis where the values differ by more than a factor of 50."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    if (positive := values[values > 0]).size and positive.max() > 50 * positive.min():
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def data_free(analysis: Analysis, summary: Json) -> Figure:
    """The method's data-free losses against the measured ones: one point a layer and step, of each method."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, loss in zip(panels, ("stability", "plasticity"), strict=True):
        for number, method in enumerate(summary["methods"]):
            rows = [row for row in analysis.losses if row.method == method and row.step > 1]
            points = [(getattr(row, f"data_free_{loss}"), getattr(row, loss)) for row in rows]
            shown = [(x, y) for x, y in points if x > 0 and y > 0]
            rho = summary["methods"][method].get("rank_correlation", {}).get(loss, {}).get("layers")
            label = method if rho is None else f"{method}: rho {rho:.2f}"
            style = {"marker": _MARKERS[number % 13], "color": COLOURS[number % 7], "label": label}
            axes.plot(
                *(zip(*shown, strict=True) if shown else ([], [])), linestyle="", markersize=3, alpha=0.6, **style
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(f"data-free {loss} loss")
        axes.set_ylabel(f"measured {loss} loss")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, title="Spearman's rho over the layers of a step", title_fontsize=7)
    return figure


def _line(number: int) -> dict[str, Any]:
    return {"linestyle": ("-", "--", ":", "-.")[number // 7 % 4] if number >= 7 else "-", "linewidth": 1.6}
