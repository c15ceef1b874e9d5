"""What all charts share: colours and shapes, axes and panels."""

import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from itertools import cycle, islice
from typing import Any

import altair as alt
from altair.typing import ChartType
from altair.utils.schemapi import debug_mode

Rows = list[dict[str, Any]]
Options = dict[str, Any]
Grid = Sequence[Sequence[float | None]]

#: The colours of Okabe and Ito, which readers with any colour vision can tell apart.
#: The style sheet of pages has lighter ones for the dark: of the first, of black and of the ink.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
SHAPES = [
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "cross",
    "triangle-down",
    "triangle-right",
    "triangle-left",
]
DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3]]
GREY = "#7d838c"
#: What all charts look like, as Vega-Lite has it.
CONFIG = json.loads(files(__package__).joinpath("theme.json").read_text())

#: The share of numbers below which their range is no difference.
_FLAT = 0.01
#: The letters at the beginning of a shortened name.
_HEAD = 18

#: Control characters, which crash the renderer and with it the process.
_UNDRAWN = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ufffe\uffff]")
#: The titles of axes are in descriptions, too, in which an escape stands for its character.
_UNDRAWN_IN_TITLES = re.compile(rf"{_UNDRAWN.pattern}|\\")


def chart_definition(chart: ChartType) -> dict[str, Any]:
    """Return a chart as Vega-Lite JSON, with the common theme and without the schema's address."""
    content = chart.to_dict(validate=False) | {"config": CONFIG}
    del content["$schema"]
    definition: dict[str, Any] = _drawable(content)
    return definition


def _drawable(content: Any, undrawn: re.Pattern[str] = _UNDRAWN) -> Any:
    """Return parts of a chart with a replacement character for each that can't be drawn."""
    if isinstance(content, str):
        return undrawn.sub("\ufffd", content)
    if isinstance(content, list | tuple):
        return [_drawable(item, undrawn) for item in content]
    if not isinstance(content, dict):
        return content
    drawable = {}
    for key, item in content.items():
        drawable[key] = _drawable(item, _UNDRAWN_IN_TITLES if key == "title" else undrawn)
    return drawable


def clean(value: float | None) -> float | None:
    """Return a number rounded to six digits, or None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def data(rows: Rows) -> alt.Data:
    """Return rows as a chart's data, with numbers rounded and missing ones left out."""
    values = []
    for row in rows:
        kept = {}
        for key, value in row.items():
            if isinstance(value, float):
                value = clean(value)
            if value is not None:
                kept[key] = value
        values.append(kept)
    # Altair would check every row against the schema of Vega-Lite, and copies the rows of a list
    # with every chart that they become a part of.
    with debug_mode(False):
        return alt.Data(values=tuple(values))


def cells(
    matrix: Grid, rows: Sequence[Any], columns: Sequence[str], panel: str | None = None
) -> Rows:
    """Return a row for each number of a matrix, with its place and its panel."""
    cells: Rows = []
    for row, values in zip(rows, matrix, strict=True):
        for column, value in zip(columns, values, strict=True):
            number = clean(value)
            if number is not None:
                cells.append({"panel": panel, "row": row, "column": column, "value": number})
    return cells


def ticks(low: float, high: float) -> list[float]:
    """Return at most ten round numbers at equal distances, from ``low`` or a little below to
    ``high`` or a little above.
    """
    if high <= low:
        high = low + 1
    power = 10.0 ** math.floor(math.log10(high - low))
    for factor in (0.2, 0.5, 1, 2):
        step = factor * power
        if (high - low) / step <= 8:
            break
    # Without the margins, a rounding error would add a tick.
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [float(f"{number * step:.6g}") for number in range(first, last + 1)]


