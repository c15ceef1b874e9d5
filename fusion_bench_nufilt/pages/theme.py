"""What all charts share: colours and shapes, axes, and how a chart becomes a file."""

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert
from altair.typing import ChartType
from altair.utils.schemapi import debug_mode

from fusion_bench_nufilt.utils.files import atomic_file

Rows = list[dict[str, Any]]
Options = dict[str, Any]
Grid = Sequence[Sequence[float | None]]

#: The colours of Okabe and Ito, which readers with any colour vision can tell apart.
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
_CONFIG = json.loads(files(__package__).joinpath("theme.json").read_text())

#: In JSON: control characters, which crash the renderer and with it the process, and escapes that
#: may stand for one.
_UNDRAWN = re.compile(r'\\([^"un]|u(00[0189].|fff[ef]))|\x7f')


def chart_definition(chart: ChartType) -> dict[str, Any]:
    """Return a chart as Vega-Lite JSON, with the common theme and without the schema's address."""
    content = chart.to_dict(validate=False) | {"config": _CONFIG}
    del content["$schema"]
    definition: dict[str, Any] = json.loads(_UNDRAWN.sub(r"\\ufffd", json.dumps(content)))
    return definition


def save_chart(chart: ChartType, *paths: Path) -> None:
    """Write a chart as PNG or PDF, as each file's name says, atomically."""
    # Laying a chart out takes most of the time.
    svg = vl_convert.vegalite_to_svg(chart_definition(chart))
    for path in paths:
        if path.suffix == ".pdf":
            content = vl_convert.svg_to_pdf(svg)
        else:
            content = vl_convert.svg_to_png(svg, scale=2)
        with atomic_file(path) as temporary:
            temporary.write_bytes(content)


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
    with debug_mode(False):  # Altair would check every row against the schema of Vega-Lite
        return alt.Data(values=values)


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


def style(
    among: Sequence[str], shown: Sequence[str], field: str = "name", **legend: Any
) -> Options:
    """Return encodings that share a legend of the names ``shown``; a name's place ``among`` all is
    how it looks.
    """
    # Without symbolLimit, Vega leaves out all entries beyond the thirtieth.
    names = alt.Legend(values=list(shown), title=None, symbolLimit=0, symbolOpacity=1, **legend)

    def encoding(channel: Callable[..., Any], looks: Iterable[Any]) -> Any:
        of_names = list(islice(cycle(looks), len(among)))
        # All names: a method looks the same in a chart that shows fewer.
        scale = alt.Scale(domain=list(among), range=of_names)
        return channel(f"{field}:N", scale=scale, legend=names if len(shown) > 1 else None)

    # Where the colours begin again, the dashes change.
    dashes = [DASHES[number // len(COLOURS)] for number in range(len(DASHES) * len(COLOURS))]
    return {
        "color": encoding(alt.Color, COLOURS),
        "shape": encoding(alt.Shape, SHAPES),
        "strokeDash": encoding(alt.StrokeDash, dashes),
    }


def by_name(labels: Sequence[str], title: str | None) -> Options:
    """Return the options of an axis of names in the given order."""
    return {"scale": alt.Scale(domain=list(labels)), "sort": None, "title": title}


def by_block(deepest: int) -> alt.X:
    """Return an axis of a model's blocks, which ends at the deepest."""
    blocks = list(range(0, deepest + 1, 1 + deepest // 16))
    axis = alt.Axis(values=blocks, grid=False, format="d")
    scale = alt.Scale(zero=False, nice=False, padding=12)
    return alt.X("x:Q", title="block", axis=axis, scale=scale)


def tooltip(**fields: str) -> list[alt.Tooltip]:
    """Return a tooltip of fields, given their titles; ``y`` and ``value`` are numbers."""
    lines = []
    for field, title in fields.items():
        if field in ("y", "value"):
            line = alt.Tooltip(field, title=title, type="quantitative", format=".4g")
        else:
            line = alt.Tooltip(field, title=title, type="nominal")
        lines.append(line)
    return lines


def faceted(
    layers: Sequence[alt.Chart],
    rows: Rows,
    size: tuple[int, int],
    *,
    across: int = 4,
    own_scales: Sequence[str] = (),
    spacing: int = 24,
) -> ChartType:
    """Lay charts over each other, in a panel for each value of the rows' ``panel``, if there is
    any.

    The panels are in the order of their rows, at most ``across`` of them side by side.
    ``own_scales`` are the channels whose scales they do not share, ``spacing`` the pixels between
    neighbours.
    """
    panels = list(dict.fromkeys(row["panel"] for row in rows if row.get("panel")))
    panel = alt.LayerChart(layer=list(layers), width=size[0], height=size[1])
    if not panels:
        return panel.properties(data=data(rows))
    if len(panels) == 1:
        return panel.properties(data=data(rows), title=panels[0])
    header = alt.Header(labelLimit=size[0] + spacing)
    facet = alt.Facet("panel:N", sort=panels, title=None, header=header)
    across = min(across, len(panels))
    gaps = {"row": 24, "column": spacing}
    chart = panel.facet(facet, data=data(rows), columns=across, spacing=gaps)
    scales: Options = dict.fromkeys(own_scales, "independent")
    # The last row may have fewer panels than the others: each has an axis below it.
    return chart.resolve_scale(**scales).resolve_axis(x="independent")
