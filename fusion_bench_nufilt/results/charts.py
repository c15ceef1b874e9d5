"""Charts as plotly's figures: plain dictionaries. Colours are those of Okabe and Ito, and viridis."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fusion_bench_nufilt.layers.names import depth, kind

from .html import Figure

Matrix = Sequence[Sequence[float | None]]
Numbers = Sequence[float | None]

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "star", "x", "triangle-down", "pentagon", "hexagon"]
_LINES = ["solid", "dash", "dot"]


def heat_maps(
    maps: Mapping[str, Matrix], rows: Sequence[str], columns: Sequence[str], words: tuple[str, str]
) -> Figure:
    """Matrices of which one is shown, to be chosen by name where there are several.

    Args:
        maps: by name, all of one shape.
        rows: labels, from the top.
        columns: labels.
        words: what rows and columns are.
    """
    first = next(iter(maps.values()))
    values = [value for matrix in maps.values() for row in matrix for value in row if value is not None]
    trace = {
        "type": "heatmap",
        "z": first,
        "x": list(columns),
        "y": list(rows),
        "colorscale": "Viridis",
        "zmin": min(0.0, *values) if values else 0,
        "zmax": max(values, default=1),
        "texttemplate": "%{z:.2f}" if max(values, default=1) < 2 else "%{z:.0f}",
        "hovertemplate": f"{words[0]} %{{y}}<br>{words[1]} %{{x}}<br>%{{z:.3f}}<extra></extra>",
        "hoverongaps": False,
        "colorbar": {"thickness": 12},
    }
    layout: dict[str, Any] = {
        "yaxis": {
            "autorange": "reversed",
            "automargin": True,
            "title": {"text": words[0], "standoff": 10},
            "type": "category",
        },
        "xaxis": {"automargin": True, "tickangle": -45, "title": {"text": words[1]}, "type": "category"},
        "margin": {"t": 50, "r": 10},
    }
    if len(maps) > 1:
        layout["updatemenus"] = [_menu([(name, {"z": [matrix]}) for name, matrix in maps.items()])]
    return {"data": [trace], "layout": layout}


def bars_by_step(series: Mapping[str, Matrix], tasks: Sequence[str]) -> Figure:
    """Scores of all tasks, one bar for each series, after the step that a slider chooses; the last one at first.

    Args:
        series: rows are steps, columns tasks, in per cent.
        tasks: in merging order.
    """
    count = len(tasks)

    def heights(step: int) -> list[Numbers]:
        return [matrix[step] for matrix in series.values()]

    traces = [
        {"type": "bar", "name": name, "x": list(tasks), "y": y, "marker": {"color": COLOURS[number % 7]}}
        for number, (name, y) in enumerate(zip(series, heights(count - 1), strict=True))
    ]
    steps = [{"label": str(step + 1), "method": "restyle", "args": [{"y": heights(step)}]} for step in range(count)]
    layout = {
        "barmode": "group",
        "yaxis": {"range": [0, 100], "title": {"text": "score (%)"}},
        "xaxis": {"tickangle": -45, "automargin": True, "type": "category"},
        "sliders": [{"active": count - 1, "steps": steps, "currentvalue": {"prefix": "after step "}, "pad": {"t": 90}}],
        "showlegend": len(series) > 1,
        "margin": {"t": 20, "r": 10},
    }
    return {"data": traces, "layout": layout}


def points(series: Mapping[str, Mapping[str, Any]], x_title: str, y_title: str) -> Figure:
    """One point for each series, with its deviations and words for hovering.

    Args:
        series: ``x``, ``y`` and, if known, ``x_std``, ``y_std`` and ``words`` by name.
        x_title: of the axis.
        y_title: of the axis.
    """
    traces = []
    for number, (name, point) in enumerate(series.items()):
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [point["x"]],
                "y": [point["y"]],
                "error_x": {"type": "data", "array": [point.get("x_std") or 0], "thickness": 1},
                "error_y": {"type": "data", "array": [point.get("y_std") or 0], "thickness": 1},
                "marker": _marker(number, 12),
                "hovertemplate": f"<b>{name}</b><br>{point.get('words', '')}<extra></extra>",
            }
        )
    layout = {"xaxis": {"title": {"text": x_title}}, "yaxis": {"title": {"text": y_title}}, "margin": {"t": 20}}
    return {"data": traces, "layout": layout}


def lines(
    charts: Mapping[str, Mapping[str, Numbers]], x: Sequence[float], x_title: str, *, log_x: bool = False
) -> Figure:
    """Curves, of which one set is shown, to be chosen by name where there are several.

    Args:
        charts: for each set, curves by name; all sets have the same names.
        x: of all points.
        x_title: of the axis.
        log_x: whether its axis is logarithmic to base 2.
    """
    first = next(iter(charts.values()))
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": list(x),
            "y": list(y),
            "marker": _marker(number),
            "line": {"dash": _LINES[number // 7 % 3], "color": COLOURS[number % 7]},
        }
        for number, (name, y) in enumerate(first.items())
    ]
    axis: dict[str, Any] = {"title": {"text": x_title}}
    if log_x:
        axis |= {"type": "log", "tickvals": list(x), "ticktext": [str(value) for value in x]}
    layout: dict[str, Any] = {"xaxis": axis, "yaxis": {"rangemode": "tozero"}, "margin": {"t": 50, "r": 10}}
    if len(charts) > 1:
        layout["updatemenus"] = [
            _menu([(title, {"y": [list(y) for y in curves.values()]}) for title, curves in charts.items()])
        ]
    return {"data": traces, "layout": layout}


def layers_by_kind(layers: Iterable[str]) -> dict[str, list[str]]:
    """Names of attention and of MLP layers."""
    kinds: dict[str, list[str]] = {}
    for layer in layers:
        kinds.setdefault(kind(layer), []).append(layer)
    return kinds


def by_depth(values: Mapping[str, Sequence[Mapping[str, float]]]) -> Figure:
    """One point for each layer over its block; the page adds a choice of the quantity and a slider for the step.

    Args:
        values: for each quantity and step, a number for each layer, the same layers everywhere.
    """
    first = next(iter(values.values()))
    kinds = layers_by_kind(first[-1])
    traces = []
    for number, (name, layers) in enumerate(kinds.items()):
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [depth(layer) + (number - (len(kinds) - 1) / 2) * 0.15 for layer in layers],
                "y": [first[-1][layer] for layer in layers],
                "text": layers,
                "hovertemplate": "%{text}<br>%{y:.4g}<extra></extra>",
                "marker": _marker(number, 8, 0.8),
            }
        )
    deepest = max(map(depth, first[-1]))
    layout = {
        "xaxis": {"title": {"text": "block"}, "dtick": 1 + deepest // 16, "tick0": 0, "zeroline": False},
        "yaxis": {"rangemode": "tozero", "title": {"text": next(iter(values))}},
        "margin": {"t": 20, "r": 10},
    }
    choices = {
        name: [[[step[layer] for layer in layers] for layers in kinds.values()] for step in steps]
        for name, steps in values.items()
    }
    return {"data": traces, "layout": layout, "choices": choices}


def _menu(entries: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    buttons = [{"label": label, "method": "restyle", "args": [change]} for label, change in entries]
    return {"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}


def _marker(number: int, size: int = 7, opacity: float = 1.0) -> dict[str, Any]:
    return {"color": COLOURS[number % 7], "symbol": SYMBOLS[number % 10], "size": size, "opacity": opacity}
