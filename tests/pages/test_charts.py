"""What every kind of chart says, and that each becomes a picture."""

import io
import re

import altair as alt
import pytest
import vl_convert
from PIL import Image

from fusion_bench_nufilt.pages import charts
from fusion_bench_nufilt.pages.theme import (
    COLOURS,
    DASHES,
    SHAPES,
    chart_definition,
    save_chart,
    style,
)
from tests.pages.charts import encodings, legend, marks, parts, rows_of, titles

NAN = float("nan")
CURVES = {"one": [1.0, 2.0, 4.0], "two": [3.0, None, 2.0]}
LAYERS = ["layers.0.self_attn.q", "layers.0.mlp.fc1", "layers.11.mlp.fc1"]
KINDS = {
    "heat map": charts.heat_maps(
        {"a": [[1.0, NAN], [0.5, 0.2]]}, ["r", "s"], ["t", "u"], ("row", "column")
    ),
    "lines": charts.lines({"": CURVES}, [1, 2, 3], "step", "score"),
    "bars by step": charts.bars_by_step({"m": [[50.0, None], [40.0, 60.0]]}, ["t", "u"]),
    "by depth": charts.by_depth({"norm": [dict.fromkeys(LAYERS, 1.0)]}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_valid_and_becomes_a_picture_of_its_size(tmp_path, kind):
    KINDS[kind].to_dict()  # raises where Vega-Lite would not take it
    save_chart(KINDS[kind], tmp_path / "chart.png")
    save_chart(KINDS[kind], tmp_path / "chart.pdf")
    picture = Image.open(io.BytesIO((tmp_path / "chart.png").read_bytes())).convert("L")
    assert picture.width > 100
    assert picture.height > 80
    assert len(picture.getcolors()) > 10  # something is drawn
    assert (tmp_path / "chart.pdf").read_bytes().startswith(b"%PDF")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chart.pdf", "chart.png"]


@pytest.mark.parametrize("letter", ["\0", "\x07", "\x1b", "\x7f", "\ufffe", r"\0", r"\x07"])
def test_a_name_with_a_control_character_is_drawn_escaped(
    tmp_path, letter
):  # it would end the process
    save_chart(
        charts.lines({"": {f"one{letter}": [1.0, 2.0]}}, [1, 2], "step", f"sc{letter}ore"),
        tmp_path / "a.png",
    )
    assert (tmp_path / "a.png").stat().st_size > 1000


def luminance(colour):
    """The relative luminance of a colour, as WCAG has it."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (x / 255 for x in colour)
    ]
    return sum(
        weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True)
    )


@pytest.mark.parametrize("top", [100.0, 0.4])
def test_the_number_on_every_cell_can_be_read(top):
    values = [top * step / 100 for step in range(101)]
    chart = charts.heat_maps(
        {"a": [values]}, ["r"], [str(step) for step in range(101)], ("row", "column")
    )
    svg = vl_convert.vegalite_to_svg(chart_definition(chart))
    colours = [
        tuple(map(int, colour)) for colour in re.findall(r'fill="rgb\((\d+), (\d+), (\d+)\)"', svg)
    ][:101]
    words = re.findall(r'fill="(white|black)">([\d.]+)</text>', svg)
    assert len(words) == len(colours) == 101
    for (word, _), colour in zip(words, colours, strict=True):
        light, dark = sorted((luminance(colour), float(word == "white")), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_scores_have_one_decimal_and_shares_two_as_in_tables():
    assert (
        encodings(charts.heat_maps({"a": [[100.0]]}, ["r"], ["t"], ("row", "column")), "text")[0][
            "format"
        ]
        == ".1f"
    )
    assert encodings(KINDS["heat map"], "text")[0]["format"] == ".2f"


def test_a_cell_without_a_number_is_no_cell_and_keeps_its_row_and_column():
    assert [(row["row"], row["column"]) for row in rows_of(KINDS["heat map"])] == [
        ("r", "t"),
        ("s", "t"),
        ("s", "u"),
    ]
    assert encodings(KINDS["heat map"], "x")[0]["scale"]["domain"] == ["t", "u"]


def test_several_sets_are_panels_in_a_picture_and_a_menu_on_a_page():
    maps = {name: [[1.0]] for name in ("a\nACC 1", "b", "c")}
    picture = charts.heat_maps(maps, ["r"], ["t"], ("row", "column"), panels=2)
    assert picture.to_dict()["columns"] == 2
    assert titles(picture) == [["a", "ACC 1"], ["b"], ["c"]]
    labels = [
        [encodings(part, axis)[0].get("axis", "shown") for axis in "xy"] for part in parts(picture)
    ]
    assert [[axis is not None for axis in axes] for axes in labels] == [
        [False, True],
        [True, False],
        [True, True],
    ]
    page = charts.heat_maps(maps, ["r"], ["t"], ("row", "column")).to_dict()
    assert page["params"][0]["bind"]["options"] == list(maps)
    assert page["transform"] == [{"filter": "datum.set === show"}]


def test_a_curve_has_no_point_where_it_has_no_number_and_a_band_where_it_has_a_deviation():
    chart = charts.lines({"": CURVES}, [1, 2, 3], "step", deviations={"": {"one": [0.5, NAN, 1.0]}})
    assert [row["x"] for row in rows_of(chart, name="two")] == [1, 3]
    assert [row.get("low") for row in rows_of(chart, name="one")] == [0.5, None, 3.0]
    assert marks(chart) == ["area", "line", "point"]
    assert "area" not in marks(KINDS["lines"])


def test_the_legend_is_in_the_order_of_the_last_numbers_where_it_is_ranked():
    assert legend(charts.lines({"": CURVES}, [1, 2, 3], "step")) == ["one", "two"]
    swapped = dict(reversed(CURVES.items()))
    assert legend(charts.lines({"": swapped}, [1, 2, 3], "step", ranked=True)) == ["one", "two"]


def test_a_logarithmic_axis_names_every_place():
    scale = alt.Scale(type="log", base=2)
    axis = encodings(charts.lines({"": CURVES}, [1, 4, 16], "rank", x_scale=scale), "x")[0]
    assert axis["scale"] == {"type": "log", "base": 2}
    assert axis["axis"]["values"] == [1, 4, 16]


def test_dashed_lines_have_their_words():
    chart = charts.lines(
        {"": CURVES}, [1, 2, 3], "step", heights={"all": 3.5}, marks={"": (2, "chance")}
    )
    places = {
        row["words"]: row.get("mark", row.get("level")) for row in rows_of(chart) if "words" in row
    }
    assert places == {"chance": 2, "all": 3.5}


def test_a_slider_stands_at_the_last_step():
    slider = KINDS["bars by step"].to_dict()["params"][0]
    assert (slider["value"], slider["bind"]["min"], slider["bind"]["max"]) == (2, 1, 2)
    assert [row["value"] for row in rows_of(KINDS["bars by step"], step=2)] == [40.0, 60.0]


def test_layers_may_come_and_go_from_step_to_step_whose_numbers_go_on():
    steps = [{"layers.0.mlp.fc1": 1.0}, {"layers.3.self_attn.q": 2.0}]
    chart = charts.by_depth({"norm": steps}, first_step=4)
    slider = chart.to_dict()["params"][1]
    assert (slider["value"], slider["bind"]["min"], slider["bind"]["max"]) == (5, 4, 5)
    assert [(row["step"], row["kind"], round(row["x"])) for row in rows_of(chart)] == [
        (4, "MLP", 0),
        (5, "attention", 3),
    ]


def test_layers_of_one_block_stand_beside_each_other_by_kind():
    first, second, last = rows_of(KINDS["by depth"])
    assert first["x"] < 0 < second["x"] < 1
    assert last["x"] - second["x"] == pytest.approx(11)
    assert (first["kind"], last["kind"]) == ("attention", "MLP")


def test_no_two_of_fifty_six_names_look_the_same_and_a_name_looks_the_same_in_every_chart():
    names = [str(number) for number in range(56)]
    looks = {
        channel: style(names, names)[channel].to_dict()["scale"]["range"]
        for channel in ("color", "shape")
    }
    assert (
        len(set(zip(looks["color"], looks["shape"], strict=True)))
        == len(COLOURS) * len(SHAPES)
        == 56
    )
    assert len(DASHES) > 1
    chart = charts.lines({"": {"5": [1.0]}}, [1], "step", among=names)
    assert encodings(chart, "color")[0]["scale"]["range"] == looks["color"]
