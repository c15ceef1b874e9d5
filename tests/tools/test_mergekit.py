"""The patch for mergekit, on a copy of the installed one."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO

(PATCH,) = (REPO / "tools" / "patches" / "mergekit").glob("*.patch")


@pytest.mark.slow
def test_the_patch_lets_an_installed_package_register_methods_as_its_test_shows(tmp_path):
    if (found := importlib.util.find_spec("mergekit")) is None:
        pytest.skip("needs mergekit: pip install '.[mergekit]'")
    shutil.copytree(Path(found.origin).parent, tmp_path / "mergekit")
    (tmp_path / "tests").mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    }

    def passes():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
        return (
            subprocess.run(
                command, cwd=tmp_path, env=environment, capture_output=True, check=False
            ).returncode
            == 0
        )

    git = ["git", "apply", "--whitespace=nowarn"]
    subprocess.run([*git, "--include=tests/*", str(PATCH)], cwd=tmp_path, check=True)
    assert not passes()
    subprocess.run([*git, "--exclude=tests/*", str(PATCH)], cwd=tmp_path, check=True)
    assert passes()
