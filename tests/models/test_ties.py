"""Weights that a configuration ties: what loads as two tensors is merged as two."""

import json
from copy import deepcopy

import peft
import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from fusion_bench_nufilt import LayerwiseMergingAlgorithm
from fusion_bench_nufilt.merge import merge_folders
from fusion_bench_nufilt.methods.options import TargetConfig
from fusion_bench_nufilt.models.architecture import Architecture
from fusion_bench_nufilt.models.fit import check_module
from tests.continual.helpers import InterruptedRunError, interrupt_after, logging_to
from tests.merge.helpers import change_json, hashes, interrupt, merge, plan, pool, same, tensors
from tests.released import released
from tests.tiny_models import SMALL, T5, VISION, adapt_at_random, build, finetuned, llama

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
SUM = {"method": "sum", "scale": 1.0, "other_params": "mean", "target_modules": "all-linear"}
WORDS = torch.arange(12).reshape(1, 12)
ON_LOADING = int(hf.__version__.split(".")[0]) > 4  # whether two tensors are loaded as two


def save_apart(folder, model, key, seed):
    """Save a model, with another tensor under a key that its config.json ties."""
    model.save_pretrained(folder)
    (path,) = folder.glob("*.safetensors")
    stored = load_file(path)
    like = next(value for name, value in model.named_parameters() if value.shape[0] == 50)
    own = like + 0.02 * torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))
    save_file({**stored, key: own.detach()}, path, metadata={"format": "pt"})


def save_untied(folder, source):
    """Copy the embedding of a saved Llama into its head, and save it untied, as messages say."""
    model = hf.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.get_input_embeddings().weight.detach().clone())
    model.save_pretrained(folder)


@torch.no_grad()
def logits(folder):
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return model(WORDS).logits


LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
ADAPTERS = {
    "LoRA of the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "LoRA of the head": {"target_modules": ["q_proj", "lm_head"]},
    "LoRA of both": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "tied LoRA": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "tied LoRA by the head": {"target_modules": ["q_proj", "lm_head"], "ensure_weight_tying": True},
    "tied LoRA of its own rank": {
        "target_modules": ["q_proj", "embed_tokens"],
        "ensure_weight_tying": True,
        "rank_pattern": {"embed_tokens": 2},
        "alpha_pattern": {"embed_tokens": 4},
    },
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "head": {"modules_to_save": ["lm_head"]},
    "both": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": [3, 7]},
    "tokens of the head": {"trainable_token_indices": {"lm_head": [3, 7]}},
    "tokens of both": {"trainable_token_indices": {"embed_tokens": [3, 7], "lm_head": [1]}},
}
TIED = ("tied LoRA", "tied LoRA by the head", "tied LoRA of its own rank", "tied", "tokens")


def save_adapter(folder, base, seed=5, **config):
    """Save an adapter; return the logits of peft's model."""
    model = get_peft_model(deepcopy(base), LoraConfig(**{**LORA, **config})).double()
    adapt_at_random(model, seed)
    model.save_pretrained(folder)
    with torch.no_grad():
        return model.eval()(WORDS).logits


@pytest.mark.parametrize("what", ADAPTERS)
def test_an_adapter_on_a_tied_weight_is_the_model_that_peft_runs(tmp_path, what):
    base = llama().double()
    base.save_pretrained(tmp_path / "base")
    expected = save_adapter(tmp_path / "adapter", base, **ADAPTERS[what])
    assert (logits(tmp_path / "base") - expected).abs().max() > 0.1
    out = merge(tmp_path, ["adapter"], **SUM)
    if not ON_LOADING:
        assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is (
            what in TIED
        )
    torch.testing.assert_close(logits(out), expected, rtol=0, atol=1e-9)
    assert (HEAD in tensors(out)) == (what not in TIED)


def bert():
    return build(hf.BertForMaskedLM, hf.BertConfig(**SMALL, vocab_size=50), 0)


