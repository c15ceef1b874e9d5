"""What analysis.json and its sentences say, for numbers that can be checked by hand."""

import numpy as np
import pandas as pd
import pytest
import torch

from fusion_bench_nufilt.analysis.summary import (
    Analysis,
    _correlation,
    reading,
    save_analysis,
    summarise,
)
from tests.analysis.helpers import loss_row, pair_rows

ATTENTION = "layers.0.attn.q"
MLP = "layers.1.mlp.fc"
TASKS = ["law", "code"]
ENERGIES = {"law": torch.tensor([0.5, 0.5]), "code": torch.tensor([0.4, 0.4])}


def vector(task, layer, relative_norm, effective_rank, rank_90, energy_in_top):
    row = {
        "task": task,
        "layer": layer,
        "norm": 1.0,
        "relative_norm": relative_norm,
        "rank": 6,
        "effective_rank": effective_rank,
    }
    return row | {"rank_90": rank_90, "energy_in_top": energy_in_top, "energy": ENERGIES[task]}


def pairs(columns, values, **others):
    chances = {ATTENTION: 0.5, MLP: 0.25}
    return pair_rows([ATTENTION, MLP], TASKS, columns, np.array(values), chances=chances, **others)


def analysis(**others):
    """Two tasks in a layer of width 8 and one of width 16."""
    vectors = [
        vector("law", ATTENTION, 0.1, 2.0, 5, 0.6),
        vector("law", MLP, 0.3, 4.0, 7, 0.8),
        vector("code", ATTENTION, 0.2, 1.0, None, 0.5),
        vector("code", MLP, 0.2, 2.0, None, 0.5),
    ]
    overlaps = pairs(
        ("vector", "other_vector", "overlap"), [[[1, 0.5], [0.5, 1]], [[1, 0.1], [0.1, 1]]]
    )
    layers = {ATTENTION: (8, 8), MLP: (8, 16)}
    return Analysis(
        {"scored": "all test data"},
        TASKS,
        layers,
        task_rank=4,
        vectors=vectors,
        overlaps=overlaps,
        **others,
    )


def loss(step, layer, stability, plasticity, free, relative=None, **others):
    return loss_row(
        "a", step, "law", layer, stability, plasticity, stability, relative, *free, **others
    )


LOSSES = [
    loss(1, ATTENTION, None, 9.0, (None, 9.0), relative=9.0),
    loss(2, ATTENTION, 1.0, 3.0, (1.0, 3.0)),
    loss(2, MLP, 3.0, 3.0, (2.0, 4.0), relative=0.5),
    loss(3, ATTENTION, 0.0, 1.0, (2.0, 1.0)),
    loss(3, MLP, 0.0, 1.0, (1.0, 1.0)),
]
A = np.array([[[0.8, 0.2], [0.4, 0.6]], [[0.6, 0.0], [0.2, 0.6]]])
AFFINITY = pairs(("data", "vector", "affinity"), A, curves=A[..., None])


def test_vectors_and_overlaps_are_summed_up_by_task_and_group():
    content = summarise(analysis())
    law = {
        "layers": 2,
        "rank": 6,
        "relative_norm": pytest.approx(0.2),
        "effective_rank": 3,
        "rank_90": 6,
        "energy_in_top": pytest.approx(0.7),
    }
    assert content["vectors"]["law"] == law
    assert content["vectors"]["code"]["rank_90"] is None
    assert [
        content["overlap"][group][0][1] for group in ("all", "attention", "MLP")
    ] == pytest.approx([0.3, 0.5, 0.1])
    assert content["chance"] == {"all": 0.375, "attention": 0.5, "MLP": 0.25}
    assert content["layers_of"]["effective rank, mean over the tasks"] == {ATTENTION: 1.5, MLP: 3}
    assert "affinity" not in content
    assert "methods" not in content


def test_losses_are_means_over_layers_then_steps_and_what_is_not_known_is_none():
    content = summarise(analysis(losses=LOSSES, scores={"a": {"ACC": 0.5, "BWT": None}}))
    found = content["methods"]["a"]
    assert (found["ACC"], found["BWT"]) == (0.5, None)
    assert found["fixed"]["steps"] == [2, 3]
    assert found["fixed"]["stability"] == [2, 0]
    assert found["fixed"]["harmonic"] == [pytest.approx(2.4), 0]
    assert found["fixed"]["arithmetic"] == [2.5, 0.5]
    mean = {
        "stability": 1,
        "plasticity": 2,
        "harmonic": 1.2,
        "arithmetic": 1.5,
        "harmonic_of_means": 4 / 3,
    }
    assert found["fixed"]["mean"] == pytest.approx(mean)
    assert found["relative"]["plasticity"] == [0.5, None]
    assert found["relative"]["harmonic"][1] is None
    assert found["relative"]["mean"]["plasticity"] == 0.5


