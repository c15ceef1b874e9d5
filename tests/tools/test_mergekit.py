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


@pytest.mark.nightly
def test_the_patch_lets_an_installed_package_register_methods_as_its_test_shows(tmp_path):
    mergekit = importlib.util.find_spec("mergekit")
    if mergekit is None:
        pytest.skip("needs mergekit: pip install '.[mergekit]'")
    shutil.copytree(Path(mergekit.origin).parent, tmp_path / "mergekit")
    (tmp_path / "tests").mkdir()
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def passes():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, check=False
        )
        return done.returncode == 0

    git = ["git", "apply", "--whitespace=nowarn"]
    subprocess.run([*git, "--include=tests/*", str(PATCH)], cwd=tmp_path, check=True)
    assert not passes()
    subprocess.run([*git, "--exclude=tests/*", str(PATCH)], cwd=tmp_path, check=True)
    assert passes()
