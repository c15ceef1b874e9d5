"""The pictures of an analysis show the numbers of its files, and need nothing else."""

import json

import pandas as pd
import pytest

from fusion_bench_nufilt.pages import write
from fusion_bench_nufilt.pages.analysis import pictures_of
from fusion_bench_nufilt.pages.write import write_results
from tests.pages.helpers import LAYERS, TASKS, analysis_folder

TABLES = ("task_vectors", "losses", "affinity")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return analysis_folder(tmp_path_factory.mktemp("analysis"))


@pytest.fixture(scope="module")
def content(folder):
    return json.loads((folder / "analysis.json").read_text())


@pytest.fixture(scope="module")
def tables(folder):
    return {name: pd.read_csv(folder / f"{name}.csv") for name in TABLES}


@pytest.fixture(scope="module")
def pictures(content, tables):
    return {name: chart.to_dict() for name, chart in pictures_of(content, tables).items()}


def panels(chart, data=None):
    """The single charts of a picture, in order; what several share stands in the chart around
    them.
    """
    data = chart.get("data", data)
    parts = [part for key in ("concat", "hconcat", "vconcat") for part in chart.get(key, [])]
    return (
        [panel for part in parts for panel in panels(part, data)]
        if parts
        else [{**chart, "data": data}]
    )


def rows(panel):
    return panel["data"]["values"]


def test_every_number_of_the_affinity_is_in_its_picture(content, pictures):
    maps, curves = panels(pictures["affinity"])[:6], panels(pictures["affinity"])[6:]
    assert [panel["title"] for panel in maps[:2]] == [
        ["all: mean over 4 layers"],
        ["attention: mean over 2 layers"],
    ]
    drawn = {(row["row"], row["column"]): row["value"] for row in rows(maps[0])}
    expected = content["affinity"]["all"]["mean"]
    every = {
        (data, vector): expected[i][j]
        for i, data in enumerate(TASKS)
        for j, vector in enumerate(TASKS)
    }
    assert drawn == pytest.approx(every, rel=1e-5)
    names = [f"{TASKS[i]} → {TASKS[j]}" for i, j in content["pairs"]]
    assert list(dict.fromkeys(row["name"] for row in rows(curves[0]) if "name" in row)) == names
    assert {row["mark"] for row in rows(curves[0]) if "mark" in row} == {
        content["affinity"]["all"]["chance"]
    }


def test_a_distribution_counts_the_layers_in_which_the_affinity_is_at_most_so_large(
    content, tables, pictures
):
    data, vector = (TASKS[place] for place in content["pairs"][0])
    found = tables["affinity"].query("data == @data and vector == @vector")["affinity"]
    drawn = [
        row
        for row in rows(panels(pictures["affinity"])[6])
        if row.get("name") == f"{data} → {vector}"
    ]
    assert [row["y"] for row in drawn] == [(found <= row["x"]).mean() for row in drawn]
    assert drawn[-1]["y"] == 1


def test_a_vectors_overlap_with_itself_is_left_out(pictures):
    for panel in panels(pictures["overlap"]):
        assert len(rows(panel)) == 6
        assert all(row["row"] != row["column"] for row in rows(panel))


def test_spectra_have_a_curve_for_each_vector_and_a_point_for_each_layer(content, pictures):
    curves, points = panels(pictures["spectra"])
    energy = [row["y"] for row in rows(curves) if row.get("name") == TASKS[0]]
    assert energy == content["energy"][TASKS[0]]
    assert len(rows(points)) == len(TASKS) * len(LAYERS)
    assert {row["name"] for row in rows(points)} == {"attention", "MLP"}
    assert all(round(row["x"]) == (1 if ".1." in row["layer"] else 0) for row in rows(points))


def test_losses_have_a_panel_for_each_loss_and_its_steps(content, pictures):
    drawn = panels(pictures["losses"])
    titles = [panel["title"] for panel in drawn[:2]]
    assert titles == [["stability loss, fixed inputs"], ["plasticity loss, fixed inputs"]]
    assert len(drawn) == 2 * 4  # fixed and relative
    found = [row["y"] for row in rows(drawn[0]) if row["name"] == "sum"]
    assert found == pytest.approx(content["methods"]["sum"]["fixed"]["stability"], rel=1e-5)


def test_the_data_free_losses_have_a_panel_for_each_method_and_a_point_for_each_layer_and_step(
    content, pictures
):
    for chart, loss in zip(
        pictures["data_free"]["vconcat"], ("stability", "plasticity"), strict=True
    ):
        assert chart["title"] == f"measured {loss} loss over the data-free one"
        for panel, (method, measured) in zip(
            panels(chart), content["methods"].items(), strict=True
        ):
            assert (
                panel["title"]
                == f"{method}: rho {measured['rank_correlation'][loss]['layers']:.2f}"
            )
            assert len(rows(panel)) == 2 * len(LAYERS)
            assert {row["name"] for row in rows(panel)} == {method}
            assert rows(panel)[0]["y"] == pytest.approx(2 * rows(panel)[0]["x"], rel=1e-4)


def test_a_method_whose_data_free_loss_is_zero_has_no_panel(content, tables):
    one, *others = content["methods"]
    losses = tables["losses"].assign(data_free_stability=tables["losses"]["data_free_stability"])
    losses.loc[losses["method"] == one, "data_free_stability"] = 0
    stability, _ = pictures_of(content, {**tables, "losses": losses})["data_free"].to_dict()[
        "vconcat"
    ]
    assert [panel["title"].partition(":")[0] for panel in panels(stability)] == others


def test_losses_that_differ_a_lot_have_a_logarithmic_axis(content):
    fixed = {"stability": [0.001, 1.0], "plasticity": [1.0, None]}
    one = content["methods"]["NUFILT"]
    methods = {"NUFILT": {**one, "fixed": one["fixed"] | fixed}}
    drawn = panels(pictures_of(content | {"methods": methods}, {})["losses"].to_dict())
    assert [panel["layer"][-1]["encoding"]["y"]["scale"].get("type") for panel in drawn[:2]] == [
        "log",
        None,
    ]


def test_what_was_not_measured_is_not_drawn(content):
    known = {
        key: content[key]
        for key in content
        if key not in ("affinity", "affinity_by_rank", "pairs", "methods")
    }
    assert list(pictures_of(known, {})) == ["spectra", "overlap"]
    assert list(pictures_of(known | {"names": TASKS[:1]}, {})) == ["spectra"]


def test_every_picture_is_written_in_both_formats_and_named(folder, monkeypatch):
    written = []
    monkeypatch.setattr(
        write, "save_chart", lambda chart, *paths: written.extend(path.name for path in paths)
    )
    *pictures, page = write_results(folder)
    names = ["spectra", "overlap", "affinity", "affinity_by_rank", "losses", "data_free"]
    assert pictures == written == [f"{name}.{kind}" for name in names for kind in ("png", "pdf")]
    assert "matched pairs have a mean affinity" in (folder / page).read_text()
