"""The contribution and the patches in FusionBench's source distribution, in an environment without
the plugin.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv

import pytest
import transformers
import yaml

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm
from tests.conftest import REPO
from tests.tiny_models import finetuned, llama, t5
from tests.tools.test_upstream import upstream

pytestmark = pytest.mark.nightly

with_transformers_4 = pytest.mark.skipif(
    transformers.__version__ >= "5",
    reason="FusionBench 0.2.33 alone can't import its classes for CLIP with it",
)
OPTIONS = {"null_rank": 8, "lora_rank": 4, "task_rank": 2, "max_steps": 5, "seed": 43}
SETTINGS = [f"method.{key}={value}" for key, value in OPTIONS.items()]


@pytest.fixture(scope="module")
def distribution(tmp_path_factory):
    """The source distribution of the newest release that the plugin is tested with, unpacked."""
    folder = tmp_path_factory.mktemp("distribution")
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "fusion-bench==0.2.33"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), *options]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(
            f"pip cannot fetch FusionBench's source distribution: {done.stderr.strip()[-200:]}"
        )
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return archive.with_name(archive.name.removesuffix(".tar.gz"))


@pytest.fixture(scope="module")
def checkout(distribution, tmp_path_factory):
    """A copy with the contribution in it."""
    folder = shutil.copytree(distribution, tmp_path_factory.mktemp("checkout") / "fusion_bench")
    upstream.lay(folder)
    return folder


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Run Python in an environment of the same packages without the plugin, in a folder without
    ``config``.
    """
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder / "venv", with_pip=False)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    # A folder that a .pth file names is searched, but no .pth file in it is read: editable installs
    # stay out.
    (packages / "shared.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("site-packages"))
    )
    (folder / "cwd").mkdir()

    def run(*arguments, checkout, plugin=False, check=True):
        paths = [str(checkout)]
        if plugin:
            paths.append(str(REPO))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"}
        command = [str(folder / "venv" / "bin" / "python"), *arguments]
        done = subprocess.run(
            command,
            cwd=folder / "cwd",
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if check:
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    import_plugin = ("-c", "from fusion_bench_nufilt import FusionConfig")
    if run(*import_plugin, checkout=folder, check=False).returncode == 0:
        pytest.skip(
            "the plugin is installed as a copy, so that no environment without it can share its "
            "packages"
        )
    return run


def write_pool(config, name, pool, taskpool=None):
    """A config directory with a model pool, and a task pool, called ``name``."""
    for group, content in {"modelpool": pool, "taskpool": taskpool}.items():
        if content is not None:
            (config / group).mkdir(parents=True, exist_ok=True)
            (config / group / f"{name}.yaml").write_text(yaml.safe_dump(content))


def digests(folder):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob("*.safetensors")
    }


def test_the_contributed_tests_pass(checkout, elsewhere):
    tests = ["-s", str(checkout / "tests" / "test_method"), "-p", "test_nufilt.py"]
    done = elsewhere("-m", "unittest", "discover", *tests, checkout=checkout)
    assert "Ran 7 tests" in done.stderr


@pytest.mark.parametrize(("make", "target"), [(t5, "auto"), (llama, "all-linear")])
def test_the_command_line_gives_the_plugins_bits(make, target, checkout, elsewhere, tmp_path):
    base = make()
    models = {"_pretrained_": base, **{f"task{i}": finetuned(base, i) for i in range(3)}}
    pool = {"_target_": "fusion_bench.modelpool.BaseModelPool", "_recursive_": False, "models": {}}
    load = {"_target_": f"transformers.{type(base).__name__}.from_pretrained"}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        pool["models"][name] = {**load, "pretrained_model_name_or_path": str(tmp_path / name)}
    write_pool(tmp_path / "tiny", "tiny", pool)
    logs = tmp_path / "logs"
    command = ["-m", "fusion_bench", "--config-dir", str(tmp_path / "tiny")]
    overrides = ["method=nufilt/nufilt", "modelpool=tiny", f"path.log_dir={logs}", *SETTINGS]
    overrides.append(f"method.target_modules={target}")
    elsewhere(*command, *overrides, checkout=checkout)
    assert len(list(logs.glob("checkpoints/*"))) == 3
    algorithm = NufiltContinualMergingAlgorithm(**OPTIONS, target_modules=target)
    algorithm.run(models).save_pretrained(tmp_path / "ours")
    assert digests(logs / "checkpoints" / "merged_model_2") == digests(tmp_path / "ours") != {}


