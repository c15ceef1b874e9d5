"""mergekit with the methods of this package gives what `nufilt merge` gives of the same models."""

import re

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from fusion_bench_nufilt.methods import METHODS
from fusion_bench_nufilt.nufilt import FusionConfig
from tests.cli.helpers import nufilt
from tests.families import FAMILIES
from tests.merge.helpers import (
    RANKS,
    STATE,
    change,
    change_json,
    rewrite,
    same,
    save_merged_adapters,
    save_stream,
    tensors,
)
from tests.models.test_adapters import save_adapter
from tests.tiny_models import llama

WITHOUT = ("--no-copy-tokenizer", "--no-write-model-card")  # the card asks the hub about each model
THEIRS = ("mergekit", "mergekit.yaml", "theirs", *WITHOUT)
OURS = ("merge", "recipe.yaml", "--out", "ours")

pytest.importorskip("mergekit", reason="needs mergekit: pip install '.[mergekit]'")


@pytest.fixture(autouse=True)
def no_models_of_other_tests():
    """mergekit keeps the models that it has opened by the names in the file."""
    from mergekit.io.tasks import LoaderCache

    LoaderCache.loaders.clear()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    save_stream(tmp_path, llama(tie_word_embeddings=False), dtype=torch.bfloat16)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder, method, weights=None, tasks=("task2", "task1", "task3"), **parameters):
    """Write `mergekit.yaml`, and what says the same to `nufilt merge`, `recipe.yaml`."""
    if METHODS.get(method) and METHODS[method].Options is FusionConfig:
        parameters = {**RANKS, **parameters}
    weights = {**dict.fromkeys(tasks, 1), **(weights or {})}
    models = []
    for name in tasks:
        models.append({"model": name, "parameters": {"weight": weights[name]}})
    content = {
        "merge_method": method,
        "base_model": "base",
        "models": models,
        "parameters": parameters,
    }
    (folder / "mergekit.yaml").write_text(yaml.safe_dump(content))
    recipe = {
        "base": "base",
        "tasks": list(tasks),
        "method": method,
        "weights": [weights[name] for name in tasks],
        **parameters,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return content


def both(folder):
    """All tensors of what mergekit makes of its file, and of what `nufilt merge` does of the
    recipe.
    """
    for words in (THEIRS, OURS):
        code, text = nufilt(*words, "--quiet")
        assert code == 0, text
    return tensors(folder / "theirs"), tensors(folder / "ours")


@pytest.mark.parametrize("method", ["nufilt", "best", "sum"])
def test_every_tensor_has_the_bits_of_nufilt_merge(folder, method):
    write(folder, method)
    theirs, ours = both(folder)
    assert {value.dtype for value in theirs.values()} == {torch.bfloat16}
    assert same(theirs, ours)
    assert not same(theirs, tensors(folder / "base"))


def test_a_head_that_is_stored_apart_is_a_layer_and_the_embedding_that_its_config_ties_is_none(
    folder,
):
    for name in ("base", "task1", "task2", "task3"):
        change_json(folder / name / "config.json", tie_word_embeddings=True)
    write(folder, "sum", target_modules="lm_head", other_params="mean")
    theirs, ours = both(folder)
    assert same(theirs, ours)
    key = "model.embed_tokens.weight"
    tasks = [tensors(folder / f"task{number}")[key].float() for number in (2, 1, 3)]
    mean = sum(tasks) / 3
    torch.testing.assert_close(theirs[key].float(), mean, rtol=0, atol=1e-3)


def test_best_gives_a_task_that_was_an_adapter_the_strength_that_nufilt_merge_gives_it(folder):
    save_adapter(folder, LlamaForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16))
    write(folder, "best", tasks=("task1", "task9"))
    theirs, ours = both(folder)
    state = load_file(folder / "ours" / STATE)
    assert state["model.layers.0.self_attn.q_proj.state.strength"] == 1.5
    assert same(theirs, ours)


def test_a_layer_that_a_task_lacks_says_nothing_about_its_strength(folder):
    """mergekit takes the task's embedding for the head that it lacks."""
    head = tensors(folder / "base")["lm_head.weight"]
    change(folder / "task2", "lm_head.weight", lambda value: None)
    write(folder, "best", target_modules=r"(.*\.)?(q_proj|lm_head)")
    code, text = nufilt(*THEIRS, "--quiet")
    assert code == 0, text
    rewrite(folder / "task2", lambda state: {**state, "lm_head.weight": head})
    code, text = nufilt(*OURS, "--quiet")
    assert code == 0, text
    theirs = tensors(folder / "theirs")
    ours = tensors(folder / "ours")
    assert [key for key in ours if not torch.equal(theirs[key], ours[key])] == ["lm_head.weight"]


@pytest.mark.parametrize("method", ["nufilt", "best"])
def test_options_weights_and_the_seed_are_parameters_of_the_file(folder, method):
    parameters = {"seed": 7, "target_modules": r".*(q_proj|up_proj)", "other_params": "first"}
    if method == "nufilt":
        parameters["null_rank"] = 5
    else:
        parameters["scale"] = 0.7
    write(folder, method, {"task2": 0.5, "task3": 2}, **parameters)
    assert same(*both(folder))


@pytest.mark.parametrize(("method", "weights"), [("nufilt", {}), ("tsv_stream", {"task2": 0.7})])
def test_in_float32_the_rounding_of_the_models_is_known_as_in_nufilt_merge(
    tmp_path, monkeypatch, method, weights
):
    save_merged_adapters(tmp_path)
    monkeypatch.chdir(tmp_path)
    parameters = {"null_rank": 64} if method == "nufilt" else {}
    content = write(tmp_path, method, weights, tasks=("task1", "task2"), **parameters)
    (tmp_path / "mergekit.yaml").write_text(yaml.safe_dump({**content, "dtype": "float32"}))
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "dtype": "float32"}))
    theirs, ours = both(tmp_path)
    assert {value.dtype for value in theirs.values()} == {torch.float32}
    assert same(theirs, ours)