def gpt2():
    return build(
        hf.GPT2LMHeadModel, hf.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2), 0
    )


def tied_t5():
    return build(hf.T5ForConditionalGeneration, hf.T5Config(**T5), 0)


def bart():
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 32, "vocab_size": 50}
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    widths = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64)
    config = hf.BartConfig(**sizes, **heads, **widths, pad_token_id=0, eos_token_id=1)
    return build(hf.BartForConditionalGeneration, config, 0)


def roberta():
    config = hf.RobertaConfig(**SMALL, vocab_size=50, max_position_embeddings=40)
    return build(hf.RobertaForMaskedLM, config, 0)


def albert():
    config = hf.AlbertConfig(**SMALL, vocab_size=50, embedding_size=16)
    return build(hf.AlbertForMaskedLM, config, 0)


def deberta():
    config = hf.DebertaV2Config(**SMALL, vocab_size=50, max_position_embeddings=40)
    return build(hf.DebertaV2ForMaskedLM, config, 0)


def whisper():
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 32, "num_mel_bins": 8}
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    widths = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64)
    tokens = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = hf.WhisperConfig(
        **sizes, **heads, **widths, **tokens, decoder_start_token_id=1, max_source_positions=8
    )
    return build(hf.WhisperForConditionalGeneration, config, 0)


#: Models that tie more than an embedding and a head, or whose heads hold more than what is tied,
#: with a module to adapt.
TYING = {
    "t5": (tied_t5, "q"),
    "bart": (bart, "q_proj"),
    "whisper": (whisper, "q_proj"),
    "bert": (bert, "query"),
    "roberta": (roberta, "query"),
    "albert": (albert, "query"),
    "deberta": (deberta, "query_proj"),
    "gpt2": (gpt2, "c_attn"),
}
#: Modules that peft adapts beside it, in one of its ways.
WAYS = {
    "LoRA": ["t5 shared", "t5 embed_tokens", "bart shared", "whisper proj_out", "gpt2 wte"],
    "saved": ["t5 shared", "t5 lm_head", "bart shared", "bart embed_tokens", "bert cls"],
    "tokens": ["t5 shared", "t5 lm_head", "bart shared", "bert word_embeddings"],
}
WAYS["saved"] += ["bert predictions", "bert decoder", "roberta lm_head", "roberta head"]
WAYS["saved"] += ["albert predictions", "deberta cls", "gpt2 lm_head"]
ADAPTED = [(*names.split(), way) for way, all_names in WAYS.items() for names in all_names]


@torch.no_grad()
def any_logits(model):
    inputs = {"input_ids": WORDS}
    if model.config.model_type == "whisper":
        features = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(1))
        inputs = {"input_features": features.double()}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = WORDS
    return model.eval()(**inputs).logits


