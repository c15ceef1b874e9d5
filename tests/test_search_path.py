"""The plugin of Hydra: what it adds to FusionBench's search path, and what it costs a run that does
not use it.
"""

import shlex
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize(
    "words",
    [
        ("--config-dir", "my"),
        ("--config-dir=my",),
        ("-cd", "my"),
        ("-cd", "my", "--cfg", "job"),
        ("hydra.searchpath=[file://my]",),
        ("method=sum", "-m", "hydra.searchpath=['file://my']", "x=1,2"),
    ],
    ids=" ".join,
)
def test_a_folder_of_the_users_comes_before_the_plugins_configurations(words, monkeypatch):
    monkeypatch.setitem(sys.modules, "fusion_bench.scripts.cli", None)
    monkeypatch.setattr(sys, "argv", ["fusion_bench", *words])
    path = ConfigSearchPathImpl()
    path.append("main", "file:///fusion_bench_config")
    FusionBenchNufiltSearchPathPlugin().manipulate_search_path(path)
    folders = [element.path for element in path.get_path()]
    mine = next(folder for folder in folders if folder.endswith("my"))
    assert folders.index("file:///fusion_bench_config") < folders.index(mine)
    assert folders.index(mine) < folders.index(f"file://{CONFIG}")


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("method=nufil", "there is no method 'nufil'; did you mean 'nufilt'?"),
        ("method=nufilt/naiv", "did you mean 'nufilt/naive'?"),
        ("modelpool=nufilt_dmo", "there is no modelpool 'nufilt_dmo'; did you mean 'nufilt_demo'?"),
        ("taskpool=nufilt_dem", "there is no taskpool 'nufilt_dem'; did you mean 'nufilt_demo'?"),
        ("method=qqqq", "in the folder of --config-dir, as method/qqqq.yaml"),
        ("path.log_dir=out/lr=1e-5", "in both kinds of quotes: \"path.log_dir='out/lr=1e-5'\""),
        ("path.log_dir={x}/y", "in both kinds of quotes: \"path.log_dir='{x}/y'\""),
    ],
)
def test_a_word_that_fusion_bench_can_not_use_is_one_line_with_what_to_type(
    word, line, monkeypatch
):
    monkeypatch.setitem(sys.modules, "fusion_bench.scripts.cli", None)
    monkeypatch.setattr(sys, "argv", ["fusion_bench", "modelpool=nufilt_demo", word])
    with pytest.raises(SystemExit) as caught:
        FusionBenchNufiltSearchPathPlugin().manipulate_search_path(ConfigSearchPathImpl())
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    _, _, remedy = str(caught.value).partition("quotes: ")
    if remedy:  # it is read as it was meant
        assert key_value(shlex.split(remedy)[0]) == tuple(word.split("=", 1))


def test_every_name_of_fusionbench_and_of_the_user_is_known(my, monkeypatch):
    monkeypatch.setitem(sys.modules, "fusion_bench.scripts.cli", None)
    (my / "method" / "mine.yaml").write_text("_target_: mine\n")
    words = ["method=mine", "modelpool=clip-vit-base-patch32_TA8", "taskpool=dummy", "-cd", str(my)]
    for of_method in ("method=simple_average", "method=task_arithmetic", "method=nufilt/naive"):
        monkeypatch.setattr(sys, "argv", ["fusion_bench", *words, of_method])
        FusionBenchNufiltSearchPathPlugin().manipulate_search_path(ConfigSearchPathImpl())


@pytest.mark.parametrize("words", [("--config-dir",), ("x=[",), ("--no-such-option",), ()])
def test_words_that_hydra_refuses_name_no_folder(words, capsys):
    assert user_folders(words) == []


@pytest.mark.parametrize(
    "name", ["method/nufilt/naive", "modelpool/nufilt_demo", "taskpool/lm_eval"]
)
def test_a_name_of_the_plugins_can_be_given_to_a_file_of_the_users(my, name):
    group, _, choice = name.partition("/")
    config = compose_run(with_config_dir(my, [f"{group}={choice}"]))
    assert config[group]._target_ == "mine"


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


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("method")])
def test_a_pool_of_the_plugins_makes_fusionbench_work_for_any_method(name):
    file = Path(CONFIG) / f"{name}.yaml"
    assert "- /nufilt/compat\n" in file.read_text()
