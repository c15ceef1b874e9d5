"""The command lines of the pages under the public names, against a stand-in for the model hub,
which lies beside a developer's checkout.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import transformers
from filelock import FileLock
from transformers import AutoModelForSeq2SeqLM, CLIPVisionModel

from tests.conftest import shared_or_skip
from tests.docs import PAGES, blocks_of
from tests.screen import run_on_terminal
from tests.test_pools import gpt2_checkpoints

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def hub(tmp_path_factory, request):
    """Serve tiny checkpoints and data sets under their public names; gives the command that runs
    another inside. Processes of the tests share what is served.
    """
    tools = shared_or_skip("tools/local_hub")
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        folder = folder.parent
    root = folder / "hub"
    with FileLock(folder / "hub.lock"):
        if not root.exists():
            build_hub(tools, root)
    return (sys.executable, str(tools / "serve_hub.py"), "--root", str(root))


def build_hub(tools, root):
    options = "--size tiny --models clip-vit-base-patch32,flan-t5-base --tasks TALL20,glue"
    options += " --rows 16 --glue-rows 4"
    build = [sys.executable, tools / "build_hub.py", "--root", root, *options.split()]
    subprocess.run(build, check=True, capture_output=True)
    spec = importlib.util.spec_from_file_location("build_hub", tools / "build_hub.py")
    builder = importlib.util.module_from_spec(spec)
    sys.modules["build_hub"] = builder
    spec.loader.exec_module(builder)
    for name, write in gpt2_checkpoints().items():
        builder.Hub(root).build("model", name, write)


POOLS = {
    "clip-vit-base-patch32_TA8": [],
    "clip-vit-base-patch32_TALL14": [],
    "clip-vit-base-patch32_TALL20": [],
    "clip-vit-base-patch32_robustness_corrupted": ["modelpool.corruption=test"],
    "clip-vit-base-patch16_MTIL11": [
        "~modelpool.taskpool.test_datasets.aircraft",
        "~modelpool.taskpool.test_datasets.caltech101",
        "modelpool.models.aircraft=none",
        "modelpool.models.caltech101=none",
    ],
    "flan-t5-base_glue": [],
    "gpt-2_glue": ["taskpool=gpt-2_glue"],
}

#: Loads the test and training data of pools.
LOAD = """
import json, sys
from fusion_bench.compat.modelpool import load_modelpool_from_config
from fusion_bench.compat.taskpool import load_taskpool_from_config
from fusion_bench.utils import instantiate
from lightning import Fabric
from fusion_bench_nufilt.compare.configs import compose_run, make, taskpool_config
fabric = Fabric(accelerator="cpu", devices=1)
for name, overrides in json.loads(sys.argv[1]).items():
    config = compose_run([f"modelpool={name}", *overrides])
    taskpool = make("taskpool", taskpool_config(config), fabric, load_taskpool_from_config)
    modelpool = make("modelpool", config.modelpool, fabric, load_modelpool_from_config)
    tests = getattr(taskpool, "_test_datasets", None)
    if tests:
        tested = {task: instantiate(config) for task, config in tests.items()}
    else:
        tested = {task: taskpool.load_task(task).test_dataset for task in taskpool.task_names}
    trained = {task: modelpool.load_train_dataset(task) for task in modelpool.train_dataset_names}
    nonempty = all(map(len, (*tested.values(), *trained.values())))
    print(name, [len(tested), len(trained)], nonempty)
"""


def test_every_pool_finds_the_data_of_its_tasks(hub, tmp_path):
    command = [*hub, "--", sys.executable, "-c", LOAD, json.dumps(POOLS)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith(tuple(POOLS))]
    tests_and_training = ([8, 8], [14, 14], [20, 20], [4, 0], [9, 0], [8, 0], [7, 7])
    assert lines == [
        f"{name} {counts} True" for name, counts in zip(POOLS, tests_and_training, strict=True)
    ]


def test_a_data_set_that_is_not_there_is_told_before_any_model_is_downloaded(
    fusion_bench, hub, tmp_path
):
    missing_data_set = "tanganke/none"
    overrides = [
        "method=nufilt",
        "modelpool=clip-vit-base-patch32_TA8",
        f"modelpool.taskpool.test_datasets.mnist.path={missing_data_set}",
    ]
    launcher = (*hub, "--hf-home", str(tmp_path / "home"), "--")
    done = fusion_bench(*overrides, launcher=launcher, check=False)
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("task 'mnist': its test data can't be loaded: ")
    assert missing_data_set in message
    assert not list((tmp_path / "home").rglob("*.safetensors"))


#: What libraries say of every request, model and data set, and what is no news to anyone.
NOISE = ("HTTP", "LOAD REPORT", "Loading model", "DataLoader", "Generating", "already registered")
#: Transformers 4 gives six lines of advice on image processors.
MOST_LINES = 40 if transformers.__version__ >= "5" else 46


def run_first_time(hub, folder, *command):
    """Run a module with nothing of the hub at hand, on a terminal, on which few lines tell what
    was done and what came of it.
    """
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("COLUMNS", None)
    serving = [*hub, "--hf-home", folder / "home", "--", sys.executable, "-m"]
    code, lines = run_on_terminal([*serving, *command], folder, environment)
    text = "\n".join(lines)
    assert code == 0, text
    assert "ACC" in text
    assert [word for word in NOISE if word in text] == []
    assert len(lines) <= MOST_LINES, text


@pytest.mark.oldest
def test_clip_on_eight_tasks_with_the_command_on_the_page(hub, tmp_path):
    blocks = []
    for page in PAGES:
        blocks += [block for block in blocks_of(page) if block.mark == "hub"]
    (block,) = blocks
    (words,) = block.words("fusion_bench")
    logs = tmp_path / "logs"
    # The ranks of the page are for layers that are not tiny, and a warning says so.
    ranks = ("method.null_rank=8", "method.lora_rank=4")
    run_first_time(hub, tmp_path, "fusion_bench", *words, *ranks, f"path.log_dir={logs}")
    result = json.loads((logs / "accuracy_matrix.json").read_text())
    tasks = "eurosat svhn mnist dtd resisc45 gtsrb sun397 stanford-cars"
    assert result["tasks"] == tasks.split()
    assert result["missing"] == []
    assert result["BWT"] is not None
    CLIPVisionModel.from_pretrained(logs / "checkpoints" / "merged_model_7")


def test_a_first_comparison_on_the_hub(hub, tmp_path):
    words = ("compare", "--methods", "nufilt,weight_average", "--evaluate", "last")
    pool = ("--modelpool", "clip-vit-base-patch32_TA8", "fabric.accelerator=cpu")
    run_first_time(hub, tmp_path, "fusion_bench_nufilt.cli.app", *words, *pool)


@pytest.mark.oldest
def test_flan_t5_on_glue_with_the_command_of_the_readme(fusion_bench, hub):
    command = ("method=nufilt", "modelpool=flan-t5-base_glue", "method.shuffle_order=false")
    fusion_bench(*command, launcher=(*hub, "--"))
    result = json.loads((fusion_bench.logs / "accuracy_matrix.json").read_text())
    assert result["tasks"][0] == "glue-cola"
    # Random models predict a constant, which has no rank correlation.
    assert set(result["missing"]) <= {"glue-stsb"}
    report = json.loads((fusion_bench.logs / "report_7.json").read_text())
    assert "spearman_rho" in report["glue-stsb"]
    saved = fusion_bench.logs / "checkpoints" / "merged_model_7"
    assert (saved / "model.safetensors").exists()
    AutoModelForSeq2SeqLM.from_pretrained(saved)
