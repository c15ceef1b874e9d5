"""The tables of options and the names of the API are the code's; `make docs` builds the rest
strictly.
"""

import dataclasses
import importlib
import importlib.util
import re

import pytest

import fusion_bench_nufilt
from tests.conftest import REPO

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
    fields = [field for kind in hooks.TABLES.values() for field in dataclasses.fields(kind)]
    assert {field.name for field in fields} == rows.keys()
    assert rows["null_rank"].startswith("| `null_rank`, r_p | `128` | Number of directions")
    assert "`adam` \\| `closed_form`, default `adam`" in rows["solver"]
    assert "| `null` |" in rows["max_memory"]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 4 for row in rows.values())


def test_the_names_on_the_page_of_the_api_can_be_imported():
    table, _, _ = (REPO / "docs" / "api.md").read_text().partition("\n## ")
    names = re.findall(r"`([\w.]+)`", "".join(re.findall(r"^\| (`.*?) \|", table, flags=re.M)))
    assert set(fusion_bench_nufilt.__all__) <= set(names)
    for name in names:
        module, _, attribute = f"fusion_bench_nufilt.{name}".rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
    assert fusion_bench_nufilt.__version__


def test_formulas_need_no_script(hooks):
    html = hooks.on_page_content(
        r'<span class="arithmatex">\(\tau &lt; 1\)</span> :math:<code>A_1</code>'
    )
    assert html.count("<math") == 2
    assert "arithmatex" not in html
    assert (
        hooks.on_page_content("see :func:<code>select_layers</code>")
        == "see <code>select_layers</code>"
    )


def test_options_in_a_sentence_do_not_break_at_their_hyphens(hooks):
    html = hooks.on_page_content(
        "<code>nufilt merge --dry-run</code> <pre><code>a --b\n<i>-c</i></code></pre>"
    )
    assert html.startswith('<code>nufilt merge <span class="whole">--dry-run</span></code>')
    assert html.count("whole") == 1
