"""The comparison as pictures. Colours are those of Okabe and Ito, which colour-blind readers can tell apart."""

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fusion_bench_nufilt.compare.presets import SENSITIVITY
from fusion_bench_nufilt.compare.summary import Comparison, Mean
from fusion_bench_nufilt.continual import METRICS
from fusion_bench_nufilt.results.matrix import draw_matrix, summary

_COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
_MARKERS = "osD^vP*Xp<>hd"  # 13 to 7 colours: no two of 91 methods look the same
_LINES = ["-", "--", ":"]
_REFERENCE_LINES = {"pretrained": ":", "individual": "--"}


_SYMBOLS = {panel.key: f"${panel.symbol}$" for panel in SENSITIVITY}


def _style(number: int) -> dict[str, Any]:
    """Of the method with this number, the same in every picture."""
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "linestyle": _LINES[number // len(_COLOURS) % len(_LINES)],
    }


def accuracy_per_step(comparison: Comparison) -> Figure:
    """Mean score on the tasks seen so far after each step: mean over the seeds, and a band of one deviation.

    More than six methods have no bands, which would hide each other.
    """
    figure = Figure(figsize=(9.6, 5), layout="constrained")
    axes = figure.add_subplot()
    steps = range(1, len(comparison.tasks) + 1)
    for number, method in enumerate(comparison.methods):
        if not method.matrices:
            continue
        mean, std = (100 * values for values in method.mean_seen)
        axes.plot(steps, mean, **_style(number), markersize=5, label=method.spec.label)
        if len(comparison.finished) <= 6:
            axes.fill_between(steps, mean - std, mean + std, color=_style(number)["color"], alpha=0.12, linewidth=0)
    for label in comparison.references:
        reference = 100 * comparison.reference(label)
        axes.axhline(reference, color="grey", linestyle=_REFERENCE_LINES[label], label=f"{label}, all tasks")
    names = [str(step) for step in steps]
    if len(comparison.seeds) == 1 and len(comparison.tasks) <= 10:  # the order is one
        order = comparison.finished[0].matrices[0].tasks
        names = [f"{step}\n+ {task}" for step, task in zip(steps, order, strict=True)]
    axes.set_xticks(steps, names, fontsize=8 if "\n" in names[0] else None)
    axes.set_xlabel("models merged")
    axes.set_ylabel("mean score on the tasks seen so far (%)")
    axes.grid(axis="y", alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    final = {m.spec.label: m.metrics["ACC"].mean for m in comparison.finished}
    ranked = sorted(range(len(labels)), key=lambda i: -final.get(labels[i], -math.inf))
    figure.legend([handles[i] for i in ranked], [labels[i] for i in ranked], loc="outside right upper", fontsize=8)
    return figure


def stability_plasticity(comparison: Comparison) -> Figure:
    r"""BWT against the mean score of each task right after its own step, with one deviation over the seeds.

    ACC = plasticity + (T-1)/T · BWT for T tasks, so that grey lines of equal ACC fall from left to right.
    """
    figure = Figure(figsize=(8.4, 5), layout="constrained")
    axes = figure.add_subplot()
    for number, method in enumerate(comparison.methods):
        plasticity, bwt = method.metrics["plasticity"], method.metrics["BWT"]
        if math.isnan(plasticity.mean) or math.isnan(bwt.mean):
            continue
        style = _style(number)
        x, y = 100 * plasticity.mean, 100 * bwt.mean
        xerr, yerr = _deviation(plasticity), _deviation(bwt)
        axes.errorbar(x, y, yerr, xerr, fmt="none", color=style["color"], capsize=2, elinewidth=1)
        axes.plot(x, y, style["marker"], color=style["color"], markersize=8, label=method.spec.label)
    axes.margins(0.12)
    _draw_equal_acc(axes, len(comparison.tasks))
    axes.set_xlabel("plasticity: score of each task right after its own step (%)")
    axes.set_ylabel("stability: BWT (%)")
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def _draw_equal_acc(axes: Axes, tasks: int) -> None:
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    share = (tasks - 1) / tasks
    lowest, highest = left + share * bottom, right + share * top
    distance = max(1, 5 * round((highest - lowest) / 50))
    for acc in range(math.ceil(lowest / distance) * distance, min(100, math.floor(highest)) + 1, distance):
        axes.plot([left, right], [(acc - left) / share, (acc - right) / share], color="0.85", linewidth=0.8, zorder=0)
        at_top = acc - share * top  # where the line leaves the frame
        x, y = (at_top, top) if left <= at_top <= right else (right, (acc - right) / share)
        if bottom <= y <= top and x - left > 0.08 * (right - left):  # room for the words
            axes.annotate(
                f"ACC {acc}", (x, y), (-2, -2), textcoords="offset points",
                ha="right", va="top", fontsize=7, color="0.5",
            )  # fmt: skip
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)


