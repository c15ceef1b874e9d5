"""A peft adapter folder is the model that peft makes of it."""

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fusion_bench_nufilt.merge import merge_folders, plan_merge
from fusion_bench_nufilt.models.peft_layers import PREFIX
from tests.docs import follow_renaming
from tests.merge.helpers import change, change_json, merge, plan, same, save_stream, tensors
from tests.models.test_ties import whisper
from tests.models.test_vocabulary import tokenizer
from tests.tiny_models import TOWER, adapt_at_random, clip, llama, llava, t5

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
QUERY_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def save_adapter(folder, base, seed=5, **config):
    """Folders `adapter` and `task9`, the same fine-tuned model as peft's adapter and merged by
    peft.
    """
    random_adapter(folder / "adapter", folder / "task9", base, seed, **config)


def random_adapter(adapter, whole, base, seed, **config):
    """Save a random adapter of a base as a folder, and what peft makes of it as another."""
    model = get_peft_model(base, LoraConfig(**{**LORA, **config}))
    adapt_at_random(model, seed)
    model.save_pretrained(adapter)
    model.merge_and_unload().save_pretrained(whole)


def save_all(folder, base, dtype=torch.float32, **config):
    """A base, a task and an adapter."""
    save_stream(folder, base, tasks=1, dtype=dtype)
    save_adapter(folder, type(base).from_pretrained(folder / "base", dtype=dtype), **config)


def test_an_adapter_whose_scaling_overflows_is_named(tmp_path):
    save_all(tmp_path, llama())
    change(tmp_path / "adapter", QUERY_A.replace("lora_A", "lora_B"), lambda value: value + 3e38)
    with pytest.raises(
        ValueError, match=r"adapter '.*adapter', layer 'model\.layers\.0\.self_attn.*too large for"
    ):
        merge(tmp_path, ["adapter"])


def plan_adapter(folder):
    return plan_merge(str(folder / "base"), [str(folder / "adapter")])


PATTERNS = {
    "rank_pattern": {r"^model\..*layers\.0\.self_attn\.q_proj": 2, r".*\.v_proj": 8},
    "alpha_pattern": {"layers.0.self_attn.v_proj": 32, "down_proj": 4},
}


@pytest.mark.oldest
@pytest.mark.parametrize(
    ("make", "config"),
    [
        (llava, {}),
        (llama, {**PATTERNS, "use_rslora": True, "modules_to_save": ["lm_head"]}),
        (llama, {**PATTERNS, "use_dora": True, "layers_to_transform": [0]}),
    ],
    ids=["llava", "rslora", "dora"],
)
def test_an_adapter_is_the_model_that_peft_merges_it_into(tmp_path, make, config):
    settings = {}
    if make is llama:
        settings["tie_word_embeddings"] = False
    save_all(tmp_path, make(**settings), torch.float64, **config)
    options = {}
    if "modules_to_save" in config:
        options["other_params"] = "mean"
    first = tensors(merge(tmp_path, ["adapter"], "first_adapter", **options))
    whole = tensors(merge(tmp_path, ["task9"], "first_task9", **options))
    torch.testing.assert_close(first, whole, rtol=0, atol=1e-15)
    expected = tensors(merge(tmp_path, ["task1", "task9"], "full", **options))
    result = tensors(merge(tmp_path, ["task1", "adapter"], "out", **options))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-9)
    without = tensors(merge(tmp_path, ["task1"], "without", **options))
    assert max((result[key] - without[key]).abs().max() for key in result) > 1e-4


def test_a_projector_that_an_adapter_trained_is_merged_as_that_of_a_model(tmp_path):
    config = {"target_modules": ["q_proj"], "modules_to_save": ["multi_modal_projector"]}
    save_all(tmp_path, llava(), torch.float64, **config)
    assert not plan(tmp_path, ["adapter"]).heads
    options = {"method": "sum", "scale": 1.0, "other_params": "mean"}
    result = tensors(merge(tmp_path, ["task1", "adapter"], "out", **options))
    expected = tensors(merge(tmp_path, ["task1", "task9"], "expected", **options))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def test_which_layers_are_transposed_is_for_their_modules_to_say_as_in_peft(tmp_path):
    """It flips ``fan_in_fan_out`` as it wraps modules, and saves what the last one made of it."""
    save_all(tmp_path, llama(), torch.float64)
    change_json(tmp_path / "adapter" / "adapter_config.json", fan_in_fan_out=True)
    result = tensors(merge(tmp_path, ["adapter"], method="sum", scale=1.0))
    expected = tensors(merge(tmp_path, ["task9"], "expected", method="sum", scale=1.0))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


