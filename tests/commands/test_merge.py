"""The `nufilt merge` command."""

from tests.commands.helpers import nufilt
from tests.folders.helpers import RANKS, merge, same, save_stream, tensors
from tests.models import llama

FLAGS = [part for key, value in RANKS.items() for part in (f"--{key.replace('_', '-')}", str(value))]


def test_a_stream_and_one_more_model(tmp_path):
    save_stream(tmp_path, llama())
    base, one, two, three = ("--base", tmp_path / "base"), *(tmp_path / f"task{i}" for i in (1, 2, 3))
    code, text = nufilt("merge", *base, "--task", one, "--task", two, "--out", tmp_path / "two", *FLAGS)
    assert (code, "step 2, 14 layers merged" in text) == (0, True), text
    code, text = nufilt(
        "merge", *base, "--merged", tmp_path / "two", "--task", three, "--out", tmp_path / "new", *FLAGS
    )
    assert (code, "step 3, 14 layers merged" in text) == (0, True), text
    assert same(tensors(tmp_path / "new"), tensors(merge(tmp_path)))


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    before = sorted(tmp_path.rglob("*"))
    arguments = ("--base", tmp_path / "base", "--task", tmp_path / "task1", "--out", tmp_path / "out", "--dry-run")
    code, text = nufilt("merge", *arguments)
    assert code == 0
    for words in ("14 layers", "0 tensors (other_params=pretrained)", "6 tensors, bit by bit", "GB at most"):
        assert words in text
    assert sorted(tmp_path.rglob("*")) == before


def test_the_name_of_a_folder_is_no_markup(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    out = tmp_path / "[" / "bold]"
    assert nufilt("merge", "--base", tmp_path / "base", "--task", tmp_path / "task1", "--out", out, *FLAGS)[0] == 0


def test_ranks_are_numbers_or_shares_of_the_width(tmp_path):
    save_stream(tmp_path, llama(), tasks=2)
    models = ("--base", tmp_path / "base", "--task", tmp_path / "task1", "--task", tmp_path / "task2")
    attention, ranks = ("--target-modules", "self_attn"), {"numbers": (8, 4, 2), "shares": (0.25, 0.125, 0.0625)}
    for out, (r_p, r_l, r_v) in ranks.items():  # of layers with 32 inputs
        flags = ("--null-rank", r_p, "--lora-rank", r_l, "--task-rank", r_v, "--max-steps", 3)
        code, text = nufilt("merge", *models, "--out", tmp_path / out, *attention, *flags)
        assert code == 0, text
    assert same(tensors(tmp_path / "numbers"), tensors(tmp_path / "shares"))


def test_words_choose_layers_as_in_the_yaml(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    arguments = ("--base", tmp_path / "base", "--task", tmp_path / "task1", "--out", tmp_path / "out", "--dry-run")
    words = ("--target-modules", "q_proj", "--target-modules", "mlp", "--exclude-modules", "layers.0")
    assert "4 layers" in nufilt("merge", *arguments, *words)[1]
    assert "2 layers" in nufilt("merge", *arguments, "--target-modules", r".*v_proj")[1]
