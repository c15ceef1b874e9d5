"""Names of data sets without an owner, which today's client of the hub refuses."""

import ast
import logging
import subprocess
import sys
from pathlib import Path

import datasets
import fusion_bench.constants
import pytest
import torch
import transformers
import yaml
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

from fusion_bench_nufilt.continual.compat import OWNERS
from tests.tiny_models import full_clip

FUSIONBENCH = Path(fusion_bench.constants.PROJECT_ROOT_PATH)
MISSPELLED = {"squard_v2"}  # a default of FusionBench that never was the name of a data set
PATHS = ("path", "data_path", "dataset_name")


def names_in_configs():
    def walk(config):
        if isinstance(config, dict):
            if config.get("_target_") == "datasets.load_dataset":
                yield config.get("path") or config["_args_"][0]
            config = config.values()
        if not isinstance(config, str):
            for value in config or ():
                if not isinstance(value, str | int | float | None):
                    yield from walk(value)

    for file in (FUSIONBENCH / "fusion_bench_config").rglob("*.yaml"):
        yield from walk(yaml.safe_load(file.read_text()) or {})


def names_in_modules():
    """Yield the first argument of each `load_dataset("…")`, and each default of a parameter that
    names a data set.
    """
    for file in (FUSIONBENCH / "fusion_bench").rglob("*.py"):
        source = file.read_text()
        if "load_dataset" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).endswith("load_dataset")
                and node.args
            ):
                yield getattr(node.args[0], "value", None)
            if isinstance(node, ast.FunctionDef):
                parameters = node.args.args[len(node.args.args) - len(node.args.defaults) :]
                for parameter, default in zip(parameters, node.args.defaults, strict=True):
                    if parameter.arg in PATHS:
                        yield getattr(default, "value", None)


def test_every_data_set_that_fusionbench_names_without_an_owner_has_one_here():
    names = {
        name
        for name in (*names_in_configs(), *names_in_modules())
        if isinstance(name, str) and "/" not in name
    }
    assert {"glue", "wikitext"} <= names
    variables = {name for name in names if "$" in name}
    assert names - variables - MISSPELLED - _PACKAGED_DATASETS_MODULES.keys() <= OWNERS.keys()


@pytest.fixture
def asked(monkeypatch):
    """The names of the data sets that the hub is asked for."""
    names = []

    class Hub:
        def __init__(self, **_):
            pass

        def hf_hub_download(self, repo_id, **_):
            names.append(repo_id)
            raise RuntimeError("asked")

    monkeypatch.setattr(datasets.load, "HfApi", Hub)
    return names


@pytest.mark.parametrize("name", OWNERS)
def test_the_hub_is_asked_for_the_owners_data_set(asked, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="asked"):
        datasets.load_dataset(name)
    assert asked == [f"{OWNERS[name]}/{name}"]


def test_a_folder_of_that_name_comes_first(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    datasets.Dataset.from_dict({"label": [3, 1]}).to_parquet(tmp_path / "mnist" / "test.parquet")
    assert datasets.load_dataset("mnist", split="test")["label"] == [3, 1]
    assert asked == []


@pytest.mark.slow
def test_after_it_fusionbenchs_own_classes_for_clip_can_be_imported():
    code = (
        "import fusion_bench_nufilt.continual.compat; from fusion_bench.method import OPCMForCLIP"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def reports(folder, caplog):
    """What transformers says of a whole CLIP that is loaded as a vision tower."""
    # Its loggers do not reach those of pytest.
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addHandler(caplog.handler)
    try:
        transformers.CLIPVisionModel.from_pretrained(folder)
    finally:
        logger.removeHandler(caplog.handler)
    return caplog.text


def test_that_a_vision_tower_has_no_words_is_no_report(tmp_path, caplog):
    full_clip().save_pretrained(tmp_path)
    assert reports(tmp_path, caplog) == ""


@pytest.mark.skipif(
    transformers.__version__.startswith("4."), reason="transformers 4 reports in other words"
)
@pytest.mark.parametrize("change", ["a weight is missing", "a weight belongs nowhere"])
def test_a_report_of_anything_else_stays(tmp_path, caplog, change):
    model = full_clip()
    state = model.state_dict()
    key = next(key for key in state if key.startswith("vision_model.") and "fc1.weight" in key)
    if change == "a weight is missing":
        del state[key]
    else:
        state[key.replace("weight", "lora_A.weight")] = torch.zeros(2, 32)
    model.save_pretrained(tmp_path, state_dict=state)
    assert "LOAD REPORT" in reports(tmp_path, caplog)
