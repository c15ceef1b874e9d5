"""Every kind of picture, for many methods and tasks: what is drawn can be told apart,
has a name, and lies within its scale.
"""

import pytest

from fusion_bench_nufilt.analysis.summary import summarise
from fusion_bench_nufilt.pages import analysis, comparison
from fusion_bench_nufilt.pages.charts import score_maps
from fusion_bench_nufilt.pages.layers import layer_charts
from fusion_bench_nufilt.pages.results import layer_rows
from fusion_bench_nufilt.pages.theme import chart_definition
from tests.pages.charts import rows_of, spec_of
from tests.pages.helpers import analysis_of
from tests.pages.sizes import comparison_of, layers_of, names, sensitivity_of


@pytest.fixture(scope="module")
def pictures():
    """The definition of each picture by name, of more methods than there are colours and more tasks
    than heat maps have in large cells.
    """
    methods, tasks = 8, 11
    charts = comparison.charts_of_comparison(comparison_of(methods, tasks))
    charts |= layer_charts(layer_rows(layers_of(tasks)))
    charts |= analysis.charts_of_analysis(
        summarise(analysis_of(names("method", methods), names("task", tasks)))
    )
    matrix = comparison_of(1, tasks).matrices(42)["method 1"]
    charts["accuracy_matrix"] = score_maps({"NUFILT": matrix})
    charts["sensitivity"] = comparison.charts_of_comparison(sensitivity_of(2))["sensitivity"]
    return {name: chart_definition(chart) for name, chart in charts.items()}


def charts_in(pictures):
    """The charts of all pictures, which may stand below each other, each with its layers."""
    for definition in pictures.values():
        for part in definition.get("vconcat", [definition]):
            for panel in part.get("concat", [part]):
                yield {**panel, "datasets": definition.get("datasets", {})}, panel["layer"]


def scales(layers, channel):
    for layer in layers:
        encoding = layer["encoding"].get(channel, {})
        if "scale" in encoding:
            yield encoding


def test_whatever_is_drawn_can_be_told_apart(pictures):
    for part, layers in charts_in(pictures):
        drawn = {row["name"] for row in rows_of(part) if "name" in row}
        looks = {}
        for channel in ("color", "strokeDash", "shape"):
            for encoding in scales(layers, channel):
                scale = encoding["scale"]
                if encoding.get("field") == "name":
                    looks[channel] = dict(zip(scale["domain"], scale["range"], strict=True))
        if "color" not in looks:  # names stand on an axis
            continue
        different = set()
        for label in drawn:
            different.add(tuple(str(look[label]) for look in looks.values()))
        assert len(different) == len(drawn)
        for channel in ("strokeDash", "shape"):  # of the curve, and of its dots
            if channel in looks:
                pair = {(looks["color"][label], str(looks[channel][label])) for label in drawn}
                assert len(pair) == len(drawn)


def test_every_panel_has_numbers_and_every_axis_of_numbers_has_a_name(pictures):
    for part, layers in charts_in(pictures):
        assert any("y" in row or "value" in row for row in rows_of(part))
        titles = {}
        for axis in "xy":
            found = [layer["encoding"][axis] for layer in layers if axis in layer["encoding"]]
            titles[axis] = {one["title"] for one in found if one.get("title")}
            if any(one.get("type") == "quantitative" for one in found):
                # A panel's name may say what is drawn along an axis.
                assert titles[axis] or part.get("title")
        assert titles["x"].isdisjoint(titles["y"])


def test_every_number_lies_within_its_scale(pictures):
    for part, layers in charts_in(pictures):
        for channel in ("x", "y", "color"):
            for encoding in scales(layers, channel):
                domain = encoding["scale"].get("domain")
                if domain is None or encoding.get("type") != "quantitative":
                    continue
                field = encoding["field"]
                values = [row[field] for row in rows_of(part) if field in row]
                assert domain[0] <= min(values)
                assert max(values) <= domain[1]


def test_a_chart_of_curves_has_as_many_methods_as_there_are_colours_and_says_of_how_many(
    pictures,
):
    chart = pictures["accuracy_per_step"]
    assert len({row["name"] for row in rows_of(chart) if "name" in row}) == 7
    assert spec_of(chart)["title"] == "the 7 of 8 methods with the highest ACC"
