"""The command lines that users type, in processes of their own."""

import json
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import fusion_bench.constants
import pytest
import torch
from fusion_bench.tasks.clip_classification import get_classnames_and_templates
from omegaconf import OmegaConf
from transformers import CLIPVisionModel

from fusion_bench_nufilt.compare.configs import compose_run
from tests.conftest import REPO

DEMO = ("method=nufilt", "modelpool=nufilt_demo", "method.max_steps=3")
TASKS = ["digits", "letters", "typefaces", "shapes", "textures", "colours", "counts", "arrows"]


def matrix_of(logs):
    return json.loads((logs / "accuracy_matrix.json").read_text())


@pytest.mark.slow
def test_the_bare_command_merges_and_evaluates_beside_a_config_folder_of_the_users(fusion_bench):
    (fusion_bench.folder / "config").mkdir()
    done = fusion_bench(*DEMO)
    result = matrix_of(fusion_bench.logs)
    assert sorted(result["tasks"]) == sorted(TASKS)
    assert result["config"]["null_rank"] == 128
    assert 0 <= result["ACC"] <= 1
    assert -1 <= result["BWT"] <= 1
    matrix = result["accuracy_matrix"]
    assert len(matrix) == 8
    for step, row in enumerate(matrix):
        measured = [score is not None for score in row]
        assert measured == [step == 7 or task == step for task in range(8)]
    assert "ACC" in done.stdout
    reports = [f"report_{i}.json" for i in range(8)]
    for name in ("accuracy_matrix.csv", "accuracy_matrix.png", "layers.csv", *reports):
        assert (fusion_bench.logs / name).stat().st_size > 0, name
    last = CLIPVisionModel.from_pretrained(fusion_bench.logs / "checkpoints" / "merged_model_7")
    assert all(torch.isfinite(parameter).all() for parameter in last.parameters())
    # FusionBench's own evaluation after the run is the one already made, not a second one.
    program = json.loads((fusion_bench.logs / "program_report.json").read_text())
    continual = program.pop("continual")
    assert program == json.loads((fusion_bench.logs / "report_7.json").read_text())
    assert (continual["ACC"], continual["BWT"]) == (result["ACC"], result["BWT"])
    lines = done.stdout.splitlines()
    assert f"page   {fusion_bench.logs / 'index.html'}" in lines
    folder = str(fusion_bench.logs / "checkpoints" / "merged_model_7")
    assert f"model  {folder}" in lines
    assert f'       CLIPVisionModel.from_pretrained("{folder}")' in lines
    # Bars of FusionBench, which a terminal shows one over another, are left out.
    bars = re.compile(r"Evaluating \w+: .*?\r *\r")
    output = bars.sub("", done.stdout + done.stderr).splitlines()
    assert len([line for line in output if line.strip() and "Evaluating" not in line]) <= 40
    assert "CONFIG" not in done.stdout
    assert "<h1>NUFILT: 8 models merged</h1>" in (fusion_bench.logs / "index.html").read_text()
    assert not (fusion_bench.logs / "report.json").exists()


def test_a_clip_setting_brings_its_models_and_its_task_pool():
    for model, tasks, count in (  # every size, and every set of tasks
        ("clip-vit-base-patch32", "TA8", 8),
        ("clip-vit-base-patch16", "TALL14", 14),
        ("clip-vit-large-patch14", "TALL20", 20),
    ):
        config = compose_run([f"modelpool={model}_{tasks}"]).modelpool
        assert len(config.models) == count + 1
        assert config.models._pretrained_ == f"openai/{model}"
        for name, path in config.models.items():
            assert name == "_pretrained_" or f"{model}_" in path
        assert config.taskpool.base_model == f"openai/{model}"
        assert set(config.taskpool.test_datasets) == set(config.models) - {"_pretrained_"}


