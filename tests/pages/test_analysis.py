"""The pictures of an analysis show the numbers of its files, and need nothing else."""

import json
from itertools import product

import pytest

from fusion_bench_nufilt.pages.analysis import charts_of_analysis
from tests.pages.charts import encodings, panels, rows_of
from tests.pages.helpers import LAYERS, TASKS


@pytest.fixture(scope="module")
def folder(folders):
    return folders["analysis"]


@pytest.fixture(scope="module")
def content(folder):
    return json.loads((folder / "analysis.json").read_text())


@pytest.fixture(scope="module")
def charts(content):
    return {name: chart.to_dict() for name, chart in charts_of_analysis(content).items()}


def test_every_number_of_the_affinity_is_in_its_picture(content, charts):
    assert panels(charts["affinity"])[:2] == [
        "all: mean over 4 layers",
        "all: 90th percentile over 4 layers",
    ]
    rows = rows_of(charts["affinity"], panel="all: mean over 4 layers")
    expected = content["affinity"]["all"]["mean"]
    every = {}
    for data, affinities in zip(TASKS, expected, strict=True):
        for vector, affinity in zip(TASKS, affinities, strict=True):
            every[data, vector] = affinity
    assert {(row["row"], row["column"]): row["value"] for row in rows} == pytest.approx(
        every, rel=1e-5
    )


def test_a_vectors_overlap_with_itself_is_left_out_and_the_axes_say_which_is_which(charts):
    for panel in panels(charts["overlap"]):
        rows = rows_of(charts["overlap"], panel=panel)
        assert len(rows) == 6
        assert all(row["row"] != row["column"] for row in rows)
    titles = [encodings(charts["overlap"], axis)[0]["title"] for axis in "yx"]
    assert titles == ["task vector", "other task vector"]


def test_spectra_have_a_curve_for_each_vector_and_layers_a_point_for_each_layer(content, charts):
    energy = [row["y"] for row in rows_of(charts["spectra"], name=TASKS[0])]
    assert energy == content["energy"][TASKS[0]]
    assert panels(charts["layers"]) == list(content["layers_of"])
    points = rows_of(charts["layers"], panel="effective rank, mean over the tasks")
    assert [row["layer"] for row in points] == LAYERS
    assert {row["name"] for row in points} == {"attention", "MLP"}
    assert [round(row["x"]) for row in points] == [0, 0, 1, 1]  # the blocks of LAYERS


def test_losses_have_a_panel_for_each_loss_and_its_steps(content, charts):
    drawn = panels(charts["losses"])
    assert drawn[:2] == ["stability loss, fixed inputs", "plasticity loss, fixed inputs"]
    assert len(drawn) == 2 * 4  # fixed and relative
    found = [row["y"] for row in rows_of(charts["losses"], panel=drawn[0], name="sum")]
    assert found == pytest.approx(content["methods"]["sum"]["fixed"]["stability"], rel=1e-5)


def test_losses_that_differ_a_lot_have_a_logarithmic_axis_on_which_zero_has_no_place(content):
    fixed = {"stability": [0.001, 1.0], "plasticity": [0.0, None]}
    one = content["methods"]["NUFILT"]
    methods = {"NUFILT": {**one, "fixed": one["fixed"] | fixed}}
    chart = charts_of_analysis(content | {"methods": methods})["losses"]
    assert encodings(chart, "y")[0]["scale"]["type"] == "log"
    assert encodings(chart, "y")[0]["title"] == "loss, log scale"
    assert "plasticity loss, fixed inputs" not in panels(chart)


def test_what_was_not_measured_is_not_drawn(content):
    known = {
        key: content[key]
        for key in content
        if key not in ("affinity", "affinity_by_rank", "methods", "layers_of")
    }
    assert list(charts_of_analysis(known)) == ["spectra", "overlap"]
    assert list(charts_of_analysis(known | {"names": TASKS[:1]})) == ["spectra"]


def test_every_picture_is_written_in_both_formats_and_is_on_the_page(folder, charts):
    for name, kind in product(charts, ("png", "pdf")):
        assert (folder / f"{name}.{kind}").stat().st_size > 1000
    text = (folder / "index.html").read_text()
    assert "matched pairs have a mean affinity" in text
    assert text.count('class="chart"') == len(charts) == 6