def style(among: Sequence[str], shown: Sequence[str], **legend: Any) -> Options:
    """Return encodings that share a legend of the names ``shown``; a name's place ``among`` all is
    how it looks.
    """
    # Without symbolLimit, Vega leaves out all entries beyond the thirtieth.
    look: Options = {"title": None, "symbolLimit": 0, "symbolOpacity": 1, **legend}
    names = alt.Legend(values=list(shown), labelExpr=label_of(shown), **look)

    def encoding(channel: Callable[..., Any], looks: Iterable[Any]) -> Any:
        of_names = list(islice(cycle(looks), len(among)))
        # All names: a method looks the same in a chart that shows fewer.
        scale = alt.Scale(domain=list(among), range=of_names)
        return channel("name:N", scale=scale, legend=names if len(shown) > 1 else None)

    # Where the colours begin again, the dashes change.
    dashes = [DASHES[number // len(COLOURS)] for number in range(len(DASHES) * len(COLOURS))]
    return {
        "color": encoding(alt.Color, COLOURS),
        "shape": encoding(alt.Shape, SHAPES),
        "strokeDash": encoding(alt.StrokeDash, dashes),
    }


def by_name(labels: Sequence[str], title: str | None) -> Options:
    """Return the options of an axis of names in the given order."""
    axis = alt.Axis(labelExpr=label_of(labels))
    return {"scale": alt.Scale(domain=list(labels)), "sort": None, "title": title, "axis": axis}


def value_scale(values: Iterable[float | None], padding: int) -> Options:
    """Return the scale and axis of numbers; where they are the same to a per cent, they are drawn
    as flat and the axis has their value, as small differences would look like large ones.
    """
    numbers = [value for value in map(clean, values) if value is not None]
    low = min(numbers, default=0.0)
    high = max(numbers, default=0.0)
    if high - low >= _FLAT * max(abs(low), abs(high)) > 0:
        scale = alt.Scale(domain=[low, high], zero=False, nice=False, padding=padding)
        return {"scale": scale}
    middle = (low + high) / 2
    margin = abs(middle) * 10 * _FLAT or 1
    scale = alt.Scale(domain=[clean(middle - margin), clean(middle + margin)], nice=False)
    return {"scale": scale, "axis": alt.Axis(values=[float(f"{middle:.4g}")])}


def faceted(
    layers_of: Callable[[Rows], Sequence[alt.Chart]],
    rows: Rows,
    size: tuple[int, int],
    *,
    across: int = 4,
    spacing: int = 24,
) -> ChartType:
    """Lay the charts that ``layers_of`` makes of rows over each other, in a panel for each value of
    the rows' ``panel``, if there is any.

    The panels are in the order of their rows, at most ``across`` of them side by side.
    ``spacing`` are the pixels between neighbours in a row.
    """
    charts = []
    for panel in dict.fromkeys(row.get("panel") for row in rows):
        rows_of_panel = [row for row in rows if row.get("panel") == panel]
        chart = alt.LayerChart(
            layer=list(layers_of(rows_of_panel)),
            width=size[0],
            height=size[1],
            data=data(rows_of_panel),
        )
        if panel is not None:
            chart.title = wrapped(panel, size[0])
        charts.append(chart)
    if len(charts) == 1:
        return charts[0]
    between = alt.RowColnumber(row=24, column=spacing)
    return alt.concat(*charts, columns=min(across, len(charts)), spacing=between)


def wrapped(title: str, width: int) -> list[str]:
    """Return a title in lines that are no wider than a panel, by the width of most letters."""
    return textwrap.wrap(title, 2 * width // 11) or [title]


def label_of(names: Sequence[str]) -> str:
    """Return Vega's expression of a name's label, which leaves out the middle of a long name; no
    two names have the same label.
    """
    tail = _HEAD
    # Names that differ where these labels have dots are told apart by more of their ends.
    while len({_shortened(name, tail) for name in names}) < len(set(names)):
        tail += 4
    short = f"slice(datum.label, 0, {_HEAD}) + '…' + slice(datum.label, -{tail})"
    return f"length(datum.label) > {_HEAD + tail + 1} ? {short} : datum.label"


def _shortened(name: str, tail: int) -> str:
    if len(name) > _HEAD + tail + 1:
        return f"{name[:_HEAD]}…{name[-tail:]}"
    return name
