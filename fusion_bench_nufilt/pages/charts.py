"""The kinds of charts. Each is a function of rows, and the same in a picture and on a page.

A row has the number that is drawn and what it belongs to. Rows with a ``panel`` are drawn in a
panel of that name, see :func:`~fusion_bench_nufilt.pages.theme.faceted`. The ``title`` of a row is
what a page says of its point.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
from altair.typing import ChartType

from .metrics import AccuracyMatrix
from .names import KINDS, depth, kind
from .theme import (
    COLOURS,
    GREY,
    Options,
    Rows,
    by_name,
    cells,
    clean,
    faceted,
    style,
    ticks,
    value_scale,
)

#: The size of a chart of curves or points by itself, and beside others.
_ALONE = (360, 300)
_PANEL = (220, 165)


def heat_maps(
    rows: Rows,
    row_names: Sequence[str],
    column_names: Sequence[str],
    titles: tuple[str, str],
    legend: str,
    *,
    domain: tuple[float, float] = (0, 0),
    across: int = 3,
) -> ChartType:
    """Draw matrices as coloured cells with their numbers; a cell without a row stays empty.

    The rows are :func:`~fusion_bench_nufilt.pages.theme.cells`, ``row_names`` (from the top) and
    ``column_names`` the order of the two axes, ``titles`` those of the axes, and ``legend`` that of
    the numbers. The colours cover ``domain`` and all numbers.
    """
    values = [row["value"] for row in rows]
    # The colours end at ticks, so that no number lies beyond the legend.
    marked = ticks(min([domain[0], *values]), max([domain[1], *values]))
    low = marked[0]
    high = marked[-1]
    # Below it white text has a contrast of 4.5, above it black text.
    dark = low + 0.44 * (high - low)
    cell_size = 34
    font_size = 10
    if len(column_names) > 10:
        cell_size = 24
        font_size = 8
        across = 2  # more would be wider than a page
    size = (max(200, cell_size * len(column_names)), cell_size * len(row_names))
    column = alt.X("column:N", **by_name(column_names, titles[1]))
    row = alt.Y("row:N", **by_name(row_names, titles[0]))
    base = alt.Chart().encode(x=column, y=row)
    colour = alt.Color(
        "value:Q",
        scale=alt.Scale(scheme="viridis", domain=[low, high]),
        legend=alt.Legend(title=legend, values=marked, orient="bottom"),
    )
    # Vega rounds halves up, where Python does not: tables have the same digits.
    digits = 2 if high < 2 else 1
    rows = [{**row, "text": f"{row['value']:.{digits}f}"} for row in rows]
    text_colour = alt.condition(f"datum.value < {dark}", alt.value("white"), alt.value("black"))
    numbers = base.mark_text(fontSize=font_size).encode(text="text:N", color=text_colour)
    layers = [base.mark_rect().encode(color=colour), numbers]
    return faceted(lambda _: layers, rows, size, across=across)


def score_maps(matrices: Mapping[str, AccuracyMatrix]) -> ChartType:
    """Draw matrices of one order of tasks in per cent, each in the panel of its name, with a row
    for each step after which any task was scored.
    """
    rows: Rows = []
    for panel, matrix in matrices.items():
        tasks = matrix.tasks
        steps = matrix.steps
        rows += cells((100 * matrix.values).tolist(), steps, tasks, panel)
    scored = {row["row"] for row in rows}
    shown = [step for step in steps if step in scored]
    return heat_maps(rows, shown, tasks, ("after", "task"), "score (%)", domain=(0, 100))


def lines(
    rows: Rows,
    x_title: str,
    y_title: str,
    *,
    y_scale: Options | None = None,
    among: Sequence[str] = (),
    dots: bool = True,
) -> ChartType:
    """Draw a curve for each ``name`` through its ``x`` and ``y``; a row without ``y`` is no point.

    ``x`` are numbers, or words at equal distances. ``low`` and ``high`` are the ends of a bar at a
    point. A row with ``level`` is a dashed line with its ``words``. Without ``y_scale``, each panel
    has the scale of its own numbers. A curve's place ``among`` all names determines how it looks.
    """
    points: Rows = []
    levels = [row for row in rows if "level" in row]
    for row in rows:
        y = clean(row.get("y"))
        if y is not None:
            title = f"{row['name']}, {x_title} {row['x']}: {y:.4g}"
            points.append({**row, "y": y, "title": title})
    shown = list(dict.fromkeys(row["name"] for row in points))
    # Below a panel, which is then no wider than a phone.
    columns = 2 if any(len(name) > 14 for name in shown) else 3
    looks = style(among or shown, shown, orient="bottom", columns=columns)
    places = list(dict.fromkeys(row["x"] for row in points))
    names_with_bars = {row["name"] for row in points if "low" in row}
    if len(names_with_bars) > 1:
        _stand_beside(points, shown)
    x = _x_axis(places, [row["x"] for row in points], x_title)

    def layers_of(rows: Rows) -> list[alt.Chart]:
        ends = []
        for row in rows:
            ends += [row.get("y"), row.get("low"), row.get("high"), row.get("level")]
        upwards = {"title": y_title or None, **(y_scale or value_scale(ends, 18))}
        # All layers have one set of rows, so that each picks out its own.
        curves = alt.Chart().transform_filter("isValid(datum.y)").encode(x=x, color=looks["color"])
        layers = []
        if names_with_bars:
            bar = curves.mark_rule(size=1.5)
            layers.append(bar.encode(y=alt.Y("low:Q", **upwards), y2="high:Q"))
        y = alt.Y("y:Q", **upwards)
        layers.append(curves.mark_line().encode(y=y, strokeDash=looks["strokeDash"]))
        if dots:
            dot = curves.mark_point(size=45, aria=True)
            layers.append(dot.encode(y=y, shape=looks["shape"], description="title:N"))
        if levels:
            level = alt.Chart().transform_filter("isValid(datum.level)").encode(y=alt.Y("level:Q"))
            words = level.mark_text(
                color=GREY, fontSize=10, align="right", baseline="bottom", dx=-3, dy=-2
            )
            layers.append(level.mark_rule(color=GREY, strokeDash=[4, 4]))
            layers.append(words.encode(x=alt.XValue("width"), text="words:N"))
        return layers

    is_alone = len({row.get("panel") for row in rows}) == 1
    return faceted(layers_of, points + levels, _ALONE if is_alone else _PANEL)


def _stand_beside(points: Rows, names: Sequence[str]) -> None:
    """Move the points of each curve a little to the side, so that their bars do not hide each
    other.
    """
    for row in points:
        row["x"] += 0.3 * ((names.index(row["name"]) + 0.5) / len(names) - 0.5)


def _x_axis(places: Sequence[float | str], x: Sequence[Any], title: str) -> alt.X:
    """Return an axis of numbers, or of words at equal distances, which names the places."""
    if places and isinstance(places[0], str):
        # Vega-Lite would sort the words by the alphabet.
        return alt.X("x:O", title=title, sort=None)
    axis = alt.Axis()
    if len(places) <= 20:
        # The labels of twenty steps would touch each other in a narrow panel.
        axis = alt.Axis(values=places, format="d", labelOverlap=True, labelSeparation=4)
    # As the numbers of all rows, which are rounded.
    ends = [clean(min(x, default=0)), clean(max(x, default=1))]
    scale = alt.Scale(domain=ends, zero=False, nice=False, padding=8)
    return alt.X("x:Q", title=title, scale=scale, axis=axis)


def by_depth(rows: Rows) -> ChartType:
    """Draw a point at the block of each row's ``layer``, with a panel for each quantity."""
    placed: Rows = []
    for row in rows:
        name = kind(row["layer"])
        # Kinds of layers stand beside each other.
        offset = 0.35 * ((KINDS.index(name) + 0.5) / len(KINDS) - 0.5)
        title = f"{row['layer']}: {row['y']:.4g}"
        placed.append({**row, "name": name, "x": depth(row["layer"]) + offset, "title": title})
    kinds = {row["name"] for row in placed}
    looks = style(KINDS, [name for name in KINDS if name in kinds], orient="bottom")
    look = {channel: looks[channel] for channel in ("color", "shape")}
    deepest = max(depth(row["layer"]) for row in rows)
    blocks = alt.Axis(values=list(range(0, deepest + 1, 1 + deepest // 16)), grid=False, format="d")
    scale = alt.Scale(domain=[-0.1, deepest + 0.1], nice=False, padding=12)
    x = alt.X("x:Q", title="block", axis=blocks, scale=scale)

    def layers_of(rows: Rows) -> list[alt.Chart]:
        y = alt.Y("y:Q", title=None, **value_scale([row["y"] for row in rows], 10))
        dot = alt.Chart().mark_point(size=30, opacity=0.6, aria=True)
        return [dot.encode(x=x, y=y, **look, description="title:N")]

    return faceted(layers_of, placed, _PANEL)


def dots(rows: Rows) -> ChartType:
    """Draw panels side by side, with a line of text for each ``name``: its ``value``, a rule from
    ``low`` to ``high``, and its ``text``.
    """
    names = list(dict.fromkeys(row["name"] for row in rows))
    width = 200
    # The rules are seen in a picture as well, which has no text around it.
    has_deviations = any(clean(row.get("low")) is not None for row in rows)
    title = "mean ± one standard deviation" if has_deviations else None

    def layers_of(rows: Rows) -> list[alt.Chart]:
        ends: list[float | None] = []
        for row in rows:
            ends += [row.get("value"), row.get("low"), row.get("high")]
        value_axis = {"title": title, **value_scale(ends, 10)}
        base = alt.Chart().encode(y=alt.Y("name:N", **by_name(names, None)))
        means = base.mark_point(color=COLOURS[0], size=70)
        words = base.mark_text(align="left", dx=12, fontSize=11)
        layers = [
            means.encode(x=alt.X("value:Q", **value_axis)),
            words.encode(x=alt.XValue("width"), text="text:N"),
        ]
        if has_deviations:
            several = base.transform_filter("isValid(datum.low)").mark_rule(size=1.5)
            layers.insert(0, several.encode(x=alt.X("low:Q", **value_axis), x2="high:Q"))
        return layers

    size = (width, 22 * len(names))
    return faceted(layers_of, rows, size, across=3, spacing=110)
