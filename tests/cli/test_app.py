"""The `nufilt` command itself."""

import subprocess
import sys
import tomllib

import pytest
from typer.testing import CliRunner

from fusion_bench_nufilt.cli.app import COMMANDS, EXAMPLES, app
from fusion_bench_nufilt.methods.options import METHOD_TABLE
from tests.cli.helpers import nufilt
from tests.conftest import REPO


def test_the_command_is_installed():
    scripts = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"nufilt": "fusion_bench_nufilt.cli.app:app"}


def test_it_tells_its_version():
    version = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["version"]
    code, text = nufilt("--version")
    assert code == 0
    assert text.startswith(f"fusion-bench-nufilt {version}, fusion-bench 0.2")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_listed_and_tells_its_own_options(command):
    assert command in nufilt("--help")[1]
    code, text = nufilt(command, "-h")
    assert code == 0, text
    assert f"Usage: root {command}" in text
    for words in EXAMPLES[command]:
        assert f"nufilt {command} {words}" in text
    assert f"Examples: nufilt {command} " in text
    assert "--quiet" in text
    assert nufilt(command, "--help") == (code, text)


def test_help_names_every_method():
    text = nufilt("merge", "--help")[1]
    words = "".join(text.replace("│", "").split())  # names may be cut at the end of a line
    assert "".join(f"{name}," for name in METHOD_TABLE).rstrip(",") in words


def test_a_shell_completes_commands_and_their_options():
    shell = {
        "_NUFILT_COMPLETE": "complete_bash",
        "COMP_WORDS": "nufilt merge --meth",
        "COMP_CWORD": "2",
    }
    result = CliRunner().invoke(app, [], prog_name="nufilt", env=shell)
    assert result.output.split() == ["--method"]


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [(["--help"], "torch"), (["merge", "-h"], "torch"), (["merge", "-h"], "hydra")],
)
def test_a_command_imports_only_what_it_needs(arguments, unwanted):
    code = (
        "import sys; from fusion_bench_nufilt.cli.app import app\n"
        f"try: app({arguments})\nexcept SystemExit: print({unwanted!r} in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_a_command_ends_without_a_search_for_garbage_among_what_it_imported():
    code = (
        "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"
        "from fusion_bench_nufilt.cli.app import app\n"
        "app(['merge'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "True"


def test_a_merge_says_what_becomes_of_freed_memory_before_torch_starts_threads():
    code = (
        "import sys; from fusion_bench_nufilt.cli import app, merge\n"
        "merge.keep_freed_memory = lambda: print('torch' in sys.modules)\n"
        "app.app(['merge'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[0] == "False"


def test_a_merge_searches_for_no_garbage_among_what_it_imported():
    code = (
        "import gc\n"
        "from fusion_bench_nufilt.cli import app, merge\n"
        "def typed_values(context, typed): print(gc.get_freeze_count() > 0)\n"
        "merge.typed_values = typed_values\n"
        "app.app(['merge'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[0] == "True"