TWICE = {
    "factors": ({"target_modules": ["q_proj", "lm_head"]}, "lm_head.weight"),
    "rows": ({"trainable_token_indices": [1, 2]}, "model.embed_tokens.weight"),
}


@pytest.mark.parametrize("what", TWICE)
def test_what_an_adapter_changes_and_holds_in_full_is_refused_in_whatever_order(tmp_path, what):
    config, name = TWICE[what]
    save_all(tmp_path, llama(tie_word_embeddings=False), **config)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({**load_file(path), f"{PREFIX}{name}": tensors(tmp_path / "base")[name]}, path)
    with pytest.raises(ValueError, match=f"adapter' changes '{name}' twice"):
        plan_adapter(tmp_path)


@pytest.mark.parametrize("targets", ["all-linear", r".*(q_proj|conv1)"])
def test_a_convolution_that_an_adapter_saves_is_no_stack_of_experts(tmp_path, targets):
    """Of one dimension, its weight has three sides, too."""
    config = {"target_modules": ["q_proj"], "modules_to_save": ["conv1"]}
    save_all(tmp_path, whisper(), torch.float64, **config)
    options = {"method": "sum", "scale": 1.0, "other_params": "mean", "target_modules": targets}
    result = tensors(merge(tmp_path, ["task1", "adapter"], "out", **options))
    expected = tensors(merge(tmp_path, ["task1", "task9"], "expected", **options))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def test_layers_that_an_adapter_leaves_alone_stay_as_they_are(tmp_path):
    save_all(tmp_path, llama())
    before = tensors(merge(tmp_path, ["task1"], "one"))
    after = tensors(merge(tmp_path, ["adapter"], "two", merged="one"))
    changed = {key.split(".")[-2] for key in after if not torch.equal(after[key], before[key])}
    assert changed == {"q_proj", "v_proj", "down_proj"}


def widen_the_query(folder):
    change(folder / "adapter", QUERY_A, lambda value: torch.zeros(4, 48))


def swap_the_base(folder):
    save_stream(folder / "other", t5(), tasks=1)
    (folder / "base").rename(folder / "unused")
    (folder / "other" / "base").rename(folder / "base")


