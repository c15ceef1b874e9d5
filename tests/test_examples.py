"""The examples run as they stand."""

import os
import subprocess
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPVisionModel

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.targets import select_layers
from tests.conftest import REPO
from tests.models import clip, finetuned

STAND_IN = """#!/bin/sh
echo "$@" >> calls
for argument in "$@"; do case $argument in path.log_dir=*) folder=${argument#*=};; esac; done
mkdir -p "$folder"
echo '{"ACC": 0.8, "BWT": -0.1}' > "$folder/accuracy_matrix.json"
"""


def example(name, *arguments):
    command = [sys.executable, REPO / "examples" / name, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plain_state_dicts(tmp_path):
    base = clip()
    for name, model in {"base": base, "one": finetuned(base, 1), "two": finetuned(base, 2)}.items():
        save_file(model.state_dict(), tmp_path / f"{name}.safetensors")
    files = [tmp_path / f"{name}.safetensors" for name in ("base", "one", "two", "merged")]
    output = example("merge_state_dicts.py", *files[:3], "--out", files[3])
    assert "two.safetensors: 10 layers merged" in output
    merged, before = load_file(files[3]), base.state_dict()
    changed = {key for key, value in merged.items() if not torch.equal(value, before[key])}
    assert changed == set(select_layers(base))


def test_own_models(tmp_path):
    base = clip()
    models = {"_pretrained_": base, "one": finetuned(base, 1), "two": finetuned(base, 2)}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    tasks = [f"--task={name}={tmp_path / name}" for name in ("one", "two")]
    example("merge_own_models.py", "--base", tmp_path / "_pretrained_", *tasks, "--out", tmp_path / "merged")
    merged = CLIPVisionModel.from_pretrained(tmp_path / "merged").state_dict()
    expected = NufiltContinualMergingAlgorithm(shuffle_order=False).run(models).state_dict()
    assert all(torch.equal(merged[key], value) for key, value in expected.items())


def test_paper_scripts_name_settings_that_exist(tmp_path):
    """Run with a stand-in for `fusion_bench` that only writes down how it was called."""
    stub = tmp_path / "fusion_bench"
    stub.write_text(STAND_IN)
    stub.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    scripts = REPO / "examples" / "paper"
    command = [scripts / "clip.sh", "clip-vit-base-patch32_TA8"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    subprocess.run([scripts / "flan_t5.sh"], cwd=tmp_path, env=environment, check=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [f"method.seed={seed} " in call for seed, call in enumerate(calls[:10], 42)] == [True] * 10
    assert "modelpool=flan-t5-base_glue method.shuffle_order=false" in calls[10]
    assert "ACC 80.0 +- 0.0 over 10 orders" in done.stdout
