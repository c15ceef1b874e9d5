"""The plugin of Hydra: what it adds to FusionBench's search path, and what it costs a run that does
not use it.
"""

import shlex
import subprocess
import sys

import pytest
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl

from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.compare.specs import parse_methods
from fusion_bench_nufilt.utils.overrides import CONFIG, key_value, user_folders, with_config_dir
from hydra_plugins.fusion_bench_nufilt import FusionBenchNufiltSearchPathPlugin

GROUPS = ("method", "modelpool", "taskpool")
NAMES = [
    file.relative_to(CONFIG).as_posix().removesuffix(".yaml")
    for group in GROUPS
    for file in sorted((CONFIG / group).rglob("*.yaml"))
]


@pytest.fixture
def my(tmp_path):
    folder = tmp_path / "my"
    for name in NAMES:
        file = folder / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("_target_: mine\n")
    return folder


def search_path_of(monkeypatch, *words):
    """The folders that a command line of FusionBench searches, in their order."""
    monkeypatch.setitem(sys.modules, "fusion_bench.scripts.cli", None)
    monkeypatch.setattr(sys, "argv", ["fusion_bench", *words])
    path = ConfigSearchPathImpl()
    path.append("main", "file:///fusion_bench_config")
    FusionBenchNufiltSearchPathPlugin().manipulate_search_path(path)
    return [element.path for element in path.get_path()]


def test_a_folder_of_the_users_comes_before_the_plugins_configurations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my").mkdir()
    for words in (
        ["--config-dir", "my"],
        ["--config-dir=my"],
        ["-cd", "my", "--cfg", "job"],
        ["hydra.searchpath=[file://my]"],
        ["method=sum", "-m", "hydra.searchpath=['file://my']", "x=1,2"],
    ):
        folders = search_path_of(monkeypatch, *words)
        (mine,) = [folder for folder in folders if folder.endswith("my")]
        places = [folders.index(name) for name in (folders[0], mine, f"file://{CONFIG}")]
        assert folders[0] == "file:///fusion_bench_config"
        assert places == sorted(places)
    for words in (("--config-dir",), ("x=[",), ("--no-such-option",), ()):
        assert user_folders(words) == []  # Hydra refuses them


def test_a_word_that_fusion_bench_can_not_use_is_one_line_with_what_to_type(monkeypatch):
    quoted = "in both kinds of quotes: "
    for word, line in (
        ("method=nufil", "there is no method 'nufil'; did you mean 'nufilt'?"),
        ("method=nufilt/naiv", "did you mean 'nufilt/naive'?"),
        ("modelpool=nufilt_dmo", "there is no modelpool 'nufilt_dmo'; did you mean 'nufilt_demo'?"),
        ("taskpool=nufilt_dem", "there is no taskpool 'nufilt_dem'; did you mean 'nufilt_demo'?"),
        ("method=qqqq", "in the folder of --config-dir, as method/qqqq.yaml"),
        ("--config-dir=no_folder", "--config-dir: there is no folder 'no_folder'"),
        ("path.log_dir=out/lr=1e-5", f"{quoted}\"path.log_dir='out/lr=1e-5'\""),
        ("path.log_dir={x}/y", f"{quoted}\"path.log_dir='{{x}}/y'\""),
    ):
        with pytest.raises(SystemExit) as caught:
            search_path_of(monkeypatch, "modelpool=nufilt_demo", word)
        message = str(caught.value)
        assert line in message
        assert "\n" not in message
        if quoted in message:  # it is read as it was meant
            (remedy,) = shlex.split(message.partition(quoted)[2])
            assert key_value(remedy) == tuple(word.split("=", 1))


def test_every_name_of_fusionbench_and_of_the_user_is_known(my, monkeypatch):
    (my / "method" / "mine.yaml").write_text("_target_: mine\n")
    words = ["method=mine", "modelpool=clip-vit-base-patch32_TA8", "taskpool=dummy", "-cd", str(my)]
    for of_method in ("method=simple_average", "method=task_arithmetic", "method=nufilt/naive"):
        search_path_of(monkeypatch, *words, of_method)


def test_a_name_of_the_plugins_can_be_given_to_a_file_of_the_users(my):
    words = ["method=nufilt/naive", "modelpool=nufilt_demo", "taskpool=lm_eval"]
    config = compose_run(with_config_dir(my, words))
    assert {config[group]._target_ for group in GROUPS} == {"mine"}


def test_a_comparison_takes_the_users_method_of_that_name(tmp_path):
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "sum.yaml").write_text(
        "defaults: [/nufilt/order_free@_here_]\n"
        "_target_: fusion_bench_nufilt.LayerwiseMergingAlgorithm\nlayer_method: sum\nscale: 7\n"
    )
    words = with_config_dir(tmp_path, [])
    (spec,) = parse_methods("sum", words)
    assert compose_run([*words, *spec.overrides]).method.scale == 7


PLAIN_RUN = """
import sys
sys.argv = ["fusion_bench", "--cfg", "job"]
from fusion_bench.scripts.cli import _hydra_main
try:
    _hydra_main()
finally:
    modules = [name for name in sys.modules if name.startswith("fusion_bench_nufilt")]
    print(*modules, file=sys.stderr)
"""


@pytest.mark.slow
def test_a_run_that_uses_nothing_of_the_plugin_imports_and_patches_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_RUN], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    modules = set(done.stderr.splitlines()[-1].split())
    assert "fusion_bench_nufilt.utils.overrides" in modules
    homes = {name.split(".")[1] for name in modules if "." in name}
    assert homes == {"utils"}


def test_a_pool_of_the_plugins_makes_fusionbench_work_for_any_method():
    for name in NAMES:
        text = (CONFIG / f"{name}.yaml").read_text()
        assert name.startswith("method") or "- /nufilt/compat\n" in text, name