#: Composes methods as `fusion_bench` does, and prints them.
COMPOSE = """
import json, sys
from fusion_bench_nufilt.compare.configs import compose_run, plain
print(json.dumps({name: plain(compose_run([f"method={name}"]).method) for name in sys.argv[1:]}))
"""


def test_with_plugin_and_contribution_each_name_has_one_meaning(checkout, elsewhere):
    ours = "fusion_bench_nufilt.NufiltContinualMergingAlgorithm"
    theirs = "fusion_bench.method.NUFILTMerging"
    targets = {
        "nufilt/nufilt": theirs,
        "nufilt": ours,
        "nufilt/filter_only": ours,
    }
    done = elsewhere("-c", COMPOSE, *targets, checkout=checkout, plugin=True)
    methods = json.loads(done.stdout.splitlines()[-1])
    assert {name: method["_target_"] for name, method in methods.items()} == targets
    assert methods["nufilt"]["lora_rank"] == 64
    assert methods["nufilt/filter_only"]["lora_rank"] == 0


PATCHES = [
    path
    for path in sorted((REPO / "tools" / "patches").rglob("*.patch"))
    if path.parent.name != "mergekit"
]
OF_CLIP = ("0003", "0005", "0007")
#: Runs files of unit tests, and prints those that fail.
UNIT_TESTS = """
import importlib.util, json, sys, unittest
failed = []
for number, file in enumerate(sys.argv[1:]):
    spec = importlib.util.spec_from_file_location(f"tests_{number}", file)
    module = importlib.util.module_from_spec(spec)
    result = unittest.TestResult()
    try:
        spec.loader.exec_module(module)
        unittest.defaultTestLoader.loadTestsFromModule(module).run(result)
    except Exception:
        result.testsRun = 0
    if result.testsRun == 0 or not result.wasSuccessful():
        failed.append(file)
print(json.dumps(failed))
"""


@pytest.mark.parametrize(
    "of_clip", [False, pytest.param(True, marks=[with_transformers_4, pytest.mark.oldest])]
)
def test_the_patches_mend_what_their_tests_show(of_clip, distribution, elsewhere, tmp_path):
    """Each test fails without the patches, and passes with all of them."""
    folder = shutil.copytree(distribution, tmp_path / "fusion_bench")
    (folder / "fusion_bench_config").rename(folder / "config")  # as in its repository
    (folder / "fusion_bench_config").symlink_to("config")
    tests = []
    for patch in PATCHES:
        if patch.name.startswith(OF_CLIP) == of_clip:
            files = re.findall(r"^\+\+\+ b/(tests/.*/test_.*)$", patch.read_text(), re.MULTILINE)
            tests += [str(folder / file) for file in files if str(folder / file) not in tests]
    if not of_clip:
        pytest.importorskip("lm_eval", reason="the task pool of lm-eval needs lm-eval")

    def failing():
        done = elsewhere("-c", UNIT_TESTS, *tests, checkout=folder)
        return json.loads(done.stdout.splitlines()[-1])

    apply = ["git", "apply", "--whitespace=nowarn"]
    for patch in PATCHES:
        subprocess.run([*apply, "--include=tests/*", str(patch)], cwd=folder, check=True)
    assert failing() == tests != []
    for patch in PATCHES:
        subprocess.run([*apply, "--exclude=tests/*", str(patch)], cwd=folder, check=True)
    assert failing() == []
