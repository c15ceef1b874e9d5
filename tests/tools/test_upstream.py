"""What would be contributed to FusionBench, without a checkout of it."""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusion_bench_nufilt import FusionConfig, NufiltContinualMergingAlgorithm, fuse_layers
from tests.conftest import REPO
from tests.tiny_models import clip, finetuned, full_clip, llama, t5

_spec = importlib.util.spec_from_file_location("upstream_tool", REPO / "tools" / "upstream.py")
upstream = importlib.util.module_from_spec(_spec)
sys.modules["upstream_tool"] = upstream
_spec.loader.exec_module(upstream)

#: Patches that continue another one, by their numbers.
NEEDED = {"0008": "0004"}
#: What both can merge, with an option each: the contribution takes linear layers alone.
TARGETS = [
    (clip, "auto", {}),
    (full_clip, "auto", {"null_space": False}),
    (t5, "auto", {"null_space": "zero"}),
    (llama, "all-linear", {"first_task": "release"}),
    (llama, ["q_proj", "down_proj"], {}),
]
SMALL = {"null_rank": 8, "lora_rank": 4, "task_rank": 2, "max_steps": 5}
METHODS = """\
_import_structure = {
    "dop": ["ContinualDOPForCLIP"],
}
if TYPE_CHECKING:
    from .model_stock import ModelStock
    from .opcm import OPCMForCLIP
"""
NAVIGATION = (
    "nav:\n          - OPCM: algorithms/opcm.md\n          - Model Stock: "
    "algorithms/model_stock.md\n"
)
API = "        members:\n        - ContinualDOPForCLIP\n"