def test_fused_experts_are_merged_one_by_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_stream(tmp_path, FAMILIES["gpt_oss"](), tasks=2)
    # What is left out of a stack of experts stays as it is.
    write(tmp_path, "nufilt", tasks=("task1", "task2"), exclude_modules=r".*experts\.1\..*")
    assert same(*both(tmp_path))


@pytest.mark.parametrize(
    ("method", "parameters", "message"),
    [
        ("nufillt", {}, "there is no merge_method 'nufillt'; did you mean 'nufilt'?"),
        (
            "nufilt",
            {"null_rnak": 3},
            "there is no parameter of merge_method nufilt 'null_rnak'; did you mean 'null_r",
        ),
        ("spectral", {"kappa": 0}, "kappa must be a number > 0"),
        (
            "best",
            {"target_modules": "nothing"},
            "target_modules='nothing', exclude_modules=None leave no layer",
        ),
    ],
)
def test_a_bad_file_is_refused_in_one_line(folder, method, parameters, message):
    write(folder, method, **parameters)
    code, text = nufilt("mergekit", "mergekit.yaml", "out", "--quiet")
    assert code == 1, text
    assert message in text
    assert not list(folder.glob("out/*.safetensors"))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("exclude_modules", ["up_proj", "down_proj"], r"exclude_modules: '(.*\.)?(up_proj|down_"),
        ("target_modules", [{"filter": "mlp", "value": "x"}], "give target_modules one value"),
        ("scale", [0.5, 1], "give scale one value"),
        ("seed", {"value": 1}, "give seed one value"),
    ],
)
def test_a_list_for_an_option_is_refused_before_any_work(folder, option, value, message):
    write(folder, "best", **{option: value})
    code, text = nufilt("mergekit", "mergekit.yaml", "out", "--quiet")
    assert code == 1, text
    assert message in text
    assert not (folder / "out").exists()


def test_what_is_to_be_written_in_place_of_a_list_excludes_the_same_layers(folder):
    write(folder, "best", exclude_modules=["up_proj", "self_attn.q_proj"])
    assert nufilt(*OURS)[0] == 0
    _, text = nufilt("mergekit", "mergekit.yaml", "theirs", "--quiet")
    remedy = yaml.safe_load(text.partition(": write ")[2])
    write(folder, "best", **remedy)
    code, text = nufilt(*THEIRS, "--quiet")
    assert code == 0, text
    assert same(tensors(folder / "theirs"), tensors(folder / "ours"))


def test_a_list_of_weights_is_mergekits_gradient_of_strengths(folder):
    write(folder, "best", {"task1": [0, 1]})
    code, text = nufilt(*THEIRS, "--quiet")
    assert code == 0, text


@pytest.mark.parametrize("content", ["- models\n", "models: [\n", None])
def test_what_is_no_file_of_mergekit_is_refused_in_one_line(folder, content):
    if content is not None:
        (folder / "mergekit.yaml").write_text(content)
    else:
        (folder / "mergekit.yaml").unlink(missing_ok=True)
    code, text = nufilt("mergekit", "mergekit.yaml", "out", "--quiet")
    assert code == 1
    assert "'mergekit.yaml' can't be read: " in text
    assert "Traceback" not in text


@pytest.mark.parametrize("tensor", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_what_the_dtype_can_not_hold_is_refused_as_by_nufilt_merge(folder, tensor):
    save_stream(folder, llama(tie_word_embeddings=False), dtype=torch.float16)
    for name, value in (("base", 4e4), ("task1", 6e4), ("task2", 6e4), ("task3", 6e4)):
        change(folder / name, tensor, lambda weight, value=value: weight.fill_(value))
    write(folder, "sum", dict.fromkeys(("task1", "task2", "task3"), 2), other_params="mean")
    for words in (THEIRS, OURS):
        code, text = nufilt(*words, "--quiet")
        assert code == 1, text
        assert f"error: tensor '{tensor}' has values that torch.float16 can't hold" in text


@pytest.mark.parametrize("tensor", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_a_model_with_values_that_are_not_finite_is_named(folder, tensor):
    change(folder / "task2", tensor, lambda value: value / 0)
    write(folder, "sum", other_params="mean")
    code, text = nufilt(*THEIRS, "--quiet")
    assert code == 1
    assert re.search(rf"model '\S*task2', \w+ '{tensor.removesuffix('.weight')}.* NaN", text), text


def test_a_file_without_a_base_and_one_with_more_layers_than_the_base_are_refused(folder):
    content = write(folder, "best")
    del content["base_model"]
    (folder / "mergekit.yaml").write_text(yaml.safe_dump(content))
    code, text = nufilt("mergekit", "mergekit.yaml", "out", "--quiet")
    assert code == 1, text
    assert "requires a base input" in text
    sources = [{"model": name, "layer_range": [0, 2]} for name in ("base", "task1")]
    slices = [{"sources": sources}] * 2
    taller = {"merge_method": "best", "base_model": "base", "slices": slices}
    (folder / "mergekit.yaml").write_text(yaml.safe_dump(taller))
    code, text = nufilt("mergekit", "mergekit.yaml", "out", "--quiet")
    assert code == 1, text
    assert "'base' has no tensor 'model.layers.2." in text
