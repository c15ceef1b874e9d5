"""Every chart, defined once: the same definition is interactive on a page and still in a PNG or a PDF.

Functions take plain numbers. Where there are several sets of them, ``panels`` is 0 for one chart with a menu to choose
a set, as on a page, or the number of panels in a row, as in a picture. A slider chooses a step on a page; it stands at
the last one in a picture. ``among`` has all names whose place decides on colours and shapes, where a chart has some.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import altair as alt
from altair.typing import ChartType

from .names import depth, kind
from .theme import (
    COLOURS,
    GREY,
    Matrix,
    Numbers,
    Options,
    Rows,
    arranged,
    by_name,
    cells,
    clean,
    curve_points,
    horizontal,
    layered,
    padded,
    style,
    tooltip,
    vertical,
    with_slider,
    x_axis,
)


def heat_maps(
    maps: Mapping[str, Matrix],
    rows: Sequence[str],
    columns: Sequence[str],
    words: tuple[str, str],
    *,
    domain: tuple[float, float] | None = None,
    legend: str = "",
    panels: int = 0,
) -> ChartType:
    """Draw matrices as colours with their numbers on them; a cell without a number stays empty.

    Args:
        maps: matrices by name, all of one shape. A line break in a name begins a new line of a panel's title.
        rows: the labels of the rows, from the top; ``columns`` those of the columns.
        words: what rows and columns are; ``legend`` is what the numbers are.
        domain: the values at the two ends of the colours; by default from 0, or below, to the largest value.
    """
    numbers = cells(maps, rows, columns, ("set", "row", "column"))
    values = [cell["value"] for cell in numbers]
    low, high = domain or (min([0.0, *values]), max(values, default=1.0))
    dark = low + 0.47 * (high - low)  # white is read better on the colours below, black on those above
    cell_size, font_size = (34, 10) if len(columns) <= 10 else (24, 8)
    names = list(maps)

    def draw(part: Rows, title: str | None) -> alt.LayerChart:
        place = names.index(title) if title is not None else 0
        left, bottom = title is None or place % panels == 0, title is None or place + panels >= len(names)
        base = alt.Chart().encode(
            x=alt.X("column:N", **by_name(columns, words[1], shown=bottom)),
            y=alt.Y("row:N", **by_name(rows, words[0], shown=left)),
            tooltip=tooltip(row=words[0], column=words[1], value=legend or "value"),
        )
        scale = alt.Scale(scheme="viridis", domain=[low, high])
        squares = base.mark_rect().encode(color=alt.Color("value:Q", scale=scale, title=legend or None))
        texts = base.mark_text(fontSize=font_size).encode(
            text=alt.Text("value:Q", format=".2f" if high < 2 else ".0f"),
            color=alt.condition(f"datum.value < {dark}", alt.value("white"), alt.value("black")),
        )
        return layered([squares, texts], part, (cell_size * len(columns), cell_size * len(rows)), title)

    return arranged(numbers, names, draw, panels)


def lines(
    sets: Mapping[str, Mapping[str, Numbers]],
    x: Sequence[float | str],
    x_title: str,
    y_title: str = "",
    *,
    deviations: Mapping[str, Mapping[str, Numbers]] | None = None,
    heights: Mapping[str, float] | None = None,
    marks: Mapping[str, tuple[float | str, str]] | None = None,
    x_scale: alt.Scale | None = None,
    y_scale: alt.Scale | None = None,
    among: Sequence[str] = (),
    ranked: bool = False,
    dots: bool = True,
    size: tuple[int, int] = (560, 320),
    panels: int = 0,
) -> ChartType:
    """Draw curves.

    Args:
        sets: for each set, curves by name; a curve has one number for each of ``x``, or fewer, or None where it has no
            point.
        x: the same for all curves: numbers, or words, which stand at equal distances.
        deviations: half the height of the band around a curve, by set and name.
        heights: dashed horizontal lines, by the words that stand on them.
        marks: for each set, where a dashed vertical line stands, and the words on it.
        x_scale: by default from the first to the last number.
        y_scale: by default from near the smallest number to near the largest.
        ranked: whether the legend is in the order of the last numbers, from the top, instead of that of the names.
        dots: whether there is a point at each number.
        size: width and height of a panel.
    """
    rows = curve_points(sets, x, deviations or {})
    last = {row["name"]: row["y"] for row in rows}
    names = sorted(last, key=lambda name: -last[name]) if ranked else list(last)
    looks = style(among or list(last), names)
    rows += [{"set": name, "mark": place, "words": words} for name, (place, words) in (marks or {}).items()]
    letter, axis = x_axis(x, x_title, x_scale)
    upwards: Options = {"title": y_title or None, "scale": y_scale or alt.Scale(zero=False, nice=False, padding=18)}

    def draw(part: Rows, title: str | None) -> alt.LayerChart:
        base = alt.Chart().encode(x=alt.X(f"x:{letter}", **axis), color=looks["color"])
        known = base.transform_filter("isValid(datum.y)")
        layers: list[alt.Chart] = horizontal(heights or {})
        if marks:
            layers += vertical(alt.X(f"mark:{letter}", **axis))
        if deviations:
            layers.append(known.mark_area(opacity=0.12).encode(y=alt.Y("low:Q", **upwards), y2="high:Q"))
        layers.append(known.mark_line().encode(y=alt.Y("y:Q", **upwards), strokeDash=looks["strokeDash"]))
        if dots:
            dot = known.mark_point(size=45).encode(y=alt.Y("y:Q", **upwards), shape=looks["shape"])
            layers.append(dot.encode(tooltip=tooltip(name="", x=x_title, y=y_title or "value")))
        return layered(layers, part, size, title)

    return arranged(rows, list(sets), draw, panels)


def ecdf(
    sets: Mapping[str, Mapping[str, Sequence[float]]],
    x_title: str,
    y_title: str,
    *,
    marks: Mapping[str, tuple[float | str, str]] | None = None,
    panels: int = 0,
) -> ChartType:
    """Draw the empirical distributions of numbers from 0 to 1, by set and name; for ``marks`` see :func:`lines`."""
    grid = [place / 200 for place in range(201)]
    curves = {
        name: {label: [sum(v <= x for v in values) / len(values) for x in grid] for label, values in groups.items()}
        for name, groups in sets.items()
    }
    scale = alt.Scale(domain=[0, 1])
    look: Options = {"x_scale": scale, "y_scale": scale, "dots": False, "size": (300, 220)}
    return lines(curves, grid, x_title, y_title, marks=marks, panels=panels, **look)


def points(
    series: Mapping[str, Mapping[str, Any]],
    x_title: str,
    y_title: str,
    *,
    among: Sequence[str] = (),
    background: Callable[[list[float], list[float]], Rows] | None = None,
) -> ChartType:
    """Draw one point for each series, with a bar for its deviation in each direction.

    Args:
        series: by name ``x``, ``y`` and, if known, ``x_std``, ``y_std`` and ``words`` (a mapping) for hovering.
        background: given the ends of both axes, returns grey lines as rows with ``x``, ``y``, ``x2``, ``y2``, and the
            ``words`` at the first end.
    """
    rows: Rows = []
    for name, point in series.items():
        row: Options = {"name": name, **point.get("words", {})}
        for side in ("x", "y"):
            extent = clean(point.get(f"{side}_std")) or 0.0
            row |= {side: clean(point[side]), f"{side}_low": point[side] - extent, f"{side}_high": point[side] + extent}
        rows.append(row)
    ends = [padded([row[f"{side}_{end}"] for row in rows for end in ("low", "high")]) for side in ("x", "y")]
    axis = alt.Axis(grid=background is None)
    x: Options = {"title": x_title, "scale": alt.Scale(domain=ends[0], nice=False), "axis": axis}
    y: Options = {"title": y_title, "scale": alt.Scale(domain=ends[1], nice=False), "axis": axis}
    looks = style(among or list(series), list(series))
    words = {key: key for point in series.values() for key in point.get("words", {})}
    base = alt.Chart().encode(color=looks["color"], tooltip=tooltip(name="", **words))
    here: Options = {"x": alt.X("x:Q", **x), "y": alt.Y("y:Q", **y)}
    layers = [
        base.mark_rule().encode(x=alt.X("x_low:Q", **x), x2="x_high:Q", y=here["y"]),
        base.mark_rule().encode(y=alt.Y("y_low:Q", **y), y2="y_high:Q", x=here["x"]),
        base.mark_point(size=110).encode(**here, shape=looks["shape"]),
    ]
    if background:
        grey = alt.Chart(alt.Data(values=background(*ends))).encode(**here)
        text = grey.mark_text(color=GREY, fontSize=9, align="right", baseline="top", dx=-3, dy=3)
        layers = [grey.mark_rule(color="#d4d8de").encode(x2="x2:Q", y2="y2:Q"), text.encode(text="words:N"), *layers]
    return layered(layers, rows, (520, 380))


def bars_by_step(series: Mapping[str, Matrix], tasks: Sequence[str]) -> ChartType:
    """Draw the scores of all tasks, one bar for each series, after the step that a slider chooses.

    The matrices have a row for each step and a column for each of ``tasks``, in merging order, in per cent.
    """
    rows = cells(series, range(1, len(tasks) + 1), tasks, ("name", "step", "task"))
    chart = (
        alt.Chart(alt.Data(values=rows), width=560, height=300)
        .mark_bar()
        .encode(
            x=alt.X("task:N", **by_name(tasks, None)),
            xOffset=alt.XOffset("name:N", scale=alt.Scale(domain=list(series))),
            y=alt.Y("value:Q", title="score (%)", scale=alt.Scale(domain=[0, 100])),
            color=style(list(series), list(series))["color"],
            tooltip=tooltip(name="", task="task", value="score (%)"),
        )
    )
    return with_slider(chart, len(tasks))


def bars(rows: Sequence[Mapping[str, Any]], title: str, *, labels: bool = True) -> ChartType:
    """Draw a horizontal bar for each row, from the top, with its deviation and, on its right, a text.

    Args:
        rows: ``name``, ``value``, ``text`` and, if known, ``deviation`` and ``printed``, another number for the same,
            which becomes a diamond.
        title: what the bars measure.
        labels: whether the names stand on the left.
    """
    cleaned: Rows = []
    for row in rows:
        value, deviation = clean(row["value"]), clean(row.get("deviation"))
        cleaned.append({"name": row["name"], "text": row["text"], "value": value, "paper": clean(row.get("printed"))})
        if value is not None and deviation is not None:
            cleaned[-1] |= {"low": value - deviation, "high": value + deviation}
    axis = alt.Y("name:N", **by_name([row["name"] for row in cleaned], None, shown=labels))
    base = alt.Chart().encode(y=axis, tooltip=tooltip(name="", text=title))
    layers = [
        base.mark_bar(color=COLOURS[0], height=alt.RelativeBandSize(0.6)).encode(x=alt.X("value:Q", title=title)),
        base.transform_filter("isValid(datum.low)").mark_rule(size=1.5).encode(x=alt.X("low:Q"), x2="high:Q"),
        base.mark_text(align="left", fontSize=11).encode(x=alt.value(272), text="text:N"),
    ]
    if any(row["paper"] is not None for row in cleaned):
        printed = base.transform_filter("isValid(datum.paper)").transform_calculate(what="'paper'")
        colour = alt.Color("what:N", scale=alt.Scale(domain=["paper"], range=[COLOURS[1]]), title=None)
        layers.append(printed.mark_point(shape="diamond", size=90).encode(x=alt.X("paper:Q"), color=colour))
    return layered(layers, cleaned, (260, 34 * len(cleaned)))


def by_depth(values: Mapping[str, Sequence[Mapping[str, float]]]) -> ChartType:
    """Draw one point for each layer over its block; a menu chooses the quantity, and a slider the step.

    ``values`` has, for each quantity and step, a number for each layer, the same layers everywhere.
    """
    quantities, steps = list(values), next(iter(values.values()))
    kinds = list(dict.fromkeys(map(kind, steps[-1])))
    rows: Rows = []
    for number, layers in enumerate(steps):
        for layer in layers:
            aside = 0.35 * ((kinds.index(kind(layer)) + 0.5) / len(kinds) - 0.5)  # the kinds stand beside each other
            row: Options = {"step": number + 1, "layer": layer, "kind": kind(layer), "x": depth(layer) + aside}
            rows.append(row | {quantity: clean(values[quantity][number][layer]) for quantity in quantities})
    looks, deepest = style(kinds, kinds, "kind"), max(map(depth, steps[-1]))
    axis = alt.Axis(values=list(range(0, deepest + 1, 1 + deepest // 16)), grid=False)
    chart = (
        alt.Chart(alt.Data(values=rows), width=560, height=300)
        .mark_point(size=55, opacity=0.7)
        .encode(
            x=alt.X("x:Q", title="block", axis=axis, scale=alt.Scale(zero=False, nice=False, padding=12)),
            y=alt.Y("y:Q", title=quantities[0] if len(quantities) == 1 else None),
            color=looks["color"],
            shape=looks["shape"],
            tooltip=tooltip(layer="", y="value"),
        )
    )
    menu = alt.binding_select(options=quantities, name="show ") if len(quantities) > 1 else alt.Undefined
    chart = chart.add_params(alt.param("quantity", value=quantities[0], bind=menu))
    return with_slider(chart.transform_calculate(y="datum[quantity]"), len(steps))
