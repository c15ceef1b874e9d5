"""What every kind of chart says."""

import re

import pytest

from fusion_bench_nufilt.pages import charts
from fusion_bench_nufilt.pages.metrics import AccuracyMatrix
from fusion_bench_nufilt.pages.pictures import draw
from fusion_bench_nufilt.pages.theme import COLOURS, DASHES, cells, style
from tests.pages.charts import encodings, marks, panels, rows_of

NAN = float("nan")
LAYERS = ["layers.0.self_attn.q", "layers.0.mlp.fc1", "layers.11.mlp.fc1"]


def curves(numbers, x=(1, 2, 3), **fields):
    rows = []
    for name, values in numbers.items():
        for place, value in zip(x, values, strict=False):
            rows.append({"name": name, "x": place, "y": value, **fields})
    return rows


CURVES = curves({"one": [1.0, 2.0, 4.0], "two": [3.0, None, 2.0]})
TITLES = ("row", "column")


def heat_map(matrix, rows, columns, panel=None):
    return charts.heat_maps(cells(matrix, rows, columns, panel), rows, columns, TITLES, "value")


KINDS = {
    "heat map": heat_map([[1.0, NAN], [0.5, 0.2]], ["r", "s"], ["t", "u"]),
    "lines": charts.lines(CURVES, "step", "score"),
    "dots": charts.dots([{"panel": "ACC %", "name": "m", "value": 50.0, "text": "50.0"}]),
    "by depth": charts.by_depth([{"panel": "norm", "layer": layer, "y": 1.0} for layer in LAYERS]),
}


def test_a_name_with_a_control_character_is_drawn_escaped():
    """Drawn as it is, such a character would end the process."""
    letters = ["\0", "\x07", "\x1b", "\x7f", "\ufffe", r"\0", r"\x07"]
    rows = curves({f"one{letter}": [1.0, 2.0] for letter in letters})
    assert "one\ufffd" in draw(charts.lines(rows, "step", f"sc{''.join(letters)}ore"))


def test_a_backslash_in_a_name_is_drawn_as_it_is():
    names = [r"C:\models\new", r"a\u0000b", r"c\nd", "e\\"]
    chart = charts.lines(curves({name: [1.0, 2.0] for name in names}), "step", "score")
    svg = draw(chart)
    assert set(names) <= set(re.findall(r">([^<]+)</text>", svg))


