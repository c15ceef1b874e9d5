"""The tables of options and the names of the API are the code's, and the blocks of code run as they
stand; `make docs` builds the rest strictly.
"""

import dataclasses
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
import torch
from safetensors.torch import load_file
from typer.main import get_command

import fusion_bench_nufilt
from fusion_bench_nufilt import LayerwiseMergingAlgorithm
from fusion_bench_nufilt.cli.app import app
from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.merge import merge_folders, plan_merge
from fusion_bench_nufilt.methods import METHODS
from fusion_bench_nufilt.methods.options import TargetConfig
from tests.conftest import REPO
from tests.docs import (
    PAGES,
    blocks_of,
    names,
    save_clips_and_images,
    save_models,
    write_files,
)
from tests.tiny_models import clip, finetuned
from tests.warm import run_command

pytest.importorskip("latex2mathml")


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("hooks", REPO / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_option_is_on_the_page_with_its_default_and_its_help(hooks):
    page = hooks.PAGE.read_text()
    assert page == hooks.on_page_markdown(page), "run `python docs/hooks.py`"
    rows = {
        line.split("|")[1].split("`")[1]: line
        for line in page.splitlines()
        if line.startswith("| `")
    }
    options = set()
    for kind in hooks.TABLES.values():
        options |= {field.name for field in dataclasses.fields(kind)}
    assert options == rows.keys()
    assert rows["null_rank"].startswith("| `null_rank`, r_p | `128` | Number of directions")
    assert "`adam` \\| `closed_form`, default `adam`" in rows["solver"]
    assert "| `null` |" in rows["max_memory"]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 4 for row in rows.values())


def test_the_names_on_the_page_of_the_api_can_be_imported(hooks):
    names = hooks.api_names((REPO / "docs" / "api.md").read_text())
    assert set(fusion_bench_nufilt.__all__) <= set(names)
    for name in names:
        module, _, attribute = f"fusion_bench_nufilt.{name}".rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
    assert fusion_bench_nufilt.__version__


def test_readme_names_the_versions_that_are_declared():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    readme = " ".join((REPO / "README.md").read_text().split())
    declared = dict(
        re.findall(r"(torch|transformers)>=([\d.]+)", " ".join(project["dependencies"]))
    )
    assert f"torch from {declared['torch']}, " in readme
    page = (REPO / "docs" / "fusionbench.md").read_text()
    # Of transformers 5, the first that is not excluded.
    excluded = re.findall(r"!=5\.(\d+)\.\*", " ".join(project["dependencies"]))
    assert [int(minor) for minor in excluded] == list(range(len(excluded)))
    versions = f"transformers 4.57 (from {declared['transformers']}) or 5 (from 5.{len(excluded)})"
    assert versions in readme
    assert versions in page


def test_what_examples_and_pages_import_is_on_the_page_of_the_api():
    page = (REPO / "docs" / "api.md").read_text()
    sources = [path.read_text() for path in sorted((REPO / "examples").rglob("*.py"))]
    sources += [path.read_text() for path in sorted((REPO / "docs").glob("*.md"))]
    sources.append((REPO / "README.md").read_text())
    pattern = r"^from fusion_bench_nufilt[\w.]* import (.*)$"
    for imported in re.findall(pattern, "\n".join(sources), re.MULTILINE):
        for name in imported.split(", "):
            assert f"{name}`" in page, name


def test_the_first_page_is_the_readme_with_links_from_the_folder_of_the_pages(hooks):
    page = hooks.on_page_markdown((REPO / "docs" / "index.md").read_text())
    assert page.startswith("# fusion-bench-nufilt")
    for path in re.findall(r"\]\((?!\w+:|#)([^)#]+)", page):
        assert (REPO / "docs" / path).is_file(), path


def test_formulas_need_no_script_and_options_do_not_break_at_their_hyphens(hooks):
    formula = r'<span class="arithmatex">\(\tau &lt; 1\)</span> :math:<code>A_1</code>'
    html = hooks.on_page_content(formula)
    assert html.count("<math") == 2
    assert "arithmatex" not in html
    html = hooks.on_page_content("see :func:<code>select_layers</code>")
    assert html == "see <code>select_layers</code>"
    html = hooks.on_page_content(
        "<code>nufilt merge --dry-run</code> <pre><code>a --b\n<i>-c</i></code></pre>"
    )
    assert html.startswith('<code>nufilt merge <span class="whole">--dry-run</span></code>')
    assert html.count("whole") == 1


# --- the blocks ---

OWN_METHOD = REPO / "docs" / "your_method.md"

BLOCKS = []
for _page in PAGES:
    BLOCKS += blocks_of(_page)
SHELL = ("sh", "console")


def test_every_block_says_its_language_and_a_mark_its_reason():
    for page in PAGES:
        text = page.read_text()
        assert len(blocks_of(page)) == len(re.findall("^ *```", text, flags=re.M)) // 2, page
        marks = [block for block in blocks_of(page) if block.mark]
        assert len(marks) == len(re.findall("^<!-- (?:not run|hub)", text, flags=re.M)), page
    languages = {block.language for block in BLOCKS}
    assert languages <= {*SHELL, "python", "yaml", "toml", "bibtex"}
    assert all(len(block.reason.split()) > 0 for block in BLOCKS if block.mark)


def test_the_command_line_knows_every_command_and_option_of_the_pages():
    command = get_command(app)
    for block in BLOCKS:
        if block.language in SHELL:
            for words in block.words("nufilt"):
                with command.make_context("nufilt", list(words)) as context:
                    name, function, rest = command.resolve_command(context, words)
                    function.make_context(name, rest)


