"""What would be contributed to FusionBench, without a checkout of it."""

import ast
import importlib.util
import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusion_bench_nufilt import FusionConfig, NufiltContinualMergingAlgorithm, fuse_layers
from fusion_bench_nufilt.models import select_layers
from tests.conftest import REPO
from tests.families import FAMILIES
from tests.tiny_models import clip, finetuned, full_clip, llama, t5

_spec = importlib.util.spec_from_file_location("upstream_tool", REPO / "tools" / "upstream.py")
upstream = importlib.util.module_from_spec(_spec)
sys.modules["upstream_tool"] = upstream
_spec.loader.exec_module(upstream)

MODELS = {**FAMILIES, "clip": clip, "full_clip": full_clip, "t5": t5, "llama": llama}
#: Patches that continue another one, by their numbers.
NEEDED = {"0008": "0004"}
#: What both can merge: the contribution takes linear layers alone.
TARGETS = [
    ("clip", "auto"),
    ("full_clip", "auto"),
    ("t5", "auto"),
    ("llama", "all-linear"),
    ("llama", ["q_proj", "down_proj"]),
    ("t5", "all-linear"),
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


def code(checkout, paths):
    return [checkout / path for path in paths if path.endswith(".py") and path != upstream.METHODS]


def test_every_file_is_python_of_the_oldest_version_that_fusionbench_takes(laid):
    for path in code(*laid):
        ast.parse(path.read_text(), str(path), feature_version=(3, 10))


def test_no_reference_to_the_plugin_remains(laid):
    checkout, paths = laid
    references = ["fusion_bench_nufilt", "fusion-bench-nufilt", "benchmarks/"]
    references += ["nufilt merge", "nufilt compare"]
    for path in paths:
        text = (checkout / path).read_text()
        for reference in references:
            assert reference not in text, f"{path}: {reference}"


def test_no_mathematics_is_written_twice(laid):
    checkout, _ = laid
    for copy, source in upstream.CONTRIBUTIONS["nufilt"].copies.items():
        assert (checkout / copy).read_bytes() == source.read_bytes()


def test_it_can_be_read_in_an_hour(laid):
    checkout, paths = laid
    count = sum(len((checkout / path).read_text().splitlines()) for path in paths)
    # What was there already is not of the contribution.
    count -= sum(len(text.splitlines()) for text in (METHODS, NAVIGATION, API))
    assert count <= 1550


def test_no_line_of_code_is_longer_than_fusionbenchs(laid):
    for path in code(*laid):
        for line in path.read_text().splitlines():
            assert len(line) <= 88, f"{path.name}: {line}"


def is_formatted(files, folder):
    for formatter in (["black"], ["isort", "--profile", "black", "--project", "fusion_bench"]):
        command = [sys.executable, "-m", *formatter, "--check", "--quiet", *map(str, files)]
        subprocess.run(command, cwd=folder, check=True)


def test_black_and_isort_find_nothing_to_change(laid):
    is_formatted(code(*laid), laid[0])


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


def test_no_config_has_the_name_of_one_of_the_plugin(laid):
    """With both in one environment, each name has one meaning."""
    _, paths = laid
    (name,) = [path for path in paths if path.startswith("config/")]
    assert not (REPO / name).exists()


@pytest.mark.parametrize(("name", "target"), TARGETS)
def test_the_layers_are_the_plugins(method, name, target):
    model = MODELS[name]()
    layers = method("nufilt").select_layers(model, target)
    views = select_layers(model, target)
    names = [layer.removeprefix("vision_model.") for layer in layers]
    assert names == list(views)
    for layer, view in zip(layers.values(), views.values(), strict=True):
        assert torch.equal(layer.weight, view.read(model))


@pytest.mark.parametrize(("name", "target"), TARGETS)
def test_the_bits_are_the_plugins(method, name, target):
    base = MODELS[name]()
    pool = {"_pretrained_": base, **{f"task {i}": finetuned(base, i) for i in range(3)}}
    options = {**SMALL, "seed": 43, "target_modules": target}
    theirs = method("nufilt").NUFILTMerging(**options).run(pool).state_dict()
    ours = NufiltContinualMergingAlgorithm(**options).run(pool).state_dict()
    assert all(torch.equal(theirs[key], value) for key, value in ours.items())
    assert not all(torch.equal(value, ours[key]) for key, value in base.state_dict().items())


@pytest.fixture
def one_thread():
    """Let a product have the bits that it has in a layer that one thread computes alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"null_space": False},
        {"null_space": "zero"},
        {"first_task": "release"},
    ],
)
def test_each_step_has_the_plugins_bits(method, options):
    theirs = method("nufilt.fusion")
    our_config = FusionConfig(**SMALL, **options)
    their_config = theirs.StepConfig(**SMALL, **options)
    generator = torch.Generator().manual_seed(0)
    shapes = [(24, 16), (16, 16), (12, 40)]
    if not options:
        shapes.append((300, 264))
    for shape, dtype in itertools.product(shapes, (torch.float32, torch.float64, torch.bfloat16)):
        theta_0 = torch.randn(shape, generator=generator, dtype=torch.float64)
        pretrained = theta_0.to(dtype)
        ours = pretrained
        merged = pretrained
        for step in (1, 2, 3):
            tau = 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)
            task = (theta_0 + tau).to(dtype)
            layers = [{"layer": weight} for weight in (pretrained, ours, task)]
            weights, reports = fuse_layers(*layers, our_config, step=step)
            ours = weights["layer"]
            merged, measures = theirs.fuse_layer(
                "layer", pretrained, merged, task, their_config, step=step
            )
            assert torch.equal(ours, merged)
        del measures["solving_seconds"]
        expected = {name: getattr(reports["layer"], name) for name in measures}
        assert measures == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_step_in_bfloat16_protects_no_rounding_as_the_plugins(method):
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(4, 64, 4, generator=generator) * 0.1
    pretrained = (torch.randn(64, 64, generator=generator) * 0.04).bfloat16()
    merged, task = [
        (pretrained.float() + left @ right.mT).bfloat16()
        for left, right in (factors[:2], factors[2:])
    ]
    config = {**SMALL, "null_rank": 32}
    expected, _ = fuse_layers(
        {"layer": pretrained}, {"layer": merged}, {"layer": task}, FusionConfig(**config), step=2
    )
    theirs = method("nufilt")
    theirs_config = theirs.StepConfig(**config)
    weight, measures = theirs.fuse_layer("layer", pretrained, merged, task, theirs_config, step=2)
    assert torch.equal(weight, expected["layer"])
    assert measures["protected_rank"] == 4


def test_a_step_in_float64_has_the_plugins_bits(method):
    """A spectrum that falls too steeply for float32 is decomposed in float64."""
    generator = torch.Generator().manual_seed(0)
    values = 10.0 ** -torch.arange(8, dtype=torch.float64)
    U = torch.linalg.qr(torch.randn(40, 8, generator=generator, dtype=torch.float64)).Q
    V = torch.linalg.qr(torch.randn(30, 8, generator=generator, dtype=torch.float64)).Q
    merged = (U * values @ V.T).float()
    task = merged.flip(0)
    pretrained = torch.zeros_like(merged)
    expected, _ = fuse_layers(
        {"layer": pretrained}, {"layer": merged}, {"layer": task}, FusionConfig(**SMALL), step=2
    )
    theirs = method("nufilt")
    config = theirs.StepConfig(**SMALL)
    weight, _ = theirs.fuse_layer("layer", pretrained, merged, task, config, step=2)
    assert torch.equal(weight, expected["layer"])


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


def test_all_patches_apply_together_and_are_formatted_as_fusionbench_is(package):
    assert upstream.mend(package) == [patch.name for patch in upstream.PATCHES]
    git("add", "--all", cwd=package)
    changed = git("diff", "--cached", "--name-only", cwd=package).splitlines()
    is_formatted([path for path in changed if path.endswith(".py")], package)


def test_patches_are_by_the_author_that_is_named(package):
    patches = [patch.read_text() for patch in upstream.PATCHES]
    assert upstream.fixes(upstream.AUTHOR) == "".join(patches)
    (package / "fixes").write_text(upstream.fixes("Ada L <ada@x.org>"))
    git("am", "--quiet", "fixes", cwd=package)
    log = git("log", "--format=%an <%ae>", f"-{len(upstream.PATCHES)}", cwd=package)
    assert set(log.splitlines()) == {"Ada L <ada@x.org>"}


def test_an_author_without_an_address_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["upstream.py", str(tmp_path), "--author", "Ada"])
    with pytest.raises(SystemExit):
        upstream.main()
    assert "--author must be 'NAME <MAIL>', got 'Ada'" in capsys.readouterr().err
