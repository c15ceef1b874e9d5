"""Whole analyses: of the tiny demo, of a run on it, and of folders."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fusion_bench_nufilt.cli.app import app
from fusion_bench_nufilt.utils.files import lock_folder
from tests.tiny_models import finetuned, llama


def analyze(out, *words):
    return CliRunner().invoke(app, ["analyze", f"--out={out}", *words])


@pytest.mark.slow
def test_the_demo_needs_no_option(demo, tmp_path):
    done = analyze(
        tmp_path,
        "--methods",
        "nufilt:null_rank=10:lora_rank=5,task_arithmetic",
    )
    assert done.exit_code == 0, done.output
    assert "matched pairs have a mean affinity of" in done.stdout
    content = json.loads((tmp_path / "analysis.json").read_text())
    assert np.array(content["affinity"]["all"]["mean"]).shape == (8, 8)
    assert {layer["kind"] for layer in content["layers"]} == {"attention", "MLP"}
    for found in content["methods"].values():
        assert found["ACC"] >= 0
        for reading in ("fixed", "relative"):
            assert len(found[reading]["harmonic"]) == 7
            assert all(np.isfinite(list(found[reading]["mean"].values())))
    names = {"affinity", "affinity_by_rank", "layers", "losses", "overlap", "spectra"}
    assert {file.stem for file in tmp_path.glob("*.png")} == names
    assert {file.stem for file in tmp_path.glob("*.pdf")} == names
    rows = (tmp_path / "losses.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * 8 * 2 * 5  # methods, steps, blocks, layers of a block


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data-rank", "9"), "r_d = 9 and r_v = 8"),
        (("--base", "x"), "--base and --task go together"),
        (("--merged", "x"), "--merged goes with --base"),
        (("--base", "x", "--task", "y", "--methods", "opcm"), "--methods does not go with --base"),
        (("--base", "x", "--task", "y", "--samples", "9"), "--samples does not go with --base"),
        (("--base", "x", "--task", "y", "taskpool=z"), "taskpool=z does not go with --base"),
    ],
)
def test_wrong_settings_are_named_before_any_work(tmp_path, words, message):
    done = analyze(tmp_path / "out", *words)
    assert done.exit_code == 1
    assert message in done.output.replace("\n", " ")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def folders(tmp_path):
    base = llama()
    models = {"base": base, "law": finetuned(base, 1), "code": finetuned(base, 2)}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    return {name: str(tmp_path / name) for name in models}


def test_a_merged_folder_is_one_more_vector_and_a_second_analysis_is_refused(folders, tmp_path):
    words = (
        "--base",
        folders["base"],
        "--task",
        folders["law"],
        "--merged",
        folders["code"],
        "--no-verify",  # its weights are far from the base's, and no manifest has that base
        "--task-rank",
        "4",
    )
    out = tmp_path / "out"
    lock = lock_folder(out)
    done = analyze(out, *words, "--data-rank", "4")
    assert done.exit_code == 1
    assert "is writing" in done.output
    lock.release()
    done = analyze(out, *words, "--data-rank", "4")
    assert done.exit_code == 0, done.output
    assert "law and merged so far" in done.stdout
