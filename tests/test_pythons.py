"""The package on the newest version of Python that it supports, where that is installed."""

import json
import os
import subprocess
import warnings

import pytest

from tests.conftest import REPO

TORCH = os.environ.get("TORCH", "torch")
NEWEST = "3.13"


def run(*command, check=True, **more):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | more
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0 or not check, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.nightly
def test_the_package_installs_and_its_demo_runs(tmp_path):
    """Where torch comes with gigabytes of CUDA, all but torch is installed, and the demo is left
    out.
    """
    query = f"python{NEWEST} -c 'import sys; print(sys.executable)'"
    interpreter = run("sh", "-c", query, check=False, PYENV_VERSION=NEWEST)
    if not interpreter:
        pytest.skip(f"there is no python{NEWEST}")
    run(interpreter, "-m", "venv", tmp_path)
    python = tmp_path / "bin" / "python"
    # Compiling all that is installed takes longer than the commands below.
    install = (python, "-m", "pip", "install", "--quiet", "--no-compile")
    run(*install, "--upgrade", "pip")
    run(*install, "--dry-run", "--report", tmp_path / "report.json", TORCH, REPO)
    report = json.loads((tmp_path / "report.json").read_text())
    versions = {}
    for package in report["install"]:
        versions[package["metadata"]["name"]] = package["metadata"]["version"]
    cuda = [name for name in versions if name.startswith(("nvidia-", "cuda-", "triton"))]
    if cuda:
        for name in ("torch", "fusion-bench-nufilt", *cuda):
            versions.pop(name, None)
        pins = [f"{name}=={version}" for name, version in versions.items()]
        run(*install, "--no-deps", *pins, REPO)
    else:
        run(*install, TORCH, REPO)
    run(tmp_path / "bin" / "nufilt", "--help")
    package = run(python, "-c", "import fusion_bench_nufilt; print(*fusion_bench_nufilt.__path__)")
    run(python, "-W", "error", "-m", "compileall", "-q", "-f", package)
    if cuda:
        warnings.warn(
            f"without the demo: for Python {NEWEST}, pip has only a torch with CUDA", stacklevel=1
        )
        return
    compare = (tmp_path / "bin" / "nufilt", "compare", "--methods", "nufilt,best,opcm")
    demo = {"NUFILT_DEMO": "tiny", "NUFILT_CACHE": str(tmp_path / "cache")}
    run(*compare, "--out", tmp_path / "demo", **demo)
    assert (tmp_path / "demo" / "table.md").is_file()
