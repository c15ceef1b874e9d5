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
    by_block,
    by_name,
    cells,
    clean,
    faceted,
    style,
    ticks,
    value_scale,
)

_MOST_BANDS = 3  # more would hide each other


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
    text = alt.Text("value:Q", format=".2f" if high < 2 else ".1f")
    text_colour = alt.condition(f"datum.value < {dark}", alt.value("white"), alt.value("black"))
    numbers = base.mark_text(fontSize=font_size).encode(text=text, color=text_colour)
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
    x_scale: alt.Scale | None = None,
    y_scale: alt.Scale | None = None,
    among: Sequence[str] = (),
    ranked: bool = False,
    dots: bool = True,
    size: tuple[int, int] = (360, 300),
    across: int = 4,
    own_scales: Sequence[str] = (),
) -> ChartType:
    """Draw a curve for each ``name`` through its ``x`` and ``y``; a row without ``y`` is no point.

    ``x`` are numbers, or words at equal distances. ``low`` and ``high`` are the ends of a band
    around a curve, or of a bar at each point where there are more than three. A row with ``level``
    is a dashed horizontal line, one with ``mark`` a vertical one at its ``x``; ``words`` are its
    label. A curve's place ``among`` all names determines how it looks. A ``ranked`` legend is in
    the order of the curves' last numbers.
    """
    finite_rows: Rows = []
    for row in rows:
        if "level" in row or "mark" in row:
            finite_rows.append(row)
        elif clean(row["y"]) is not None:
            title = f"{row['name']}, {x_title} {row['x']}: {row['y']:.4g}"
            finite_rows.append({**row, "y": clean(row["y"]), "title": title})
    curve_points = [row for row in finite_rows if "y" in row]
    last = {row["name"]: row["y"] for row in curve_points}
    shown = list(last)
    if ranked:
        shown.sort(key=lambda name: -last[name])
    # Below a panel, which is then no wider than a phone.
    columns = 2 if any(len(name) > 14 for name in shown) else 3
    looks = style(among or list(last), shown, orient="bottom", columns=columns)
    letter, axis = _x_axis(list(dict.fromkeys(row["x"] for row in curve_points)), x_title, x_scale)
    with_ends = [row for row in curve_points if "low" in row]
    has_bars = len({row["name"] for row in with_ends}) > _MOST_BANDS
    if has_bars:
        _stand_beside(curve_points, shown)

    def layers_of(rows: Rows) -> list[alt.Chart]:
        ends: list[float | None] = []
        for row in rows:
            ends += [row.get("y"), row.get("low"), row.get("high"), row.get("level")]
        upwards = {"title": _axis_title(y_title, y_scale) or None, **value_scale(ends, 18)}
        if y_scale is not None:
            upwards = {"title": upwards["title"], "scale": y_scale}
        layers = []
        base = alt.Chart().encode(x=alt.X(f"x:{letter}", **axis))
        # A facet has one set of rows for all its layers, so that each picks out its own.
        curves = base.transform_filter("isValid(datum.y)").encode(color=looks["color"])
        if with_ends:
            deviation = curves.mark_rule(size=1.5) if has_bars else curves.mark_area(opacity=0.12)
            layers.append(deviation.encode(y=alt.Y("low:Q", **upwards), y2="high:Q"))
        curve = curves.mark_line()
        layers.append(curve.encode(y=alt.Y("y:Q", **upwards), strokeDash=looks["strokeDash"]))
        if dots:
            dot = curves.mark_point(size=45, aria=True)
            dot = dot.encode(y=alt.Y("y:Q", **upwards), shape=looks["shape"])
            layers.append(dot.encode(description="title:N"))
        if any("level" in row for row in finite_rows):
            level = alt.Chart().transform_filter("isValid(datum.level)").encode(y=alt.Y("level:Q"))
            look: Options = {"align": "right", "baseline": "bottom", "dx": -3, "dy": -2}
            layers += _dashed_line(level, look, x=alt.XValue("width"))
        if any("mark" in row for row in finite_rows):
            mark = base.transform_filter("datum.mark")
            look = {"align": "left", "baseline": "top", "dx": 4, "dy": 2}
            layers += _dashed_line(mark, look, y=alt.YValue(0))
        return layers

    return faceted(layers_of, finite_rows, size, across=across, own_scales=own_scales)


