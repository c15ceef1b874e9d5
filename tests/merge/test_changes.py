"""What a task changed in the base is in the result, or it is said that it is not."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from fusion_bench_nufilt.merge.output import work_folder
from tests.commands.helpers import nufilt
from tests.merge.helpers import RANKS, change, hashes, manifest, merge, plan, save_stream, tensors
from tests.merge.test_adapters import save_adapter
from tests.merge.test_resume import count_layers
from tests.models import llama

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


def counts(folder):
    return list(manifest(folder)["changes"].values())


def test_every_tensor_that_a_task_changed_is_counted_and_those_left_out_are_named(stream, caplog):
    base = tensors(stream / "base")
    change(stream / "task2", NORM, lambda value: base[NORM])
    left_out = {key for key in base if "_proj" not in key}
    out = merge(stream)
    assert {NORM, EMBEDDING} < left_out
    assert [set(each["left_out"]) for each in counts(out)] == [
        left_out,
        left_out - {NORM},
        left_out,
    ]
    assert [each["merged"] for each in counts(out)] == [14, 14, 14]
    assert [each["changed"] for each in counts(out)] == [len(base), len(base) - 1, len(base)]
    sentence = f"task2: 14 of the {len(base) - 1} tensors it changed are merged. Left out: "
    assert sentence in caplog.text
    assert sentence in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("other_params", "merged"), [("mean", ["all", "all"]), ("first", ["all", 14])]
)
def test_what_is_averaged_is_merged_and_a_first_model_counts_alone(stream, other_params, merged):
    out = merge(stream, ["task1", "task2"], other_params=other_params)
    assert [each["merged"] for each in counts(out)] == [
        len(tensors(out)) if each == "all" else each for each in merged
    ]


def test_rounding_to_the_dtype_that_a_task_is_stored_in_is_no_change(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    base, file = tensors(tmp_path / "base"), tmp_path / "task1" / "model.safetensors"
    save_file(
        {
            key: value if "_proj" in key else base[key].bfloat16()
            for key, value in load_file(file).items()
        },
        file,
    )
    assert counts(merge(tmp_path, ["task1"])) == [{"changed": 14, "merged": 14, "left_out": []}]


def test_a_strict_merge_refuses_losses_before_the_layers_and_the_work_is_gone_on_with(
    stream, monkeypatch
):
    computed = count_layers(monkeypatch)
    with pytest.raises(
        ValueError,
        match=r"strict: '.*task1' changed .*, which the result would not have: merge more",
    ):
        merge(stream, settings={"strict": True})
    assert not computed
    assert not (stream / "out").exists()
    assert work_folder(stream / "out").exists()
    assert hashes(merge(stream)) == hashes(merge(stream, out="again"))
    merge(stream, out="mean", other_params="mean", settings={"strict": True})


def test_losses_that_headers_tell_are_refused_in_the_plan(tmp_path):
    models = save_stream(tmp_path, llama(), tasks=2)
    strict = {"strict": True}
    file = tmp_path / "task1" / "model.safetensors"
    save_file({**load_file(file), "extra.weight": torch.ones(3)}, file, metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"task1' changed 'extra\.weight', which the result would not have"
    ):
        plan(tmp_path, ["task1"], settings=strict, other_params="mean")
    save_adapter(tmp_path, models["_pretrained_"], target_modules=["q_proj", "up_proj"])
    with pytest.raises(
        ValueError, match=r"adapter' changed 'model.layers.0.mlp.up_proj.weight', .*up_proj"
    ):
        plan(tmp_path, ["adapter"], settings=strict, target_modules=["q_proj"])
    plan(tmp_path, ["task2", "adapter"], settings=strict)


def test_a_head_that_a_task_unties_is_lost_if_it_differs(tmp_path):
    save_stream(tmp_path, llama(tie_word_embeddings=True), tasks=2)
    for name, change_in in (("task1", 0), ("task2", 1)):
        file = tmp_path / name / "model.safetensors"
        state = load_file(file)
        save_file({**state, "lm_head.weight": state[EMBEDDING] + change_in}, file)
    out = merge(tmp_path, ["task1", "task2"], other_params="mean")
    assert [each["left_out"] for each in counts(out)] == [[], ["lm_head.weight"]]


def test_the_plan_names_the_tensors_whose_changes_are_left_out(stream):
    words = [f"{key}={value}" for key, value in RANKS.items()]
    models = ["--base", stream / "base", "--task", stream / "task1", "--out", stream / "out"]
    code, text = nufilt("merge", *models, *words, "--dry-run")
    assert code == 0, text
    assert (
        text.count(
            "whatever a task changed in 6 tensors is left out: 'model.embed_tokens.weight', "
        )
        == 1
    )
    code, text = nufilt("merge", *models, *words, "other_params=mean", "--strict", "--dry-run")
    assert code == 0, text
    assert "left out" not in text