@pytest.mark.parametrize(
    ("make", "modules", "spoil", "message"),
    [
        (
            llama,
            ["q_proj"],
            swap_the_base,
            "adapter '.*' changes '.*self_attn.*', which the base '.*base' lacks: it is for",
        ),
        (
            llama,
            ["q_proj"],
            widen_the_query,
            r"0\.self_attn\.q_proj\.weight': shape \(32, 48\) differs from \(32, 32",
        ),
        (llama, ["lm_head"], None, "changes none of the 14 layers"),
        (
            clip,
            ["q_proj", "patch_embedding"],
            None,
            r"patch_embedding\.lora_B\.weight': no LoRA of a linear layer",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_name(tmp_path, make, modules, spoil, message):
    save_all(tmp_path, make(), target_modules=modules)
    if spoil:
        spoil(tmp_path)
    with pytest.raises(ValueError, match=message):
        plan_adapter(tmp_path)


writes_biases = pytest.mark.skipif(
    peft.__version__ < "0.21", reason="peft saves no bias of lora_only before 0.21"
)


@pytest.mark.parametrize("bias", ["all", pytest.param("lora_only", marks=writes_biases)])
def test_biases_trained_with_an_adapter_are_averaged_as_those_of_a_model(tmp_path, bias):
    save_all(tmp_path, clip(), target_modules=["q_proj", "fc1"], bias=bias)
    result = tensors(merge(tmp_path, ["adapter"], "out_adapter", other_params="mean"))
    expected = tensors(merge(tmp_path, ["task9"], "out_task9", other_params="mean"))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-7)
    key = f"{TOWER}encoder.layers.0.mlp.fc1.bias"
    assert not torch.equal(result[key], tensors(tmp_path / "base")[key])


def test_what_the_base_lacks_and_is_no_head_is_ignored_with_a_warning_as_in_a_model(tmp_path):
    save_all(tmp_path, llama())
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({**load_file(path), "base_model.model.score.weight": torch.zeros(2, 32)}, path)
    plan = plan_adapter(tmp_path)
    assert plan.heads["adapter"]["modules"] == ["score"]
    assert [text for text in plan.warnings if not text.startswith("null_rank")] == []
    save_file({**load_file(path), "base_model.model.model.scale": torch.zeros(2)}, path)
    change(tmp_path / "adapter", "base_model.model.score.weight", lambda value: None)
    warnings = plan_adapter(tmp_path).warnings
    assert any("1 tensors that the base lacks, ignored: 'model.scale'" in text for text in warnings)


@pytest.mark.parametrize("tied", [False, True])
def test_what_peft_writes_of_a_saved_module_beside_its_tensor_is_no_tensor_of_its_own(
    tmp_path, tied
):
    modules = ["embed_tokens"]
    if not tied:
        modules.append("lm_head")
    saved = {"modules_to_save": modules, "ensure_weight_tying": tied}
    save_all(tmp_path, llama(tie_word_embeddings=tied), **saved)
    plain = merge(tmp_path, ["adapter"], "plain", other_params="mean")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    state = load_file(path)
    for module in [key for key in state if ".lora_" not in key]:
        trained = state[module]
        name = module.removesuffix("weight")
        state[f"{name}modules_to_save.weight"] = trained.clone()
        state[f"{name}original_module.weight"] = torch.zeros_like(trained)
    save_file(state, path)
    planned = plan(tmp_path, ["adapter"], other_params="mean")
    assert [text for text in planned.warnings if "lacks" in text] == []
    assert same(tensors(merge_folders(planned, tmp_path / "out")), tensors(plain))
    state = load_file(path)  # again: the tensors read before are maps of the file that was replaced
    for module in [key for key in state if ".modules_to_save." in key]:
        del state[module.replace(".modules_to_save", "")]
    save_file(state, path)
    assert same(tensors(merge(tmp_path, ["adapter"], "one", other_params="mean")), tensors(plain))


SAVED = {
    "factors": {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_rslora": True},
    "tokens": {"trainable_token_indices": [3, 7]},
    "tokens by the end of a word": {"trainable_token_indices": {"tokens": [3, 7], "lm_head": [1]}},
    "whole tensors": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "tied tensors": {
        "modules_to_save": ["embed_tokens", "model.embed_tokens"],
        "ensure_weight_tying": True,
    },
}


@pytest.mark.parametrize("what", SAVED)
def test_embeddings_heads_and_tokens_are_what_peft_merges_them_into(tmp_path, what):
    tied = what == "tied tensors"
    save_all(tmp_path, llama(tie_word_embeddings=tied), torch.float64, **SAVED[what])
    options = {"method": "sum", "other_params": "mean"}
    for earlier in ([], ["task1"]):
        count = len(earlier) + 1
        result = merge(tmp_path, [*earlier, "adapter"], f"a{count}", **options)
        expected = merge(tmp_path, [*earlier, "task9"], f"w{count}", **options)
        torch.testing.assert_close(tensors(result), tensors(expected), rtol=0, atol=1e-12)
    base = tensors(tmp_path / "base")
    moved = {
        key for key, value in tensors(tmp_path / "a1").items() if not torch.equal(value, base[key])
    }
    assert moved & {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("what", ["factors", "tokens"])
def test_an_embedding_that_was_resized_beneath_what_was_trained_is_refused(tmp_path, what):
    """Rows of new tokens would be the base's, which pad its vocabulary."""
    base = llama(tie_word_embeddings=False)
    save_stream(tmp_path, base, tasks=1)
    base.resize_token_embeddings(49)
    base.name_or_path = str(tmp_path / "base")  # with whose size peft compares it
    config = {"target_modules": ["q_proj", "embed_tokens"]}
    if what == "tokens":
        config = {"trainable_token_indices": [3, 48]}
    save_adapter(tmp_path, base, **config)
    tokenizer().save_pretrained(tmp_path / "base")
    tokenizer("<one>").save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"trained on 'model.*' of 49 rows, and the base has 50"):
        plan_adapter(tmp_path)


# --- what is said about adapters that have no effect, or are none of LoRA ---


def warnings(folder, **options):
    return plan(folder, ["adapter"], **options).warnings


def untrained(folder):
    path = folder / "adapter" / "adapter_model.safetensors"
    state = load_file(path)
    for key, value in state.items():
        if "lora_B" in key:
            state[key] = value * 0
    save_file(state, path)


def without_alpha(folder):
    change_json(folder / "adapter" / "adapter_config.json", lora_alpha=0)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (untrained, "factors are zero, as before any"),
        (without_alpha, "lora_alpha in its adapter_c"),
    ],
)
def test_an_adapter_without_effect_is_warned_about_as_a_copy_of_the_base_is(tmp_path, spoil, why):
    save_all(tmp_path, llama())
    assert warnings(tmp_path) == []
    spoil(tmp_path)
    (text,) = warnings(tmp_path)
    assert "adapter' changes nothing in the 6 layers looked at" in text
    assert why in text
    out = merge(tmp_path, ["adapter"])
    assert same(tensors(out), tensors(tmp_path / "base"))


def test_an_untrained_adapter_that_brings_tensors_has_an_effect_where_they_are_merged(tmp_path):
    save_all(tmp_path, llama(tie_word_embeddings=False), modules_to_save=["lm_head"])
    untrained(tmp_path)
    assert warnings(tmp_path, other_params="mean") == []
    assert any("changes nothing" in text for text in warnings(tmp_path))


def test_trained_tokens_of_another_base_are_not_said_to_need_a_larger_one(tmp_path):
    save_all(tmp_path, llama(), target_modules=["q_proj"], trainable_token_indices=[3, 7])
    swap_the_base(tmp_path)
    message = (
        r"rows for the tokens \[3, 7\] of .* is not known to have: merge it into its base with"
    )
    with pytest.raises(ValueError, match=message):
        plan_adapter(tmp_path)


def test_the_placeholders_of_zero_3_are_named_in_adapters_and_models(tmp_path):
    save_all(tmp_path, llama())
    for task in ("adapter", "task1", "base"):
        for path in (tmp_path / task).glob("*.safetensors"):
            state = load_file(path)
            names = [key for key in state if "_proj" in key]
            save_file({**state, **{key: torch.empty(0) for key in names}}, path)
        planned = task
        if task == "base":
            planned = "task1"
        with pytest.raises(ValueError, match=r"empty tensors: '.*_proj.*DeepSpeed ZeRO-3 leaves"):
            plan(tmp_path, [planned])
        if task == "adapter":
            save_adapter(tmp_path, llama())


def test_an_adapter_file_without_tensors_is_refused(tmp_path):
    save_all(tmp_path, llama())
    save_file({}, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="adapter' has no tensors: save it again"):
        plan_adapter(tmp_path)


def test_a_b_without_its_a_is_named(tmp_path):
    save_all(tmp_path, llama())
    change(tmp_path / "adapter", QUERY_A, lambda value: None)
    message = r"0\.self_attn\.q_proj': its file has {'B': \(32, 4\)}, and peft makes A, B of rank 4"
    with pytest.raises(ValueError, match=message):
        plan_adapter(tmp_path)


@pytest.mark.parametrize(
    ("adapter", "config"),
    [
        ("default", {"use_dora": True, "modules_to_save": ["lm_head"]}),
        ("sft", {"target_modules": ["embed_tokens"], "modules_to_save": ["q_proj"]}),
    ],
)
def test_names_with_that_of_the_adapter_are_refused_with_what_takes_it_out(
    tmp_path, adapter, config
):
    save_all(tmp_path, llama(tie_word_embeddings=False), **config)
    expected = tensors(merge(tmp_path, ["adapter"], "expected", other_params="mean"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", adapter_name=adapter)
    state = {key: value for key, value in model.state_dict().items() if adapter in key.split(".")}
    save_file(state, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(
        ValueError, match=f"saved from a model that calls it '{adapter}': "
    ) as error:
        plan_adapter(tmp_path)
    follow_renaming(str(error.value))
    assert same(tensors(merge(tmp_path, ["adapter"], other_params="mean")), expected)


def test_what_is_saved_again_with_the_gathered_weights_is_merged(tmp_path):
    save_all(tmp_path, llama())
    expected = tensors(merge(tmp_path, ["task1"], "expected"))
    model = type(llama()).from_pretrained(tmp_path / "task1")
    gathered = {key: value.clone() for key, value in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    model.save_pretrained(tmp_path / "task1", state_dict=gathered)
    assert same(tensors(merge(tmp_path, ["task1"])), expected)
