"""Charts that several pages share: one definition is interactive on a page and static in a PNG or a
PDF.

Where there are several sets of numbers, ``panels`` is 0 for one chart with a menu to choose a set,
as on a page, or the number of panels in a row, as in a picture. A slider chooses the step on a
page; a picture shows the last one.
"""

from collections.abc import Mapping, Sequence
from itertools import repeat
from math import nan
from typing import Any

import altair as alt
from altair.typing import ChartType

from .names import depth, kind
from .theme import (
    GREY,
    Grid,
    Options,
    Rows,
    arranged,
    by_block,
    by_name,
    cells,
    clean,
    data,
    layered,
    style,
    tooltip,
    with_slider,
)

Curves = Mapping[str, Mapping[str, Sequence[float | None]]]  # by set and name


def heat_maps(
    maps: Mapping[str, Grid],
    rows: Sequence[str],
    columns: Sequence[str],
    titles: tuple[str, str],
    *,
    domain: tuple[float, float] | None = None,
    legend: str = "",
    panels: int = 0,
) -> ChartType:
    """Draw named matrices as coloured cells with their numbers; a cell without a number stays
    empty.

    ``rows`` (from the top) and ``columns`` are labels, ``titles`` those of the two axes, and
    ``legend`` that of the numbers. The colours end at the values of ``domain``, by default 0 or the
    smallest, if negative, and the largest.
    """
    numbers = cells(maps, rows, columns, ("set", "row", "column"))
    values = [cell["value"] for cell in numbers]
    low, high = domain or (min([0.0, *values]), max(values, default=1.0))
    dark = low + 0.44 * (
        high - low
    )  # below it white text has a contrast of 4.5, above it black text
    cell_size, font_size = (34, 10) if len(columns) <= 10 else (24, 8)
    names = list(maps)

    def draw(part: Rows, title: str | None) -> alt.LayerChart:
        place = names.index(title) if title is not None else 0
        left, bottom = (
            title is None or place % panels == 0,
            title is None or place + panels >= len(names),
        )
        base = alt.Chart().encode(
            x=alt.X("column:N", **by_name(columns, titles[1], shown=bottom)),
            y=alt.Y("row:N", **by_name(rows, titles[0], shown=left)),
            tooltip=tooltip(row=titles[0], column=titles[1], value=legend or "value"),
        )
        scale = alt.Scale(scheme="viridis", domain=[low, high])
        squares = base.mark_rect().encode(
            color=alt.Color("value:Q", scale=scale, title=legend or None)
        )
        texts = base.mark_text(fontSize=font_size).encode(
            text=alt.Text("value:Q", format=".2f" if high < 2 else ".1f"),
            color=alt.condition(f"datum.value < {dark}", alt.value("white"), alt.value("black")),
        )
        return layered(
            [squares, texts], part, (cell_size * len(columns), cell_size * len(rows)), title
        )

    return arranged(numbers, names, draw, panels)


def score_maps(
    maps: Mapping[str, Grid], steps: Sequence[str], tasks: Sequence[str], panels: int = 0
) -> ChartType:
    """Draw matrices of scores in per cent, with a row for each step and a column for each task."""
    look: Any = {"domain": (0, 100), "legend": "score (%)", "panels": panels}
    return heat_maps(maps, steps, tasks, ("after", "task"), **look)


def lines(
    sets: Curves,
    x: Sequence[float | str],
    x_title: str,
    y_title: str = "",
    *,
    deviations: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
    heights: Mapping[str, float] | None = None,
    marks: Mapping[str, tuple[float | str, str]] | None = None,
    x_scale: alt.Scale | None = None,
    y_scale: alt.Scale | None = None,
    among: Sequence[str] = (),
    ranked: bool = False,
    dots: bool = True,
    size: tuple[int, int] = (560, 320),
    panels: int = 0,
    **legend: Any,
) -> ChartType:
    """Draw curves, each with one number per entry of ``x``, or fewer, and None where it has no
    point.

    ``x`` are numbers, or words at equal distances. ``deviations`` are half the heights of bands
    around the curves. ``heights`` are dashed horizontal lines by their labels; ``marks`` has the
    place and the label of a vertical one for each set. A curve's place ``among`` all names
    determines how it looks. A ``ranked`` legend is in the order of the curves' last numbers.
    """
    bands = deviations or {}
    rows: Rows = [
        {"set": group, "x": place, "name": name, "y": y, "low": y - half, "high": y + half}
        for group, curves in sets.items()
        for name, numbers in curves.items()
        for place, number, half in zip(
            x, numbers, bands.get(group, {}).get(name, repeat(nan)), strict=False
        )
        if (y := clean(number)) is not None
    ]
    last = {row["name"]: row["y"] for row in rows}
    looks = style(
        among or list(last),
        sorted(last, key=lambda name: -last[name]) if ranked else list(last),
        **legend,
    )
    rows += [
        {"set": name, "mark": place, "words": words}
        for name, (place, words) in (marks or {}).items()
    ]
    rows += [
        {"set": name, "level": level, "words": words}
        for name in sets
        for words, level in (heights or {}).items()
    ]
    letter, axis = _x_axis(x, x_title, x_scale)
    upwards: Options = {
        "title": y_title or None,
        "scale": y_scale or alt.Scale(zero=False, nice=False, padding=18),
    }

    def draw(part: Rows, title: str | None) -> alt.LayerChart:
        base = alt.Chart().encode(x=alt.X(f"x:{letter}", **axis), color=looks["color"])
        points = base.transform_filter("isValid(datum.y)")
        layers = []
        if heights:
            look = {"align": "right", "baseline": "bottom", "dx": -3, "dy": -2}
            layers += _dashed_line("level", alt.Y("level:Q"), alt.XValue("width"), **look)
        if marks:
            look = {"align": "left", "baseline": "top", "dx": 4, "dy": 2}
            layers += _dashed_line("mark", alt.X(f"mark:{letter}", **axis), alt.YValue(0), **look)
        if deviations:
            layers.append(
                points.mark_area(opacity=0.12).encode(y=alt.Y("low:Q", **upwards), y2="high:Q")
            )
        layers.append(
            points.mark_line().encode(y=alt.Y("y:Q", **upwards), strokeDash=looks["strokeDash"])
        )
        if dots:
            dot = points.mark_point(size=45).encode(y=alt.Y("y:Q", **upwards), shape=looks["shape"])
            layers.append(dot.encode(tooltip=tooltip(name="", x=x_title, y=y_title or "value")))
        return layered(layers, part, size, title)

    return arranged(rows, list(sets), draw, panels)


