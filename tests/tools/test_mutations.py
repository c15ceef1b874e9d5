"""The list of mutations is of today's code: each changes one place of its file."""

import tomllib
from collections import Counter

from tests.conftest import REPO

MUTATIONS = tomllib.loads((REPO / "tools" / "mutations.toml").read_text())["mutation"]


def test_what_a_mutation_changes_stands_once_in_its_file():
    for mutation in MUTATIONS:
        text = (REPO / "fusion_bench_nufilt" / mutation["file"]).read_text()
        assert text.count(mutation["old"]) == 1, mutation["law"]
        assert mutation["new"] != mutation["old"], mutation["law"]
        for test in mutation["tests"]:
            assert (REPO / test).exists(), mutation["law"]


def test_there_are_at_least_sixty_over_all_packages():
    packages = Counter(mutation["file"].partition("/")[0] for mutation in MUTATIONS)
    assert packages.total() >= 60
    assert {"nufilt", "methods", "models", "merge", "continual", "compare"} <= packages.keys()
    assert {"pages", "analysis", "cli", "utils"} <= packages.keys()
