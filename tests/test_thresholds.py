"""The table of thresholds on the page for developers has those of the package."""

import ast
import importlib
import re
from pathlib import Path

import fusion_bench_nufilt
from tests.conftest import REPO

PACKAGE = Path(fusion_bench_nufilt.__file__).parent
ROW = re.compile(r"^\| `([a-z_.]+)\.(_?[A-Z_]+)` \| ([^|]+) \|", re.MULTILINE)
NO_THRESHOLDS = {"SLOPE", "ROUNDING_VARIANCE", "_TINY", "_POWER_BELOW", "_POSITIVE"}


def value_of(module, name):
    return getattr(importlib.import_module(f"fusion_bench_nufilt.{module}"), name)


def documented():
    """The values of thresholds as the page has them, by module and name."""
    page = (REPO / "docs" / "develop.md").read_text(encoding="utf-8")
    return {(module, name): value for module, name, value in ROW.findall(page)}


def fractions():
    """Module and name of each constant that is a fraction, or several."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            for target in targets:
                name = getattr(target, "id", "")
                if re.fullmatch("_?[A-Z_]+", name) and has_fractions(value_of(module, name)):
                    yield module, name


def has_fractions(value):
    numbers = value if isinstance(value, tuple) else [value]
    return any(isinstance(number, float) for number in numbers)


def test_the_page_has_the_value_of_each_threshold():
    for (module, name), text in documented().items():
        value = value_of(module, name)
        numbers = value if isinstance(value, tuple) else [value]
        assert text == ", ".join(f"{number:.3g}" for number in numbers), name


def test_no_threshold_is_missing_on_the_page():
    missing = set(fractions()) - set(documented())
    assert {name for _, name in missing} == NO_THRESHOLDS
