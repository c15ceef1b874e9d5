"""A mergekit file is a recipe where the result is the same, and anything else in it is refused by
name.
"""

import sys

import pytest
import torch
import yaml

from tests.commands.helpers import nufilt
from tests.merge.helpers import same, save_stream, tensors
from tests.models import llama

ARITHMETIC = {
    "merge_method": "task_arithmetic",
    "base_model": "base",
    "models": [
        {"model": "base"},
        {"model": "task1", "parameters": {"weight": 0.7}},
        {"model": "task2", "parameters": {"weight": -0.2}},
    ],
    "parameters": {"lambda": 1.5, "int8_mask": True},
}
LINEAR = {
    "merge_method": "linear",
    "models": [{"model": f"task{i}", "parameters": {"weight": i}} for i in (1, 2, 3)],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    save_stream(tmp_path, llama(tie_word_embeddings=False))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def merged(folder, content, *options):
    (folder / "mergekit.yaml").write_text(yaml.safe_dump(content))
    code, text = nufilt("merge", "mergekit.yaml", "--out", "out", *options)
    assert code == 0, text
    return tensors(folder / "out")


def weighted(folder, **weights):
    """The base, and the sum of the updates of some models, each times a weight; of every tensor."""
    base = tensors(folder / "base")
    models = {name: tensors(folder / name) for name in weights}
    return {
        key: base[key] + sum(weights[name] * (models[name][key] - base[key]) for name in weights)
        for key in base
    }


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {"task1": 1.05, "task2": -0.3}),
        ({"parameters": {"normalize": True}}, {"task1": 1.4, "task2": -0.4}),
        (
            {"parameters": {"weight": 0.5}, "models": [{"model": "task3"}, {"model": "task1"}]},
            {"task3": 0.5, "task1": 0.5},
        ),
        (LINEAR, {"task1": 1 / 6, "task2": 2 / 6, "task3": 3 / 6}),
        ({**LINEAR, "base_model": None}, {"task1": 1 / 6, "task2": 2 / 6, "task3": 3 / 6}),
    ],
    ids=["lambda", "normalize", "one weight", "linear", "linear without a base"],
)
def test_every_tensor_is_what_mergekit_makes_of_it(folder, change, expected):
    content = {key: value for key, value in {**ARITHMETIC, **change}.items() if value is not None}
    if change.get("merge_method"):
        del content["parameters"]
    torch.testing.assert_close(
        merged(folder, content), weighted(folder, **expected), rtol=0, atol=2e-7
    )


def test_dtype_and_tokenizer_are_taken_over(folder):
    out = merged(
        folder,
        {**ARITHMETIC, "dtype": "float32", "out_dtype": "bfloat16", "tokenizer_source": "base"},
    )
    assert {value.dtype for value in out.values()} == {torch.bfloat16}
    assert merged_settings(folder)["tokenizer"] == "base"


def merged_settings(folder):
    return yaml.safe_load((folder / "out" / "nufilt.json").read_text())["settings"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"merge_method": "ties"},
            "field 'merge_method': input should be 'linear' or 'task_arithmetic', got "
            "'ties'.*continual/ties_merging",
        ),
        ({"slices": []}, "field 'slices': extra inputs are not permitted.*whole models"),
        ({"base_model": None}, "field 'base_model': field required"),
        ({"parameters": {"density": 0.5}}, r"field 'parameters\.density': extra"),
        (
            {"models": [{"model": "task1", "parameters": {"weight": [0, 1]}}]},
            r"field 'models\.0\.parameters\.weight': .*number",
        ),
        (
            {"models": [{"model": "task1"}]},
            r"field 'models\.0\.parameters\.weight': field required",
        ),
        ({"models": [{"model": "base"}]}, "there must be a model beside the base"),
        ({"chat_template": "auto"}, "field 'chat_template': extra"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_field(folder, change, message):
    content = {key: value for key, value in {**ARITHMETIC, **change}.items() if value is not None}
    (folder / "mergekit.yaml").write_text(yaml.safe_dump(content))
    code, text = nufilt("merge", "mergekit.yaml", "--out", "out")
    assert code == 1
    assert __import__("re").search(message, text), text
    assert not (folder / "out").exists()


@pytest.fixture
def without_mergekit(monkeypatch):
    """Every import of mergekit fails, as where it is not installed."""
    for name in {"mergekit", *sys.modules}:
        if name.partition(".")[0] == "mergekit" or name.endswith(".in_mergekit"):
            monkeypatch.setitem(sys.modules, name, None)


def test_methods_of_this_package_need_no_mergekit(folder, without_mergekit):
    models = [{"model": "task1", "parameters": {"weight": 0.5}}, {"model": "task2"}]
    content = {
        "merge_method": "best",
        "base_model": "base",
        "models": models,
        "parameters": {"scale": 0.7},
    }
    found = merged(folder, content)
    code, text = nufilt("mergekit", "mergekit.yaml", "theirs")
    assert (code, "pip install 'fusion-bench-nufilt[mergekit]'" in text) == (1, True), text
    options = ("--method", "best", "--weights", 0.5, "--weights", 1, "scale=0.7")
    code, text = nufilt(
        "merge", "--base", "base", "--task", "task1", "--task", "task2", *options, "--out", "same"
    )
    assert code == 0, text
    assert same(found, tensors(folder / "same"))


def test_weights_are_one_for_each_task(folder):
    words = (
        "merge",
        "--base",
        "base",
        "--task",
        "task1",
        "--task",
        "task2",
        "--out",
        "out",
        "--method",
        "sum",
    )
    code, text = nufilt(*words, "--weights", "0.5")
    assert (code, "there are 1 weights for 2 tasks" in text) == (1, True), text
    assert nufilt(*words, "--weights", "0.5", "--weights", "2", "scale=0.5")[0] == 0
    torch.testing.assert_close(
        tensors(folder / "out"), weighted(folder, task1=0.25, task2=1.0), rtol=0, atol=2e-7
    )
