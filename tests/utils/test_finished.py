"""What was finished is used again only as long as it is whole and of the same description."""

from typing import Any

import pytest
from typing_extensions import TypedDict

from fusion_bench_nufilt.utils.finished import FinishedFile, FinishedFolder, OtherWorkError
from fusion_bench_nufilt.utils.manifest import differences


class Score(TypedDict):
    settings: dict[str, Any]
    score: float


def setting_differences(saved, settings):
    return differences(saved["settings"], settings)


def score_in(folder):
    return FinishedFile(folder / "a" / "score.json", Score, "score again", setting_differences)


def model_in(folder):
    return FinishedFolder(folder / "model" / "about.json", dict, "train again", setting_differences)


def train(folder, **settings):
    with model_in(folder).keep({"settings": settings}) as draft:
        (draft / "weights").write_text(str(settings))


def test_work_that_is_not_finished_is_none_of_any_description(tmp_path):
    for work in (score_in(tmp_path), model_in(tmp_path)):
        assert work.take({"seed": 1}) is None
        work.refuse_other({"seed": 1})


def test_finished_work_is_taken_for_its_own_description_and_refused_for_another(tmp_path):
    score_in(tmp_path).keep({"settings": {"seed": 1}, "score": 0.5})
    train(tmp_path, seed=1)
    assert score_in(tmp_path).take({"seed": 1})["score"] == 0.5
    assert model_in(tmp_path).take({"seed": 1})["files"].keys() == {"weights"}
    for work in (score_in(tmp_path), model_in(tmp_path)):
        with pytest.raises(OtherWorkError, match=r"^seed is 1 there and 2 here$"):
            work.take({"seed": 2})


def test_a_damaged_file_is_no_work_of_another_description(tmp_path):
    score_in(tmp_path).keep({"settings": {"seed": 2}, "score": "high"})
    with pytest.raises(ValueError, match=r"score.json' is damaged, field 'score'.*; score again"):
        score_in(tmp_path).take({"seed": 1})


def test_a_folder_is_whole_only_with_all_bytes_that_were_written(tmp_path):
    train(tmp_path, seed=1)
    weights = tmp_path / "model" / "weights"
    weights.write_text(weights.read_text().upper())
    with pytest.raises(ValueError, match=r"weights is not what was saved.*train again"):
        model_in(tmp_path).take({"seed": 1})


def test_a_folder_that_a_killed_process_had_moved_aside_is_there_again(tmp_path):
    train(tmp_path, seed=1)
    (tmp_path / "model").rename(tmp_path / ".model.old")
    assert model_in(tmp_path).take({"seed": 1})