def skeleton(folder):
    """What the tool needs of a checkout."""
    files = {
        upstream.METHODS: METHODS,
        "mkdocs.yml": NAVIGATION,
        upstream.API: API,
        "config/README.md": "",
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


@pytest.fixture(scope="module")
def laid(tmp_path_factory):
    """A stand-in for a checkout with the contribution in it, and the paths of its files."""
    checkout = skeleton(tmp_path_factory.mktemp("checkout"))
    return checkout, upstream.lay(checkout)


@pytest.fixture
def method(laid, monkeypatch):
    """FusionBench's methods with the contributed packages among them."""
    import fusion_bench.method

    checkout, _ = laid
    path = [*fusion_bench.method.__path__, str(checkout / "fusion_bench" / "method")]
    monkeypatch.setattr(fusion_bench.method, "__path__", path)
    yield lambda name: importlib.import_module(f"fusion_bench.method.{name}")
    for name in list(sys.modules):
        if name.startswith("fusion_bench.method.nufilt"):
            del sys.modules[name]


def is_formatted(files, folder):
    for formatter in (["black"], ["isort", "--profile", "black", "--project", "fusion_bench"]):
        command = [sys.executable, "-m", *formatter, "--check", "--quiet", *map(str, files)]
        subprocess.run(command, cwd=folder, check=True)


def test_it_is_python_of_the_oldest_version_and_of_the_style_of_fusionbench(laid):
    checkout, paths = laid
    code = [checkout / path for path in paths if path.endswith(".py") and path != upstream.METHODS]
    for path in code:
        ast.parse(path.read_text(), str(path), feature_version=(3, 10))
        assert max(len(line) for line in path.read_text().splitlines()) <= 88, path.name
    is_formatted(code, checkout)


def test_it_can_be_read_in_an_hour_and_without_the_plugin(laid):
    checkout, paths = laid
    references = ["fusion_bench_nufilt", "fusion-bench-nufilt", "benchmarks/"]
    references += ["nufilt merge", "nufilt compare"]
    for path in paths:
        text = (checkout / path).read_text()
        assert [reference for reference in references if reference in text] == [], path
    for copy, source in upstream.CONTRIBUTIONS["nufilt"].copies.items():
        assert (checkout / copy).read_bytes() == source.read_bytes()
    # With both in one environment, each name has one meaning.
    (config,) = [path for path in paths if path.startswith("config/")]
    assert not (REPO / config).exists()
    count = sum(len((checkout / path).read_text().splitlines()) for path in paths)
    # What was there already is not of the contribution.
    count -= sum(len(text.splitlines()) for text in (METHODS, NAVIGATION, API))
    assert count <= 1550


def test_each_line_is_put_where_it_belongs_and_once(laid):
    checkout, _ = laid
    methods = (checkout / upstream.METHODS).read_text()
    ours = '    "nufilt": ["NUFILTMerging"],\n'
    assert f'    "dop": ["ContinualDOPForCLIP"],\n{ours}' in methods
    assert "import ModelStock\n    from .nufilt import NUFILTMerging\n    from .opcm" in methods
    ast.parse(methods)
    navigation = (checkout / "mkdocs.yml").read_text()
    assert "opcm.md\n          - NUFILT: algorithms/nufilt.md\n          - Model" in navigation
    assert "        - NUFILTMerging\n" in (checkout / upstream.API).read_text()
    assert upstream.insertions(checkout, "nufilt")[upstream.METHODS] == methods


@pytest.mark.parametrize(("make", "target", "options"), TARGETS)
def test_the_bits_are_the_plugins(method, make, target, options):
    """And so the layers, since each draw of A depends on the name of its layer."""
    base = make()
    pool = {"_pretrained_": base, **{f"task {i}": finetuned(base, i) for i in range(3)}}
    options = {**SMALL, **options, "seed": 43, "target_modules": target}
    theirs = method("nufilt").NUFILTMerging(**options).run(pool).state_dict()
    ours = NufiltContinualMergingAlgorithm(**options).run(pool).state_dict()
    assert all(torch.equal(theirs[key], value) for key, value in ours.items())
    assert not all(torch.equal(value, ours[key]) for key, value in base.state_dict().items())


def rounded_layers(generator):
    """A base in bfloat16 with adapters merged into it, whose rounding is no direction."""
    factors = torch.randn(4, 64, 4, generator=generator) * 0.1
    pretrained = (torch.randn(64, 64, generator=generator) * 0.04).bfloat16()
    adapted = [
        (pretrained.float() + left @ right.mT).bfloat16()
        for left, right in (factors[:2], factors[2:])
    ]
    return [pretrained, *adapted]


def steep_layers(generator):
    """A spectrum that falls too steeply for float32 is decomposed in float64."""
    values = 10.0 ** -torch.arange(8, dtype=torch.float64)
    U = torch.linalg.qr(torch.randn(40, 8, generator=generator, dtype=torch.float64)).Q
    V = torch.linalg.qr(torch.randn(30, 8, generator=generator, dtype=torch.float64)).Q
    merged = (U * values @ V.T).float()
    return [torch.zeros_like(merged), merged, merged.flip(0)]


@pytest.mark.parametrize(
    ("layers_of", "protected_rank"), [(rounded_layers, 4), (steep_layers, None)]
)
def test_a_step_with_rounding_or_in_float64_has_the_plugins_bits(method, layers_of, protected_rank):
    layers = layers_of(torch.Generator().manual_seed(0))
    config = {**SMALL, "null_rank": 32}
    ours = [{"layer": weight} for weight in layers]
    expected, reports = fuse_layers(*ours, FusionConfig(**config), step=2)
    theirs = method("nufilt")
    weight, measures = theirs.fuse_layer("layer", *layers, theirs.StepConfig(**config), step=2)
    assert torch.equal(weight, expected["layer"])
    assert protected_rank in (None, measures["protected_rank"])
    del measures["solving_seconds"]
    measured = {name: getattr(reports["layer"], name) for name in measures}
    assert measures == pytest.approx(measured, rel=1e-5, abs=1e-6)


def test_the_plugin_says_which_one_runs(method, caplog):
    caplog.set_level("INFO")
    base = clip()
    NufiltContinualMergingAlgorithm().run({"_pretrained_": base, "task": finetuned(base, 1)})
    assert (
        "this is NUFILT of fusion_bench_nufilt; FusionBench's own is method=nufilt/nufilt"
        in caplog.text
    )


def git(*arguments, cwd):
    identity = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=cwd, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize("what", upstream.CONTRIBUTIONS)
def test_the_patch_is_what_was_laid_by_the_author_that_is_named(tmp_path, what):
    checkout = skeleton(tmp_path / "checkout")
    clean = tmp_path / "clean"
    git("init", "--quiet", cwd=checkout)
    git("add", "--all", cwd=checkout)
    git("commit", "--quiet", "--message", "FusionBench", cwd=checkout)
    git("clone", "--quiet", str(checkout), str(clean), cwd=tmp_path)
    paths = upstream.lay(checkout, what)
    patch = upstream.format_patch(checkout, paths, what, "Ada L <ada@x.org>")
    (tmp_path / "patch").write_text(patch)
    assert len(git("log", "--oneline", cwd=checkout).splitlines()) == 1
    git("am", "--quiet", str(tmp_path / "patch"), cwd=clean)
    for path in paths:
        assert (clean / path).read_bytes() == (checkout / path).read_bytes(), path
    assert "Author: Ada L <ada@x.org>" in git("log", "-1", cwd=clean)
    assert "MIT" in git("log", "-1", cwd=clean)


def test_a_folder_that_is_no_fusionbench_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no FusionBench checkout"):
        upstream.lay(tmp_path)
    skeleton(tmp_path)
    (tmp_path / "mkdocs.yml").write_text("nav: []\n")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"mkdocs\.yml has no line with '- OPCM"):
        upstream.lay(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def package(tmp_path):
    """A repository with those files of the installed FusionBench that the patches change."""
    import fusion_bench

    (source,) = map(Path, fusion_bench.__path__)
    for patch in upstream.PATCHES:
        for path in re.findall("^--- a/(?!tests/)(.*)$", patch.read_text(), re.MULTILINE):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            installed = source.parent / re.sub("^config/", "fusion_bench_config/", path)
            shutil.copy(installed, tmp_path / path)
    git("init", "--quiet", cwd=tmp_path)
    git("add", "--all", cwd=tmp_path)
    git("commit", "--quiet", "--message", "FusionBench", cwd=tmp_path)
    return tmp_path


def test_each_patch_applies_alone_or_after_the_one_that_it_needs(package):
    by_number = {patch.name[:4]: patch for patch in upstream.PATCHES}
    for number, patch in by_number.items():
        patches = [by_number[NEEDED[number]]] if number in NEEDED else []
        patches.append(patch)
        for file in patches:
            git("apply", str(file), cwd=package)
        for file in reversed(patches):
            git("apply", "--reverse", str(file), cwd=package)
        assert git("status", "--porcelain", cwd=package) == ""


def test_all_patches_apply_together_are_formatted_as_fusionbench_is_and_by_the_author_named(
    package, monkeypatch, capsys
):
    assert upstream.mend(package) == [patch.name for patch in upstream.PATCHES]
    git("add", "--all", cwd=package)
    changed = git("diff", "--cached", "--name-only", cwd=package).splitlines()
    is_formatted([path for path in changed if path.endswith(".py")], package)
    git("reset", "--quiet", "--hard", cwd=package)
    patches = [patch.read_text() for patch in upstream.PATCHES]
    assert upstream.fixes(upstream.AUTHOR) == "".join(patches)
    (package / "fixes").write_text(upstream.fixes("Ada L <ada@x.org>"))
    git("am", "--quiet", "fixes", cwd=package)
    log = git("log", "--format=%an <%ae>", f"-{len(upstream.PATCHES)}", cwd=package)
    assert set(log.splitlines()) == {"Ada L <ada@x.org>"}
    monkeypatch.setattr(sys, "argv", ["upstream.py", str(package), "--author", "Ada"])
    with pytest.raises(SystemExit):
        upstream.main()
    assert "--author must be 'NAME <MAIL>', got 'Ada'" in capsys.readouterr().err
