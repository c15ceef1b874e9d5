"""The first run of a model pool of the hub, of which a terminal shows what was done and what came
of it. The hub is the stand-in that lies beside a developer's checkout.
"""

import os
import subprocess
import sys

import pytest

from tests.conftest import shared_or_skip
from tests.screen import run_on_terminal

pytestmark = pytest.mark.slow
POOL = "modelpool=clip-vit-base-patch32_TA8"
RANKS = ("method.null_rank=8", "method.lora_rank=4")
#: What libraries say of every request, model and data set, and what is no news to anyone.
NOISE = ("HTTP", "LOAD REPORT", "Loading model", "DataLoader", "Generating", "already registered")
COMMANDS = {
    "a run": ("fusion_bench", "method=nufilt", POOL, *RANKS, "fabric.accelerator=cpu"),
    "a comparison": (
        "fusion_bench_nufilt.cli.app",
        *("compare", "--methods", "nufilt,weight_average", "--evaluate", "last"),
        *("--modelpool", "clip-vit-base-patch32_TA8", "fabric.accelerator=cpu"),
    ),
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """The folder of a hub of tiny models, and the script that serves it."""
    tool = shared_or_skip("tools/local_hub")
    root = tmp_path_factory.mktemp("hub")
    words = ("--size", "tiny", "--models", "clip-vit-base-patch32", "--tasks", "TA8")
    build = [sys.executable, tool / "build_hub.py", "--root", root, *words, "--rows", "8"]
    subprocess.run(build, check=True, capture_output=True)
    return root, tool / "serve_hub.py"


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_first_run_on_the_hub_has_at_most_forty_lines_on_a_terminal(hub, tmp_path, kind):
    root, serve = hub
    module, *words = COMMANDS[kind]
    serving = [sys.executable, serve, "--root", root, "--hf-home", tmp_path / "home", "--"]
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("COLUMNS", None)
    code, lines = run_on_terminal(
        [*serving, sys.executable, "-m", module, *words], tmp_path, environment
    )
    text = "\n".join(lines)
    assert code == 0, text
    assert "ACC" in text
    assert [word for word in NOISE if word in text] == []
    assert len(lines) <= 40, text
