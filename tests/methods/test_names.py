"""A layer-wise method has one name, which every entry point takes, with the same settings and the
same result.
"""

import re
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from inspect import isabstract
from pathlib import Path
from pkgutil import iter_modules

import pytest
import yaml
from fusion_bench.utils import instantiate
from safetensors.torch import load_file

from fusion_bench_nufilt import methods
from fusion_bench_nufilt.compare.configs import compose_run, plain
from fusion_bench_nufilt.compare.specs import parse_methods
from fusion_bench_nufilt.methods import METHODS, ORDER_FREE, LayerMethod
from fusion_bench_nufilt.methods.options import METHOD_TABLE, VARIANTS
from fusion_bench_nufilt.methods.order_free import OrderFree
from tests.cli.helpers import nufilt
from tests.continual.helpers import logging_to, pool, saved_pool
from tests.merge.helpers import STATE, manifest, same, tensors

CONFIG = Path(__file__).parents[2] / "config" / "method"


def merge(folder, out, *words):
    """The folder that `nufilt merge` writes."""
    models = ["--base", folder / "_pretrained_"]
    for task in ("task1", "task2"):
        models += ["--task", folder / task]
    code, text = nufilt("merge", *words, *models, "--out", folder / out)
    assert code == 0, text
    return folder / out


@pytest.mark.parametrize("name", ["nufilt/all_linear", "best"])
def test_a_name_is_the_same_merge_at_every_entry_point(name, tmp_path):
    models = saved_pool(tmp_path, pool(tasks=2))
    config = compose_run([f"method={name}", "method.shuffle_order=false"]).method
    logging_to(tmp_path / "run", instantiate(config)).run(models)
    run = tmp_path / "run" / "checkpoints" / "merged_model_1"
    out = merge(tmp_path, "out", "--method", name)
    assert same(tensors(run), tensors(out))
    if name in ORDER_FREE:
        assert same(load_file(run / STATE), load_file(out / STATE))
    (spec,) = parse_methods(name)
    composed = plain(compose_run([f"method={name}"]).method)
    assert plain(compose_run(spec.overrides).method) == composed
    settings = manifest(out)["settings"]
    assert settings["method"] == name
    shared = composed.keys() & settings.keys()
    assert {key: settings[key] for key in shared} == {key: composed[key] for key in shared}
    assert METHODS[name].defaults.keys() <= shared


def test_a_recipe_takes_the_name_too_and_an_option_wins_over_the_setting_behind_it(tmp_path):
    saved_pool(tmp_path, pool(tasks=2))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"settings": {"method": "nufilt/all_linear"}}))
    out = merge(tmp_path, "out", recipe, "--null-rank", 5, "--other-params", "pretrained")
    settings = manifest(out)["settings"]
    expected = {"null_rank": 5, "other_params": "pretrained", "target_modules": "all-linear"}
    assert {key: settings[key] for key in expected} == expected


def test_a_misspelt_name_is_answered_with_the_one_that_was_meant_or_else_with_all(tmp_path):
    (tmp_path / "recipe.yaml").write_text("method: bst\nbase: b\ntasks: [t]\nout: o\n")
    models = ("--base", "b", "--task", "t", "--out", tmp_path / "out")
    for words in (
        ("merge", "--method", "bst", *models),
        ("compare", "--methods", "bst", "--out", tmp_path / "out"),
        ("merge", tmp_path / "recipe.yaml"),
    ):
        code, text = nufilt(*words)
        assert code == 1
        assert "'bst'; did you mean 'best'?" in text
        assert "spectral" not in text
    code, text = nufilt("merge", "--method", "opcm", *models)
    assert (code, [name for name in METHODS if name not in text]) == (1, []), text


def test_every_method_of_the_package_has_a_file_and_is_in_the_table_as_its_class_says():
    """Else no entry point knew its name, and no help its options."""
    files = {str(file.relative_to(CONFIG).with_suffix("")) for file in CONFIG.rglob("*.yaml")}
    # The other files are of FusionBench's methods.
    assert {name for name in files if not name.startswith("continual/")} == {*METHODS}
    for name, entry in METHOD_TABLE.items():
        method = METHODS[name]
        assert (method.name, method.Options) == (name, entry.Options)
        assert method.defaults == entry.defaults
    in_package = set()
    for module in iter_modules(methods.__path__):
        for kind in vars(import_module(f"{methods.__name__}.{module.name}")).values():
            if isinstance(kind, type) and issubclass(kind, LayerMethod) and not isabstract(kind):
                in_package.add(kind)
    assert in_package == {METHODS[name] for name in METHOD_TABLE if name not in VARIANTS}
    subclasses = tuple(name for name in METHOD_TABLE if issubclass(METHODS[name], OrderFree))
    assert subclasses == ORDER_FREE  # which nobody who asks for it can change


def test_a_method_is_imported_without_the_others():
    code = (
        "import sys; from fusion_bench_nufilt.methods import find_method; find_method('nufilt'); "
        "print(*(name for name in sys.modules if name.startswith('fusion_bench_nufilt.methods.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = {name.rpartition(".")[2] for name in done.stdout.split()}
    assert modules == {"base", "nufilt", "options", "registry", "task_vector"}


def test_help_has_every_method_and_each_of_its_options_whose_defaults_depend_on_the_method():
    _, text = nufilt("merge", "--help")
    words = set(re.findall(r"[\w/-]+", text))
    for name, entry in METHOD_TABLE.items():
        flags = {f"--{option.name.replace('_', '-')}" for option in fields(entry.Options)}
        assert {name, *flags} <= words
    ramp = text.partition("--ramp")[2].partition("--kappa")[0]
    assert "depends on the" in ramp
