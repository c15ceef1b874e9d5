"""What would be contributed to FusionBench, without a checkout of it."""

import ast
import importlib.util
import subprocess
import sys

import pytest
import torch

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm
from tests.conftest import REPO
from tests.models import clip, finetuned, llama, t5

_spec = importlib.util.spec_from_file_location("upstream_tool", REPO / "tools" / "upstream.py")
upstream = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(upstream)

METHODS = """\
_import_structure = {
    "dop": ["ContinualDOPForCLIP"],
}
if TYPE_CHECKING:
    from .model_stock import ModelStock
    from .opcm import OPCMForCLIP
"""
NAVIGATION = "nav:\n          - OPCM: algorithms/opcm.md\n          - Model Stock: algorithms/model_stock.md\n"


def skeleton(folder):
    """What the tool needs of a checkout."""
    for path, text in {upstream.METHODS: METHODS, "mkdocs.yml": NAVIGATION, "config/README.md": ""}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


@pytest.fixture(scope="module")
def laid(tmp_path_factory):
    """A stand-in for a checkout, with the contribution in it, and the paths of its files."""
    checkout = skeleton(tmp_path_factory.mktemp("checkout"))
    return checkout, upstream.lay(checkout)


@pytest.fixture
def method(laid, monkeypatch):
    """The contributed package, imported as a part of the installed FusionBench."""
    import fusion_bench.method

    where = str(laid[0] / "fusion_bench" / "method")
    monkeypatch.setattr(fusion_bench.method, "__path__", [*fusion_bench.method.__path__, where])
    yield importlib.import_module("fusion_bench.method.nufilt")
    for name in [name for name in sys.modules if name.startswith("fusion_bench.method.nufilt")]:
        del sys.modules[name]


def test_every_file_is_python_of_the_oldest_version_that_fusionbench_takes(laid):
    checkout, paths = laid
    code = [path for path in paths if path.endswith(".py")]
    assert len(code) > 15
    for path in code:
        ast.parse((checkout / path).read_text(), path, feature_version=(3, 10))


def test_no_reference_to_the_plugin_remains(laid):
    checkout, paths = laid
    for path in paths:
        text = (checkout / path).read_text()
        for word in ("fusion_bench_nufilt", "fusion-bench-nufilt", "nufilt merge", "nufilt compare", "benchmarks/"):
            assert word not in text, f"{path}: {word}"


def test_it_stays_small(laid):
    """In lines of code, without comments, docstrings and empty lines."""
    checkout, paths = laid
    code = [path for path in paths if path.startswith(upstream.HOME) and path.endswith(".py")]
    assert sum(lines_of_code(checkout / path) for path in code) <= 1450


def lines_of_code(path):
    source = path.read_text()
    texts = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    skipped = {line for text in texts for line in range(text.lineno, text.end_lineno + 1)}
    lines = [line.strip() for number, line in enumerate(source.splitlines(), 1) if number not in skipped]
    return sum(line != "" and not line.startswith("#") for line in lines)


def test_black_and_isort_find_nothing_to_change(laid):
    checkout, paths = laid
    code = [str(checkout / path) for path in paths if path.endswith(".py") and path != upstream.METHODS]
    for formatter in (["black"], ["isort", "--profile", "black", "--project", "fusion_bench"]):
        subprocess.run([sys.executable, "-m", *formatter, "--check", "--quiet", *code], check=True)


def test_each_line_is_put_where_it_belongs_and_once(laid):
    checkout, _ = laid
    methods, navigation = (checkout / upstream.METHODS).read_text(), (checkout / "mkdocs.yml").read_text()
    assert '    "dop": ["ContinualDOPForCLIP"],\n    "nufilt": ["NUFILTMerging"],\n' in methods
    assert "import ModelStock\n    from .nufilt import NUFILTMerging\n    from .opcm" in methods
    assert "opcm.md\n          - NUFILT: algorithms/nufilt.md\n          - Model Stock" in navigation
    assert upstream.insertions(checkout) == {upstream.METHODS: methods, "mkdocs.yml": navigation}


def test_no_config_has_the_name_of_one_of_the_plugin(laid):
    """With both in one environment, each name has one meaning."""
    names = [path for path in laid[1] if path.startswith("config/")]
    assert names == ["config/method/nufilt/nufilt.yaml"]
    assert not [name for name in names if (REPO / name).exists()]


@pytest.mark.parametrize("make", [clip, t5, llama])
def test_the_bits_are_the_plugins(method, make):
    base = make()
    pool = {"_pretrained_": base, **{f"task {i}": finetuned(base, i) for i in range(3)}}
    options = {"null_rank": 8, "lora_rank": 4, "task_rank": 2, "max_steps": 5, "seed": 43}
    theirs = method.NUFILTMerging(**options).run(pool).state_dict()
    ours = NufiltContinualMergingAlgorithm(**options).run(pool).state_dict()
    assert all(torch.equal(theirs[key], value) for key, value in ours.items())
    assert not all(torch.equal(value, ours[key]) for key, value in base.state_dict().items())


def test_the_plugin_says_which_one_runs(method, caplog):
    caplog.set_level("INFO")
    base = clip()
    NufiltContinualMergingAlgorithm().run({"_pretrained_": base, "task": finetuned(base, 1)})
    assert "this is NUFILT of fusion_bench_nufilt; FusionBench's own is method=nufilt/nufilt" in caplog.text


def test_the_patch_is_what_was_laid(tmp_path):
    def git(*arguments, where):
        identity = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
        return subprocess.run(["git", *identity, *arguments], cwd=where, check=True, capture_output=True, text=True)

    checkout, clean = skeleton(tmp_path / "checkout"), tmp_path / "clean"
    git("init", "--quiet", where=checkout)
    git("add", "--all", where=checkout)
    git("commit", "--quiet", "--message", "FusionBench", where=checkout)
    git("clone", "--quiet", str(checkout), str(clean), where=tmp_path)
    git("config", "user.name", "A", where=checkout)
    git("config", "user.email", "a@b.c", where=checkout)
    paths = upstream.lay(checkout)
    (tmp_path / "nufilt.patch").write_text(upstream.format_patch(checkout, paths))
    assert len(git("log", "--oneline", where=checkout).stdout.splitlines()) == 1
    git("am", "--quiet", str(tmp_path / "nufilt.patch"), where=clean)
    for path in paths:
        assert (clean / path).read_bytes() == (checkout / path).read_bytes(), path
    assert "MIT" in git("log", "-1", where=clean).stdout


def test_a_folder_that_is_no_fusionbench_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no FusionBench checkout"):
        upstream.lay(tmp_path)
    skeleton(tmp_path)
    (tmp_path / "mkdocs.yml").write_text("nav: []\n")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"mkdocs\.yml has no line with '- OPCM"):
        upstream.lay(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_import_from_a_package_is_named():
    with pytest.raises(ValueError, match=r"layers/x\.py, line 1: import FusionConfig from its module"):
        list(upstream.modules("layers/x.py", "from fusion_bench_nufilt.core import FusionConfig\n"))
    source = "from .views import View\nfrom fusion_bench_nufilt.core import options\nimport torch\n"
    assert list(upstream.modules("layers/x.py", source)) == ["layers/views.py", "core/options.py"]