def test_rank_correlations_are_known_for_three_layers_and_more_that_differ():
    rows = pd.DataFrame(
        {"step": 2, "loss": [1.0, 2.0, 3.0], "free": [2.0, 4.0, 9.0], "constant": 1.0}
    )
    assert _correlation(rows, ["loss", "free"]) == pytest.approx(
        {"layers_and_steps": 1, "layers": 1}
    )
    for some, free in ((rows, "constant"), (rows[:2], "free")):
        assert np.isnan(list(_correlation(some, ["loss", free]).values())).all()


def test_affinities_are_summed_up_by_group_with_their_dominance():
    content = summarise(analysis(affinity=AFFINITY))
    assert content["affinity"]["all"]["mean"] == pytest.approx(np.array([[0.7, 0.1], [0.3, 0.6]]))
    assert content["affinity"]["MLP"]["chance"] == 0.25
    assert content["affinity"]["all"]["dominance"]["ratio"] == pytest.approx(3.25)
    found = content["affinity_by_rank"]
    assert found["ranks"] == [1]
    assert (*found["diagonal"], *found["off_diagonal"], *found["chance"]) == pytest.approx(
        (0.65, 0.2, (1 / 8 + 1 / 16) / 2)
    )


def test_the_sentences_say_what_the_numbers_say():
    whole = analysis(losses=LOSSES, affinity=AFFINITY)
    assert reading(summarise(whole)) == [
        "The task vectors share 0.30 of their top 4 directions on average over 2 layers; chance "
        "would be 0.38. Those that collide most are law and code (0.30).",
        f"They collide most in {ATTENTION} (0.50) and least in {MLP} (0.10).",
        "The top 4 directions of a layer hold 50 to 70 % of a task vector's energy, mean over 2 "
        "layers; 90 % of it takes more than the 2 directions that were solved for.",
        "Data and task vectors: matched pairs have a mean affinity of 0.65 over 2 layers, "
        "mismatched ones of 0.20; chance would be 0.38. The largest value is on the diagonal in 2 "
        "of 2 rows and 2 of 2 columns; a matched pair is above a mismatched one in 100 % of cases.",
        "ACC and BWT of the methods are scored on all test data.",
        "Losses of a with fixed inputs, mean over the steps: stability 1, plasticity 2, harmonic "
        "mean 1.2. Whether that is little is seen beside other methods (--methods).",
        "Over the layers of a step, Spearman's rank correlation (rho) of the data-free losses with "
        "the measured ones, "
        "for stability / plasticity, is: a none / none.",
    ]


def test_the_lowest_losses_are_those_of_several_methods():
    other = [{**row, "method": "b", "plasticity": row["plasticity"] / 2} for row in LOSSES]
    *_, losses, _ = reading(summarise(analysis(losses=LOSSES + other)))
    assert losses.startswith(
        "Losses with fixed inputs, mean over the steps: a (1) has the lowest stability loss, b (1) "
        "the lowest plasticity loss, and b (0.857) the lowest harmonic mean."
    )


def test_one_vector_has_nothing_to_collide_with():
    content = summarise(analysis()) | {"names": ["law"], "tasks": ["law"]}
    content["vectors"] = {"law": content["vectors"]["law"]}
    assert reading(content) == [
        "There is one task vector, 'law', and nothing that it could collide with.",
        "The top 4 directions of a layer hold 70 % of a task vector's energy, mean over 2 layers; "
        "90 % of it takes 6 directions in the median layer.",
    ]


def test_a_task_that_changes_nothing_is_named_and_one_alone_is_refused():
    whole = analysis()
    whole.vectors = [row for row in whole.vectors if row["task"] == "law"]
    whole.overlaps = [
        row for row in whole.overlaps if {row["vector"], row["other_vector"]} == {"law"}
    ]
    content = summarise(whole)
    assert content["names"] == ["law"]
    assert "'code' changes none of the layers." in reading(content)
    whole.vectors = []
    with pytest.raises(ValueError, match="none of law, code changes any of the 2 layers"):
        summarise(whole)


def test_tables_have_a_row_for_each_layer_and_leave_empty_what_is_not_known(tmp_path):
    _, files = save_analysis(analysis(losses=LOSSES[:2]), tmp_path)
    assert files == [
        "analysis.json",
        "reading.md",
        "task_vectors.csv",
        "overlaps.csv",
        "losses.csv",
    ]
    lines = (tmp_path / "task_vectors.csv").read_text().splitlines()
    assert lines[1] == f"law,{ATTENTION},1.0,0.1,6,2.0,5,0.6"
    assert lines[3] == f"code,{ATTENTION},1.0,0.2,6,1.0,,0.5"
    lines = (tmp_path / "overlaps.csv").read_text().splitlines()
    assert lines[2] == f"{ATTENTION},attention,law,code,0.5,0.5"
    lines = (tmp_path / "losses.csv").read_text().splitlines()
    assert lines[1] == f"a,1,law,{ATTENTION},,9.0,,9.0,,9.0"