@pytest.mark.filterwarnings("ignore:Model has")
@pytest.mark.parametrize(("family", "module", "way"), ADAPTED)
def test_an_adapter_changes_those_names_of_a_weight_that_it_changes_in_peft(
    tmp_path, family, module, way
):
    make, layer = TYING[family]
    base = make().double()
    base.save_pretrained(tmp_path / "base")
    config = {"target_modules": [layer]}
    if way == "LoRA":
        config["target_modules"].append(module)
    elif way == "tokens":
        config["trainable_token_indices"] = {module: [3, 7]}
    else:
        config["modules_to_save"] = [module]
    adapted = get_peft_model(deepcopy(base), LoraConfig(r=4, lora_alpha=8, **config)).double()
    adapt_at_random(adapted, 5, 0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = any_logits(adapted)
    assert (any_logits(base) - expected).abs().max() > 1e-6
    out = merge(tmp_path, ["adapter"], **SUM)
    always_tied = base.config.is_encoder_decoder or (family, module) == ("bert", "decoder")
    if not ON_LOADING and always_tied:
        pytest.skip("transformers 4 ties these, whatever is stored")
    result = type(base).from_pretrained(out, dtype=torch.float64)
    torch.testing.assert_close(any_logits(result), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.skipif(peft.__version__ < "0.19", reason="peft 0.18 can't make one of the two")
def test_rows_of_tokens_of_what_is_saved_in_full_are_refused_as_peft_runs_none(tmp_path, tied):
    base = gpt2()
    base.save_pretrained(tmp_path / "base")
    config = {"modules_to_save": ["lm_head"], "trainable_token_indices": {"wte": [3, 7]}}
    lora = LoraConfig(target_modules=["c_attn"], ensure_weight_tying=tied, **config)
    adapted = get_peft_model(deepcopy(base), lora)
    with pytest.raises(ValueError, match="TrainableTokensLayer wraps an unknown layer"):
        adapted(WORDS)
    adapted.save_pretrained(tmp_path / "adapter")
    for settings in ({}, {"adapter": True}):
        with pytest.raises(ValueError, match=r"rows of tokens and all of '.*', which peft"):
            plan(tmp_path, ["adapter"], base="base", settings=settings, **SUM)


@pytest.mark.filterwarnings("ignore:You have requested `ensure_weight_tying`")
@pytest.mark.skipif(not ON_LOADING, reason="transformers 4 ties these, whatever is stored")
def test_a_layer_that_peft_does_not_tie_has_its_own_rank(tmp_path):
    """It ties layers of two names alone, and a BERT has none of these."""
    base = bert().double()
    base.save_pretrained(tmp_path / "base")
    config = {"target_modules": ["query", "word_embeddings", "decoder"]}
    config |= {"rank_pattern": {"word_embeddings": 2}, "ensure_weight_tying": True}
    adapted = get_peft_model(deepcopy(base), LoraConfig(r=4, lora_alpha=8, **config)).double()
    adapt_at_random(adapted, 5, 0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    result = type(base).from_pretrained(merge(tmp_path, ["adapter"], **SUM), dtype=torch.float64)
    torch.testing.assert_close(any_logits(result), any_logits(adapted), rtol=0, atol=1e-9)


@pytest.mark.parametrize("what", ["LoRA of the embedding", "head", "tied LoRA", "tokens"])
def test_an_adapter_on_a_tied_weight_is_merged_as_into_the_untied_base(tmp_path, what):
    base = llama().double()
    base.save_pretrained(tmp_path / "base")
    finetuned(base, 1, scale=0.002).save_pretrained(tmp_path / "task1")
    save_adapter(tmp_path / "adapter", base, **ADAPTERS[what])
    save_untied(tmp_path / "untied", tmp_path / "base")
    save_untied(tmp_path / "untied1", tmp_path / "task1")
    result = tensors(merge(tmp_path, ["task1", "adapter"], **SUM))
    in_untied = plan(tmp_path, ["untied1", "adapter"], base="untied", **SUM)
    if what in ("tied LoRA", "tokens"):
        assert HEAD not in result
    else:
        assert same(result, tensors(merge_folders(in_untied, tmp_path / "expected")))


@pytest.mark.parametrize("options", [{}, {"target_modules": ["q_proj"]}])
def test_where_tied_weights_stay_the_bases_an_adapter_on_one_is_said_to_be_ignored(
    tmp_path, options
):
    base = llama()
    base.save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "adapter", base, **ADAPTERS["LoRA of the head"])
    planned = plan(tmp_path, ["adapter"], **options)
    assert any("also changes 'lm_head.weight': ignored" in text for text in planned.warnings)
    unmerged = tensors(tmp_path / "base")
    assert tensors(merge(tmp_path, ["adapter"], **options)).keys() == unmerged.keys()
    into_head = tensors(merge(tmp_path, ["adapter"], "head", target_modules=["lm_head"]))
    assert torch.equal(into_head[EMBEDDING], unmerged[EMBEDDING])
    assert not torch.equal(into_head[HEAD], into_head[EMBEDDING])


#: Where the second tensor is: in the base, in a task, in the model merged so far. As a layer, in a
#: mean, and as the only layer.
PLACES = [
    ("base", SUM),
    ("base", {"other_params": "mean"}),
    ("task1", {"target_modules": "lm_head"}),
    ("task2", {"other_params": "mean"}),
    ("merged", SUM),
    ("merged", {"target_modules": "lm_head"}),
]


@pytest.mark.parametrize(("place", "options"), PLACES)
def test_a_head_that_is_stored_apart_is_merged_apart_whatever_config_says(tmp_path, place, options):
    base = llama()
    models = {"base": base, "task1": finetuned(base, 1), "task2": finetuned(base, 2)}
    for seed, (name, model) in enumerate(models.items()):
        if name == place:
            save_apart(tmp_path / name, model, HEAD, seed)
        else:
            model.save_pretrained(tmp_path / name)
    if place == "merged":
        merge(tmp_path, ["task1"], "one", **options)
        one = tensors(tmp_path / "one")
        save_file({**one, HEAD: one[EMBEDDING] + 0.01}, tmp_path / "one" / "model.safetensors")
        merged = "one"
        tasks = ["task2"]
    else:
        merged = None
        tasks = ["task1", "task2"]
    settings = {"verify": False}
    out = merge(tmp_path, tasks, merged=merged, settings=settings, **options)
    for name in [*models, "one"]:  # the same models, with two tensors in every file
        if (tmp_path / name).exists():
            (path,) = (tmp_path / name).glob("model*.safetensors")
            stored = load_file(path)
            save_file({HEAD: stored[EMBEDDING].clone(), **stored}, path, metadata={"format": "pt"})
            change_json(tmp_path / name / "config.json", tie_word_embeddings=False)
    expected = merge(tmp_path, tasks, "expected", merged=merged, settings=settings, **options)
    assert same(tensors(out), tensors(expected))
    if place != "base":  # where both tasks have one tensor, so has the mean
        assert not torch.equal(tensors(out)[HEAD], tensors(out)[EMBEDDING])


#: Models, and what they tie: the first is stored.
FAMILIES = {
    "gpt2": (gpt2, "transformer.wte.weight", "lm_head.weight"),
    "bert": (bert, "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    "t5": (tied_t5, "shared.weight", "decoder.embed_tokens.weight"),
    "bart": (bart, "model.shared.weight", "model.decoder.embed_tokens.weight"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_a_config_ties_is_merged_as_the_tensors_that_models_have(tmp_path, family):
    make, first, second = FAMILIES[family]
    base = make()
    base.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    save_apart(tmp_path / "task1", finetuned(base, 1), second, 1)
    finetuned(base, 2).save_pretrained(tmp_path / "task2")
    out = merge(tmp_path, ["task1", "task2"], **SUM)
    one = tensors(tmp_path / "task1")
    two = tensors(tmp_path / "task2")
    result = tensors(out)
    torch.testing.assert_close(result[first], (one[first] + two[first]) / 2)
    torch.testing.assert_close(result[second], (one[second] + two[first]) / 2)
    assert result.keys() == {*tensors(tmp_path / "base"), second}
    merge(tmp_path, ["task1"], "one", **SUM)
    torch.testing.assert_close(tensors(merge(tmp_path, ["task2"], "two", "one", **SUM)), result)
    merge(tmp_path, ["task2"], "other", **SUM)
    other = tensors(merge(tmp_path, ["task1"], "order", "other", **SUM))
    torch.testing.assert_close(other, result)
    if ON_LOADING:
        loaded = type(base).from_pretrained(out).state_dict()
        torch.testing.assert_close(loaded[second], result[second], rtol=0, atol=0)
        torch.testing.assert_close(loaded[first], result[first], rtol=0, atol=0)


@pytest.mark.parametrize("apart", [1, 2, 3])
def test_one_at_a_time_in_bfloat16_is_all_at_once_wherever_the_second_tensor_comes(tmp_path, apart):
    base = llama().bfloat16()
    base.save_pretrained(tmp_path / "base")
    tasks = ["task1", "task2", "task3"]
    for number, name in enumerate(tasks, 1):
        model = finetuned(base, number)
        if number == apart:
            save_apart(tmp_path / name, model, HEAD, number)
        else:
            model.save_pretrained(tmp_path / name)
    options = {**SUM, "settings": {"state": True}}
    at_once = merge(tmp_path, tasks, **options)
    merged = None
    for name in tasks:
        out = merge(tmp_path, [name], f"up to {name}", merged, **options)
        merged = out.name
    assert same(tensors(out), tensors(at_once))
    assert same(tensors(out / "nufilt_state"), tensors(at_once / "nufilt_state"))


def test_an_interrupted_merge_with_a_second_tensor_goes_on(tmp_path):
    base = llama()
    base.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    save_apart(tmp_path / "task1", finetuned(base, 1), HEAD, 1)
    settings = {"dtype": "bfloat16"}
    options = {"tasks": ["task1"], "settings": settings, **SUM}
    expected = hashes(merge(tmp_path, **options))
    interrupt(tmp_path, out="again", **options)
    assert hashes(merge(tmp_path, out="again", **options)) == expected
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors(tmp_path / "out").keys()


def test_a_shared_module_is_two_layers_where_models_have_two_and_stays_shared_in_the_module():
    linear = nn.Linear(3, 4, bias=False)
    model = nn.ModuleDict({"one": linear, "two": linear})
    architecture = Architecture(model)
    targets = TargetConfig(target_modules="all-linear")
    apart = architecture.apart([["one.weight"], ["two.weight"]])
    assert list(architecture.select(targets)) == ["one"]
    assert list(apart.select(targets)) == ["one", "two"]
    assert model["one"] is model["two"]
    block = nn.ModuleDict({"linear": linear})
    shared_block = Architecture(nn.ModuleDict({"one": block, "two": block}))
    with pytest.raises(ValueError, match=r"can't hold 'two.linear.weight' apart "):
        shared_block.apart([["one.linear.weight"], ["two.linear.weight"]])


@pytest.mark.parametrize(
    ("place", "check_models"), [("_pretrained_", True), ("task1", False), ("task2", True)]
)
def test_pools_merge_two_tensors_as_two(tmp_path, place, check_models):
    base = llama()
    models = {"_pretrained_": base, "task1": finetuned(base, 1), "task2": finetuned(base, 2)}
    models[place].lm_head.weight = nn.Parameter(models[place].lm_head.weight.detach() + 0.01)
    models[place].config.tie_word_embeddings = False
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    (tmp_path / "_pretrained_").rename(tmp_path / "base")
    expected = tensors(merge(tmp_path, ["task1", "task2"], **SUM))
    before = {name: deepcopy(model.state_dict()) for name, model in models.items()}
    options = {key: value for key, value in SUM.items() if key != "method"}
    algorithm = LayerwiseMergingAlgorithm(
        "sum", shuffle_order=False, check_models=check_models, **options
    )
    merged = algorithm.run(models)
    assert same(merged.state_dict(), expected)
    assert all(same(model.state_dict(), before[name]) for name, model in models.items())
    merged.save_pretrained(tmp_path / "saved")
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert same(loaded.state_dict(), expected)


def test_a_language_model_in_a_larger_model_is_untied_in_its_own_configuration_too():
    """By which transformers 4 ties what it loads; a folder is merged to the same configuration."""
    text = hf.LlamaConfig(**SMALL, vocab_size=50, tie_word_embeddings=True)
    config = hf.LlavaConfig(
        vision_config=deepcopy(VISION), text_config=text, tie_word_embeddings=True
    )
    base = build(hf.LlavaForConditionalGeneration, config, 0)
    task = finetuned(base, 1)
    task.lm_head.weight = nn.Parameter(base.lm_head.weight.detach() + 0.01)
    algorithm = LayerwiseMergingAlgorithm("sum", other_params="mean")
    merged = algorithm.run({"_pretrained_": base, "task": task})
    assert merged.config.tie_word_embeddings is False
    assert merged.config.text_config.tie_word_embeddings is False
    assert base.config.text_config.tie_word_embeddings is True


@pytest.mark.oldest
def test_a_head_of_its_own_is_loaded_where_the_configurations_of_a_larger_model_are_silent(
    tmp_path,
):
    base = released("Gemma 3").double()
    base.save_pretrained(tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    for part in (config, config["text_config"]):
        part.pop("tie_word_embeddings", None)
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    lora = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    adapted = get_peft_model(deepcopy(base), lora)
    adapt_at_random(adapted, 5)
    adapted.save_pretrained(tmp_path / "adapter")
    out = type(base).from_pretrained(merge(tmp_path, ["adapter"], **SUM), dtype=torch.float64)
    expected = adapted.merge_and_unload()
    torch.testing.assert_close(out.lm_head.weight, expected.lm_head.weight)
    assert torch.equal(out.get_input_embeddings().weight, base.get_input_embeddings().weight)


def test_a_pool_goes_on_from_a_merged_model_with_two_tensors(tmp_path):
    base = llama()
    models = {"base": base, "task1": finetuned(base, 1), "task2": finetuned(base, 2)}
    models["task1"].lm_head.weight = nn.Parameter(base.lm_head.weight.detach() + 0.01)
    models["task1"].config.tie_word_embeddings = False
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    merge(tmp_path, ["task1"], "one", **SUM)
    expected = tensors(merge(tmp_path, ["task2"], merged="one", **SUM))
    options = {key: value for key, value in SUM.items() if key != "method"}
    folders = {"_pretrained_": "base", "_merged_": "one", "task2": "task2"}
    models = pool(tmp_path, hf.LlamaForCausalLM, **folders)
    algorithm = LayerwiseMergingAlgorithm("sum", shuffle_order=False, **options)
    assert same(algorithm.run(models).state_dict(), expected)


@pytest.mark.slow
def test_a_run_with_two_tensors_is_resumed(tmp_path):
    base = llama()
    models = {"_pretrained_": base, **{f"task{i}": finetuned(base, i) for i in (1, 2, 3)}}
    models["task1"].lm_head.weight = nn.Parameter(base.lm_head.weight.detach() + 0.01)

    def algorithm():
        options = {key: value for key, value in SUM.items() if key != "method"}
        return LayerwiseMergingAlgorithm("sum", shuffle_order=False, **options)

    whole = algorithm().run(models)
    with pytest.raises(InterruptedRunError):
        logging_to(tmp_path, algorithm()).run(models, on_step=interrupt_after(2))
    again = logging_to(tmp_path, algorithm()).run(models)
    assert same(again.state_dict(), whole.state_dict())


def test_other_methods_refuse_two_tensors_until_the_base_has_two_as_the_message_says(tmp_path):
    base = llama()
    task = finetuned(base, 1)
    task.lm_head.weight = nn.Parameter(base.lm_head.weight.detach() + 0.01)
    message = (
        r"'math' has 'model\.embed.*', 'lm_head.*' as weights of their own.*"
        "copy the embedding of its base into the head"
    )
    with pytest.raises(ValueError, match=message):
        check_module(base, task, "math")
    base.save_pretrained(tmp_path / "base")
    save_untied(tmp_path / "untied", tmp_path / "base")
    untied = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "untied")
    torch.testing.assert_close(untied(WORDS).logits, base(WORDS).logits)
    check_module(untied, task, "math")