def luminance(colour):
    """The relative luminance of a colour, as WCAG has it."""
    linear = []
    for value in colour:
        share = value / 255
        if share <= 0.04045:
            linear.append(share / 12.92)
        else:
            linear.append(((share + 0.055) / 1.055) ** 2.4)
    red, green, blue = linear
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("top", [100.0, 0.4])
def test_the_number_on_every_cell_can_be_read(top):
    values = [top * step / 100 for step in range(101)]
    chart = heat_map([values], ["r"], [str(step) for step in range(101)])
    svg = draw(chart)
    colours = [
        tuple(map(int, colour)) for colour in re.findall(r'fill="rgb\((\d+), (\d+), (\d+)\)"', svg)
    ][:101]
    words = re.findall(r'fill="(white|black)">([\d.]+)</text>', svg)
    assert len(words) == len(colours) == 101
    for (word, _), colour in zip(words, colours, strict=True):
        light, dark = sorted((luminance(colour), float(word == "white")), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_scores_have_one_decimal_and_shares_two_with_the_digits_of_tables():
    """Of a half, Vega would have drawn the next larger one."""
    scores = heat_map([[96.25, 100.0]], ["r"], ["t", "u"])
    assert [row["text"] for row in rows_of(scores)] == ["96.2", "100.0"]
    assert [row["text"] for row in rows_of(KINDS["heat map"])] == ["1.00", "0.50", "0.20"]
    assert {"96.2", "100.0"} <= set(re.findall(r">([^<]+)</text>", draw(scores)))


def test_a_cell_without_a_number_is_no_cell_and_keeps_its_row_and_column():
    places = [(row["row"], row["column"]) for row in rows_of(KINDS["heat map"])]
    assert places == [("r", "t"), ("s", "t"), ("s", "u")]
    assert encodings(KINDS["heat map"], "x")[0]["scale"]["domain"] == ["t", "u"]


@pytest.mark.parametrize(
    ("values", "marked"),
    [
        ([0.0, 0.347], [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35]),
        ([0.2, 0.56], [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
        ([-3.0, 41.0], [-10, 0, 10, 20, 30, 40, 50]),
        ([0.0, 0.0], [0, 0.2, 0.4, 0.6, 0.8, 1]),
    ],
)
def test_the_colours_cover_every_number_and_both_ends_are_marked(values, marked):
    colour = encodings(heat_map([values], ["r"], ["t", "u"]), "color")[0]
    assert colour["legend"]["values"] == marked
    assert colour["scale"]["domain"] == [marked[0], marked[-1]]


def test_numbers_below_zero_have_the_minus_of_tables():
    rows = curves({"one": [-1.0, -2.0, -0.25]})
    svg = draw(charts.lines(rows, "step", "BWT (%)"))
    assert ">-2</text>" in svg
    assert "\u2212" not in svg


@pytest.mark.parametrize(
    ("numbers", "label"), [([0.2, 0.2], "0.2"), ([0.74992, 0.75], "0.75"), ([0.0, 0.0], "0")]
)
def test_what_is_the_same_to_a_per_cent_is_flat_and_labelled_with_its_value(numbers, label):
    chart = charts.lines(curves({"one": numbers}), "step", "share")
    assert tick_labels(chart)[1] == [label]
    low, high = encodings(chart, "y")[0]["scale"]["domain"]
    assert max(numbers) - min(numbers) <= (high - low) / 10


def test_a_panel_is_flat_by_its_own_numbers():
    rows = []
    for panel, values in (("flat", [0.5, 0.501, 0.502]), ("steep", [0.5, 0.6, 0.9])):
        for layer, value in zip(LAYERS, values, strict=True):
            rows.append({"panel": panel, "layer": layer, "y": value})
    flat, steep = [encodings(part, "y")[0] for part in charts.by_depth(rows).to_dict()["concat"]]
    assert flat["axis"]["values"] == [0.501]
    assert "values" not in steep.get("axis", {})


def tick_labels(chart):
    """The texts that are seen at each axis of a drawn chart."""
    svg = draw(chart)
    axes = re.findall(r'class="mark-text role-axis-label"(.*?)</g>', svg)
    return [re.findall(r'opacity="1">([^<>]+)</text>', axis) for axis in axes]


@pytest.mark.parametrize("end", [0.8841, 0.9, 87.6])
def test_no_two_places_of_an_axis_have_the_same_label(end):
    _, labels = tick_labels(charts.lines(curves({"one": [0.875, end]}), "step", "share"))
    assert len(labels) > 2
    assert len(set(labels)) == len(labels)


def test_the_labels_of_twenty_steps_stand_apart():
    steps = range(1, 21)
    rows = curves({"one": [1.0] * 20}, x=steps)
    labels, _ = tick_labels(charts.lines(rows, "step", "loss"))
    assert labels == [str(step) for step in steps]
    beside_others = curves({"one": [1.0] * 20}, x=steps, panel="a") + curves(
        {"one": [1.0]}, panel="b"
    )
    labels, *_ = tick_labels(charts.lines(beside_others, "step", "loss"))
    assert labels == [str(step) for step in steps if step % 2]


def test_a_step_after_which_nothing_was_scored_is_no_row():
    matrix = AccuracyMatrix.from_rows(["t", "u"], [[None, None], [0.5, 0.6]])
    chart = charts.score_maps({"m": matrix})
    assert encodings(chart, "y")[0]["scale"]["domain"] == ["2 + u"]


def test_matrices_of_twenty_tasks_are_no_wider_than_a_page():
    tasks = [f"task {number}" for number in range(20)]
    rows = []
    for method in ("one", "two", "three"):
        rows += cells([[50.0] * 20], ["last"], tasks, method)
    svg = draw(charts.heat_maps(rows, ["last"], tasks, TITLES, "value"))
    assert float(re.search(r'width="(\d+)"', svg)[1]) <= 1200


def test_dots_without_a_deviation_have_no_rules():
    assert marks(KINDS["dots"]) == ["point", "text"]
    row = {"panel": "ACC %", "name": "m", "value": 50.0, "text": "50.0 ± 1.0"}
    assert marks(charts.dots([row | {"low": 49.0, "high": 51.0}])) == ["rule", "point", "text"]


def test_sets_of_rows_are_panels_in_their_order_and_only_those_that_have_rows():
    maps = []
    for name in ("b", "a", "c"):
        maps += cells([[1.0]], ["r"], ["t"], name)
    chart = charts.heat_maps(maps, ["r"], ["t"], TITLES, "value", across=2).to_dict()
    assert panels(chart) == ["b", "a", "c"]
    assert chart["columns"] == 2
    assert "params" not in chart
    assert panels(heat_map([[1.0]], ["r"], ["t"], "alone")) == ["alone"]


def test_a_title_that_is_wider_than_its_panel_has_several_lines_and_loses_no_word():
    title = "nufilt with a null rank of 128: ACC 83.6   BWT -3.2 (7 of 8 tasks; no score for cars)"
    rows = cells([[1.0]], ["r"], ["t"], title)
    svg = draw(charts.heat_maps(rows, ["r"], ["t"], TITLES, "value"))
    words = " ".join(re.findall(r">([^<>]+)</(?:text|tspan)>", svg))
    assert "…" not in words
    for word in title.split():
        assert word in words


def labels_of(names):
    """What a drawn axis has of the names."""
    rows = [{"panel": "p", "name": name, "value": 1.0, "text": "1.0"} for name in names]
    _, labels = tick_labels(charts.dots(rows))
    return labels


def test_names_that_differ_only_at_their_ends_or_in_their_middles_read_differently():
    stem = "a_method_of_a_very_long_name_with_options"
    names = [f"{stem}:rank={rank}" for rank in (8, 16)]
    names += [f"{stem}:{word}:" + "x" * 30 for word in ("one", "two")]
    shown = labels_of([*names, "short"])
    assert len(set(shown)) == 5
    assert "short" in shown
    assert shown[0].endswith(":rank=8")


def test_a_curve_has_no_point_where_it_has_no_number_and_a_bar_where_it_has_a_deviation():
    with_bars = [row | {"low": row["y"] - 0.5, "high": row["y"] + 0.5} for row in CURVES[:3]]
    with_bars[1] = CURVES[1]
    chart = charts.lines(with_bars + CURVES[3:], "step", "")
    assert [row["x"] for row in rows_of(chart, name="two")] == [1, 3]
    assert [row.get("low") for row in rows_of(chart, name="one")] == [0.5, None, 3.5]
    assert marks(chart) == ["rule", "line", "point"]
    assert "rule" not in marks(KINDS["lines"])


def test_the_bars_of_curves_stand_side_by_side():
    numbers = {name: [1.0, 2.0, 4.0] for name in ("one", "two", "three", "four")}
    rows = [row | {"low": row["y"] - 0.5, "high": row["y"] + 0.5} for row in curves(numbers)]
    chart = charts.lines(rows, "step", "")
    assert marks(chart) == ["rule", "line", "point"]
    first = sorted(row["x"] for row in rows_of(chart) if round(row["x"]) == 1)
    assert len(set(first)) == 4
    assert sum(first) / 4 == pytest.approx(1)
    assert {row["title"] for row in rows_of(chart, name="two")} >= {"two, step 1: 1"}


def test_a_dashed_line_has_its_words():
    chart = charts.lines([*CURVES, {"level": 3.5, "words": "all"}], "step", "")
    assert [row["words"] for row in rows_of(chart) if "words" in row] == ["all"]
    assert marks(chart) == ["line", "point", "rule", "text"]


def test_attention_and_mlp_have_the_same_colours_whichever_comes_first():
    rows = [{"panel": "norm", "layer": layer, "y": 1.0} for layer in LAYERS]
    looks = [encodings(charts.by_depth(part), "color")[0] for part in (rows, rows[::-1], rows[1:])]
    assert all(look["scale"] == looks[0]["scale"] for look in looks)


def test_layers_of_one_block_stand_beside_each_other_by_kind():
    first, second, last = rows_of(KINDS["by depth"])
    assert first["x"] < 0 < second["x"] < 1
    assert last["x"] - second["x"] == pytest.approx(11)
    assert (first["name"], last["name"]) == ("attention", "MLP")


def test_no_two_of_twenty_eight_names_look_the_same_and_a_name_looks_the_same_in_every_chart():
    names = [str(number) for number in range(28)]
    looks = {
        channel: style(names, names)[channel].to_dict()["scale"]["range"]
        for channel in ("color", "shape", "strokeDash")
    }
    for other in ("shape", "strokeDash"):  # of points, and of curves
        seen = set(zip(looks["color"], map(str, looks[other]), strict=True))
        assert len(seen) == len(names) == len(COLOURS) * len(DASHES)
    chart = charts.lines(curves({"5": [1.0]}), "step", "", among=names)
    assert encodings(chart, "color")[0]["scale"]["range"] == looks["color"]