def test_hydra_composes_every_marked_run_of_the_pages(tmp_path):
    for page in PAGES:
        write_files(tmp_path, page)
    for block in BLOCKS:
        if block.mark:
            for words in block.words("fusion_bench"):
                overrides = list(words)
                if "--config-dir" in words:
                    index = words.index("--config-dir")
                    folder = tmp_path / words[index + 1]
                    overrides[index : index + 2] = [f"hydra.searchpath=[file://{folder}]"]
                compose_run(overrides)


def test_the_layerwise_method_on_the_page_merges_as_sum_does(monkeypatch):
    example, of_adapters = [
        block.text for block in blocks_of(OWN_METHOD) if block.language == "python"
    ]
    namespace = {}
    exec(example, namespace)
    monkeypatch.setitem(METHODS, "running_sum", namespace["RunningSum"])
    exec(of_adapters, namespace)
    for name in ("sides_in_basis", "state_axes"):
        assert namespace[name] == getattr(METHODS["sum"], name)
    base = clip()
    models = {"_pretrained_": base, "one": finetuned(base, 1), "two": finetuned(base, 2)}
    merged = LayerwiseMergingAlgorithm("running_sum", other_params="mean").run(models)
    expected = LayerwiseMergingAlgorithm("sum", other_params="mean").run(models)
    torch.testing.assert_close(merged.state_dict(), expected.state_dict())


@pytest.fixture
def own_method(tmp_path):
    """The package of the page, installed by pip; and a folder with its files and with models."""
    package = tmp_path / "package"
    package.mkdir()
    for block in blocks_of(OWN_METHOD):
        if block.text.startswith(("# running_sum.py", "# pyproject.toml")):
            name, _, content = block.text.removeprefix("# ").partition("\n")
            (package / name).write_text(content)
    write_files(tmp_path, OWN_METHOD)
    save_models(tmp_path)
    site = tmp_path / "site"
    # Without the network: setuptools is installed.
    offline = ["--no-index", "--no-build-isolation", "--no-deps", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *offline, "--target", str(site), "."]
    subprocess.run(command, cwd=package, check=True, capture_output=True)
    return site


def run_with(site, *words, code=0):
    """Run a command in an environment that has a package in a folder; return what it says."""
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{REPO}"}
    if words[0] == "nufilt":
        words = ("-c", "from fusion_bench_nufilt.cli.app import app; app()", *words[1:])
    done = subprocess.run(
        [sys.executable, *words], env=environment, cwd=site.parent, capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-2000:]
    return " ".join(done.stderr.split())


MERGE = ("nufilt", "merge", "--base", "base", "--task", "math", "--task", "code", "--out")


@pytest.mark.slow
def test_the_method_of_ones_own_on_the_page_merges_folders_runs_and_is_compared(own_method, demo):
    run_with(own_method, *MERGE, "own", "--method", "running_sum", "scale=0.3")
    folder = own_method.parent
    targets = TargetConfig(target_modules="all-linear", other_params="mean")
    tasks = [str(folder / "math"), str(folder / "code")]
    planned = plan_merge(str(folder / "base"), tasks, targets=targets, method="sum")
    merge_folders(planned, folder / "sum")
    own = load_file(folder / "own" / "model.safetensors")
    torch.testing.assert_close(own, load_file(folder / "sum" / "model.safetensors"))
    words = ["--config-dir", "config", "modelpool=nufilt_demo"]
    run_with(own_method, "-m", "fusion_bench", *words, "method=running_sum", "path.log_dir=run")
    methods = ["--methods", "running_sum,sum,best", "--evaluate", "last"]
    run_with(own_method, "nufilt", "compare", "--config-dir", "config", *methods, "--out", "both")


@pytest.mark.slow
def test_a_method_of_ones_own_that_can_not_be_used_is_told(own_method):
    """One that can't be imported stops no other, and one whose name is taken is an error."""
    module = own_method / "running_sum.py"
    text = module.read_text()
    module.write_text(f"import of_a_package_that_is_gone\n{text}")
    warning = "'running_sum' of the package 'running-sum' is left out: it can't be imported"
    assert warning in run_with(own_method, *MERGE, "nufilt")
    refusal = run_with(own_method, *MERGE, "own", "--method", "running_sum", code=1)
    assert "there is no layer-wise method 'running_sum'" in refusal
    (about,) = own_method.glob("*.dist-info")
    module.write_text(text.replace('name = "running_sum"', 'name = "sum"'))
    points = about / "entry_points.txt"
    points.write_text(points.read_text().replace("running_sum =", "sum ="))
    taken = "'sum' of the package 'running-sum' has the name of another method"
    assert taken in run_with(own_method, *MERGE, "own", code=1)


@pytest.fixture
def folder(tmp_path, demo, monkeypatch):
    """A working folder with the models, images and tasks that the pages name."""
    folder = tmp_path / "work"
    folder.mkdir()
    save_models(folder)
    save_clips_and_images(folder, demo)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(folder)
    return folder


def is_run(block):
    return not block.mark and block.language in (*SHELL, "python")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(map(is_run, blocks_of(page)))],
    ids=lambda page: page.stem,
)
def test_the_blocks_of_a_page_run_one_after_another(page, folder):
    write_files(folder, page)
    namespace = names()
    for block in filter(is_run, blocks_of(page)):
        if block.language == "python":
            exec(compile(block.text, page.name, "exec"), namespace)
        else:
            for words in block.command_lines():
                code, output = run_command(words)
                assert code == 0, shlex.join(words) + output[-3000:]