def _x_axis(x: Sequence[float | str], title: str, scale: alt.Scale | None) -> tuple[str, Options]:
    """Return the type and the options of an axis of numbers, or of words at equal distances."""
    if isinstance(x[0], str):
        return "O", {"title": title, "scale": alt.Scale(domain=list(x)), "sort": None}
    whole = [place for place in x if isinstance(place, int)]
    axis = alt.Axis(values=whole, format="d") if len(whole) == len(x) <= 20 else alt.Axis()
    return "Q", {
        "title": title,
        "scale": scale or alt.Scale(zero=False, nice=False, padding=8),
        "axis": axis,
    }


def _dashed_line(field: str, line: Any, words: Any, **look: Any) -> list[alt.Chart]:
    """Return a line with words for each row that has the field."""
    base = alt.Chart().transform_filter(f"isValid(datum.{field})").encode(line)
    text = base.mark_text(color=GREY, fontSize=10, **look).encode(words, text="words:N")
    return [base.mark_rule(color=GREY, strokeDash=[4, 4]), text]


def bars_by_step(series: Mapping[str, Grid], tasks: Sequence[str]) -> ChartType:
    """Draw the scores after the step that a slider chooses, with a bar for each series of scores by
    step and task.
    """
    rows = cells(series, range(1, len(tasks) + 1), tasks, ("name", "step", "task"))
    chart = alt.Chart(data(rows), width=560, height=300).mark_bar()
    chart = chart.encode(
        x=alt.X("task:N", **by_name(tasks, None)),
        xOffset=alt.XOffset("name:N", scale=alt.Scale(domain=list(series))),
        y=alt.Y("value:Q", title="score (%)", scale=alt.Scale(domain=[0, 100])),
        color=style(list(series), list(series))["color"],
        tooltip=tooltip(name="", task="task", value="score (%)"),
    )
    return with_slider(chart, len(tasks))


def by_depth(values: Mapping[str, Sequence[Mapping[str, float]]], first_step: int = 1) -> ChartType:
    """Draw a point for each layer at its block; a menu chooses the quantity, and a slider the step.

    ``values`` has, for each quantity and step, a number for each layer.
    """
    quantities, steps = list(values), next(iter(values.values()))
    names = [layer for layers in steps for layer in layers]
    kinds = list(dict.fromkeys(map(kind, names)))
    rows: Rows = [
        {"step": step, "layer": layer, "kind": kind(layer), "x": beside(layer, kinds)}
        | {quantity: values[quantity][step - first_step][layer] for quantity in quantities}
        for step, layers in enumerate(steps, first_step)
        for layer in layers
    ]
    looks = style(kinds, kinds, "kind")
    menu = (
        alt.binding_select(options=quantities, name="show ")
        if len(quantities) > 1
        else alt.Undefined
    )
    chart = alt.Chart(data(rows), width=560, height=300).mark_point(size=55, opacity=0.7)
    chart = chart.encode(
        x=by_block(max(map(depth, names))),
        y=alt.Y("y:Q", title=quantities[0] if len(quantities) == 1 else None),
        color=looks["color"],
        shape=looks["shape"],
        tooltip=tooltip(layer="", y="value"),
    ).add_params(alt.param("quantity", value=quantities[0], bind=menu))
    return with_slider(chart.transform_calculate(y="datum[quantity]"), len(steps), first_step)


def beside(layer: str, kinds: Sequence[str]) -> float:
    """Return the place of a layer on the axis of blocks, where the kinds of layers stand beside
    each other.
    """
    return depth(layer) + 0.35 * ((kinds.index(kind(layer)) + 0.5) / len(kinds) - 0.5)