def _stand_beside(points: Rows, names: Sequence[str]) -> None:
    """Move the points of each curve a little to the side, so that their bars do not hide each
    other.
    """
    for row in points:
        row["x"] += 0.3 * ((names.index(row["name"]) + 0.5) / len(names) - 0.5)


def _axis_title(title: str, scale: alt.Scale | None) -> str:
    """Return the title of an axis, which says where it is logarithmic."""
    if scale is None or scale.to_dict().get("type") != "log":
        return title
    return f"{title}, log scale"


def _x_axis(x: Sequence[float | str], title: str, scale: alt.Scale | None) -> tuple[str, Options]:
    """Return the type and the options of an axis of numbers, or of words at equal distances."""
    if x and isinstance(x[0], str):
        # Vega-Lite would sort the words by the alphabet.
        return "O", {"title": title, "sort": None}
    whole_numbers = [value for value in x if isinstance(value, int)]
    axis = alt.Axis()
    if len(whole_numbers) == len(x) <= 20:
        # The labels of twenty steps would touch each other in a narrow panel.
        axis = alt.Axis(values=whole_numbers, format="d", labelOverlap=True, labelSeparation=4)
    default = alt.Scale(zero=False, nice=False, padding=8)
    title = _axis_title(title, scale)
    return "Q", {"title": title, "scale": scale or default, "axis": axis}


def _dashed_line(line: alt.Chart, look: Options, **position: Any) -> list[alt.Chart]:
    """Return a line, and its words at a place along it."""
    words = line.mark_text(color=GREY, fontSize=10, **look).encode(**position, text="words:N")
    return [line.mark_rule(color=GREY, strokeDash=[4, 4]), words]


def points(
    rows: Rows,
    x: Options,
    y: Options | None = None,
    *,
    among: Sequence[str],
    size: tuple[int, int],
    across: int,
    own_scales: Sequence[str] = (),
) -> ChartType:
    """Draw a point at each row's ``x`` and ``y``, of the look that its ``name`` has ``among`` all;
    without options of their own, the axis of ``y`` fits its numbers.
    """
    shown = {row["name"] for row in rows}
    looks = style(among, [name for name in among if name in shown], orient="bottom")

    def layers_of(rows: Rows) -> list[alt.Chart]:
        upwards = y
        if upwards is None:
            upwards = {"title": None, **value_scale([row["y"] for row in rows], 10)}
        chart = alt.Chart().mark_point(size=30, opacity=0.6, aria=True)
        place = {"x": alt.X("x:Q", **x), "y": alt.Y("y:Q", **upwards)}
        look = {"color": looks["color"], "shape": looks["shape"]}
        return [chart.encode(**place, **look, description="title:N")]

    return faceted(layers_of, rows, size, across=across, own_scales=own_scales)


def by_depth(rows: Rows) -> ChartType:
    """Draw a point at the block of each row's ``layer``, with a panel for each quantity."""
    placed: Rows = []
    for row in rows:
        name = kind(row["layer"])
        # Kinds of layers stand beside each other.
        offset = 0.35 * ((KINDS.index(name) + 0.5) / len(KINDS) - 0.5)
        title = f"{row['layer']}: {row['y']:.4g}"
        placed.append({**row, "name": name, "x": depth(row["layer"]) + offset, "title": title})
    blocks = by_block(max(depth(row["layer"]) for row in rows))
    return points(placed, blocks, among=KINDS, size=(260, 180), across=3, own_scales=["y"])


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
    return faceted(layers_of, rows, size, across=3, own_scales=["x"], spacing=110)
