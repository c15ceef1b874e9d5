"""The `nufilt` command itself."""

import subprocess
import sys
import tomllib

from typer.testing import CliRunner

from fusion_bench_nufilt.cli.app import COMMANDS, EXAMPLES, app
from tests.cli.helpers import nufilt
from tests.conftest import REPO


def test_the_command_is_installed_and_tells_its_version():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"nufilt": "fusion_bench_nufilt.cli.app:app"}
    code, text = nufilt("--version")
    assert code == 0
    assert text.startswith(f"fusion-bench-nufilt {project['version']}, fusion-bench 0.2")


def test_every_command_is_listed_and_tells_its_own_options():
    _, listed = nufilt("--help")
    for command in COMMANDS:
        assert command in listed
        code, text = nufilt(command, "-h")
        assert code == 0, text
        assert f"Usage: root {command}" in text
        for words in EXAMPLES[command]:
            assert f"nufilt {command} {words}" in text
        assert "--quiet" in text
        assert nufilt(command, "--help") == (code, text)


def test_a_shell_completes_commands_and_their_options():
    shell = {
        "_NUFILT_COMPLETE": "complete_bash",
        "COMP_WORDS": "nufilt merge --meth",
        "COMP_CWORD": "2",
    }
    result = CliRunner().invoke(app, [], prog_name="nufilt", env=shell)
    assert result.output.split() == ["--method"]


def printed_by(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout


def test_help_is_printed_without_torch_and_hydra():
    code = """
import sys
from fusion_bench_nufilt.cli.app import app
for words in (["--help"], ["merge", "-h"]):
    try:
        app(words)
    except SystemExit:
        print("loaded", {"torch", "hydra"} & sys.modules.keys())
"""
    loaded = [line for line in printed_by(code).splitlines() if line.startswith("loaded")]
    assert loaded == ["loaded set()"] * 2


def test_a_merge_says_what_becomes_of_freed_memory_and_searches_no_garbage_among_what_it_imports():
    """The first before torch starts threads; the second also as it ends."""
    code = """
import atexit, gc, sys
from fusion_bench_nufilt.cli import app, merge
merge.keep_freed_memory = lambda: print("torch" in sys.modules)
merge.typed_values = lambda context, typed: print(gc.get_freeze_count() > 0)
atexit.register(lambda: print(gc.get_freeze_count() > 0))
app.app(["merge"])
"""
    assert printed_by(code).split() == ["False", "True", "True"]
