"""What a merge says before any work."""

from tests.commands.helpers import nufilt
from tests.merge.helpers import RANKS


def test_the_plan_names_the_tensors_whose_changes_are_left_out_and_what_averages_them(stream):
    words = [f"{key}={value}" for key, value in RANKS.items()]
    models = ["--base", stream / "base", "--task", stream / "task1", "--out", stream / "out"]
    code, text = nufilt("merge", *models, *words, "--dry-run")
    assert code == 0, text
    assert "whatever a task changed in 6 tensors is left out: 'model.embed_tokens.weight'," in text
    assert "and 2 more; other_params=mean averages them" in text
    code, text = nufilt("merge", *models, *words, "other_params=mean", "--dry-run")
    assert code == 0, text
    assert "left out" not in text