def test_corrupted_test_sets_are_those_of_fusionbench_under_the_names_of_the_models():
    name = "clip-vit-base-patch32_robustness_corrupted"
    config = compose_run([f"modelpool={name}", "modelpool.corruption=spatter"]).modelpool
    root = Path(fusion_bench.constants.PROJECT_ROOT_PATH)
    folder = root / "fusion_bench_config" / "modelpool" / "CLIPVisionModelPool"
    theirs = OmegaConf.load(folder / f"{name}.yaml")  # which can't be composed
    tasks = config.models.keys() - {"_pretrained_"}
    assert tasks == config.taskpool.test_datasets.keys() == theirs.test_datasets.keys()
    for task, test_set in config.taskpool.test_datasets.items():
        assert (test_set.path, test_set.split) == (theirs.test_datasets[task].path, "spatter")
        assert get_classnames_and_templates(task)[0]
        assert config.models[task].endswith(f"_{task}")


def test_mtil_has_eleven_tasks_of_which_fusionbench_lacks_two():
    config = compose_run(["modelpool=clip-vit-base-patch16_MTIL11"]).modelpool
    twenty_tasks = compose_run(["modelpool=clip-vit-base-patch16_TALL20"]).modelpool
    test_sets = twenty_tasks.taskpool.test_datasets
    tasks = config.models.keys() - {"_pretrained_"}
    assert len(tasks) == 11
    assert tasks == config.taskpool.test_datasets.keys()
    for task in tasks - {"aircraft", "caltech101"}:
        assert config.taskpool.test_datasets[task] == test_sets[task]
        assert config.models[task].startswith("tanganke/clip-vit-base-patch16_")
    missing_keys = OmegaConf.missing_keys(config)
    for task in ("aircraft", "caltech101"):
        assert f"modelpool.models.{task}" in missing_keys
        assert f"modelpool.taskpool.test_datasets.{task}.path" in missing_keys
    assert config.taskpool.base_model == config.processor == config.models._pretrained_


def test_the_llava_pool_names_the_base_and_leaves_the_tasks_to_the_user():
    models = compose_run(["modelpool=llava-1.5-7b"]).modelpool.models
    path = "pretrained_model_name_or_path"
    assert models._pretrained_[path] == "llava-hf/llava-1.5-7b-hf"
    assert len(models) == 5
    for name in models.keys() - {"_pretrained_"}:
        assert OmegaConf.is_missing(models[name], path)


@pytest.mark.slow
def test_bad_input_ends_with_its_message_and_leaves_no_result(fusion_bench):
    done = fusion_bench(*DEMO, "method.target_modules=[fc9]", check=False)
    assert done.returncode == 1
    assert "'fc9' of ['fc9'] names no layer" in done.stderr.splitlines()[-1]
    others = ("Traceback", "ERROR", "Error executing job", "HYDRA_FULL_ERROR")
    assert not any(words in done.stdout + done.stderr for words in others)
    assert not (fusion_bench.logs / "checkpoints").exists()


@pytest.fixture(scope="session")
def wheel_python(tmp_path_factory):
    """Python of an environment with the built wheel, all its requirements, and no trace of the
    checkout.
    """
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, REPO]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    query = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", site, wheel], check=True, capture_output=True
    )
    # The requirements come from this environment; a path file does not read the path files there,
    # so not its checkout.
    with open(f"{site}/requirements.pth", "w") as file:
        file.write(sysconfig.get_path("purelib"))
    return str(python)


@pytest.mark.slow
def test_the_wheel_brings_its_configs_and_runs(fusion_bench, wheel_python):
    (fusion_bench.folder / "config").mkdir()
    query = [wheel_python, "-c", "import fusion_bench_nufilt; print(fusion_bench_nufilt.__file__)"]
    done = subprocess.run(
        query, check=True, capture_output=True, text=True, cwd=fusion_bench.folder
    )
    assert str(REPO) not in done.stdout
    fusion_bench(*DEMO, "method.evaluate=last", python=wheel_python)
    assert matrix_of(fusion_bench.logs)["ACC"] is not None