def accuracy_matrices(comparison: Comparison) -> Figure:
    """The accuracy matrices of the first seed, one panel per method; other seeds have other orders."""
    count, tasks = len(comparison.methods), len(comparison.tasks)
    across = min(4, math.ceil(count**0.5))
    down = math.ceil(count / across)
    side = 2.2 if tasks <= 10 else 3.2
    figure = Figure(figsize=(across * side + 1.6, down * (side + 0.35) + 1), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False)
    image = None
    for place, axes in enumerate(panels.flat):
        if place >= count:
            axes.set_axis_off()
            continue
        method = comparison.methods[place]
        matrix = method.runs[0].matrix
        title = method.spec.label
        if matrix is None:
            axes.text(0.5, 0.5, "failed", ha="center", va="center", transform=axes.transAxes, color="grey")
            axes.set_xticks([])
            axes.set_yticks([])
        else:
            image = draw_matrix(axes, matrix, fontsize=6.5 if tasks <= 10 else 4.5)
            title += f"\n{summary(matrix)}"
            lowest = place + across >= count
            axes.set_xticks(range(tasks), matrix.tasks if lowest else [], rotation=90, fontsize=7)
            axes.set_yticks(
                range(tasks), [f"+ {task}" for task in matrix.tasks] if place % across == 0 else [], fontsize=7
            )
            axes.tick_params(length=0)
        axes.set_title(title, fontsize=8)
    figure.suptitle(f"Score (%) of each task (columns) after each step (rows), seed {comparison.seeds[0]}", fontsize=10)
    if image is not None:
        figure.colorbar(image, ax=panels, label="score (%)", shrink=0.6)
    return figure


def ablation(comparison: Comparison) -> Figure:
    """ACC and BWT as bars with one deviation over the seeds, and the paper's ACC where it is printed."""
    printed = comparison.published
    methods = comparison.methods
    figure = Figure(figsize=(9, 1.4 + 0.55 * len(methods)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, name in ((left, "ACC"), (right, "BWT")):
        for place, method in enumerate(methods):
            mean = method.metrics[name]
            if not math.isnan(mean.mean):
                axes.barh(place, 100 * mean.mean, xerr=_deviation(mean), color=_COLOURS[0], height=0.6, capsize=3)
            text = mean.percent(sign=METRICS[name].signed) if method.matrices else "failed"
            axes.text(1.02, place, text, transform=axes.get_yaxis_transform(), va="center", fontsize=9)
        axes.set_xlabel(f"{name} (%)")
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    numbers = [(printed[key]["ACC"].value, at) for at, m in enumerate(methods) if (key := m.spec.label) in printed]
    if numbers:
        left.plot(*zip(*numbers, strict=True), "D", color=_COLOURS[1], label="paper", zorder=3)
        left.legend(fontsize=8, loc="lower right")
    left.set_yticks(range(len(methods)), [method.spec.label for method in methods])
    left.invert_yaxis()
    return figure


def sensitivity(comparison: Comparison) -> Figure:
    """ACC (above) and BWT (below) over what each panel varies; a dashed line marks the method's own value."""
    figure = Figure(figsize=(13, 5), layout="constrained")
    rows = {method.spec.label: method for method in comparison.finished}
    usual = rows.get("steps 50")
    columns = figure.subplots(2, len(SENSITIVITY), sharex="col", sharey="row").T
    for panel, (upper, lower) in zip(SENSITIVITY, columns, strict=True):
        curve = [method for label, method in rows.items() if label.startswith(f"{panel.symbol} ")]
        values = [method.setting(panel.key) for method in curve]
        for axes, name in ((upper, "ACC"), (lower, "BWT")):
            means = [100 * method.metrics[name].mean for method in curve]
            deviations = [_deviation(method.metrics[name]) or 0.0 for method in curve]
            axes.errorbar(range(len(curve)), means, deviations, color=_COLOURS[0], marker="o", markersize=5, capsize=3)
            if usual and usual.setting(panel.key) in values:
                axes.axvline(values.index(usual.setting(panel.key)), color="grey", linestyle="--", linewidth=1)
            axes.set_xticks(range(len(curve)), [str(value) for value in values])
            axes.grid(alpha=0.3)
        fixed = {_SYMBOLS[key]: curve[0].setting(key) for key in panel.fixed if curve}
        upper.set_title(", ".join(f"{symbol} = {value}" for symbol, value in fixed.items()), fontsize=9)
        lower.set_xlabel(panel.key if panel.key == "max_steps" else f"{panel.key} (${panel.symbol}$)")
    columns[0][0].set_ylabel("ACC (%)")
    columns[0][1].set_ylabel("BWT (%)")
    return figure


def _deviation(mean: Mean) -> float | None:
    return None if math.isnan(mean.std) else 100 * mean.std
