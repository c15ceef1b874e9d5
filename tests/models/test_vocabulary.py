"""Vocabularies that grew: rows are matched by token, and new tokens keep the rows of the model that
brought them.
"""

import re
import shutil

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from fusion_bench_nufilt import load_task
from tests.cli.helpers import nufilt
from tests.families import FAMILIES
from tests.merge.helpers import (
    change,
    change_json,
    manifest,
    merge,
    plan,
    same,
    tensors,
)
from tests.models.test_ties import bart
from tests.tiny_models import SMALL, build, finetuned, llama

WORDS = 48  # of the tokenizers; the embeddings of the models have 50 rows
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
MEAN = {"other_params": "mean"}
OF_CODE = ("<fim>", "indent", "<eot>")
OF_CHAT = ("<user>", "<bot>", "smile", "<end>")


def tokenizer(*new, template=None):
    """A tokenizer of the words w0 ... w47, and of some tokens that were added to them."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w0", eos_token="w1", chat_template=template
    )
    made.add_tokens(
        [AddedToken(token, special=token.startswith("<"), normalized=False) for token in new]
    )
    return made


def save(folder, model, *new, rows=None, template=None, seed=0):
    """A model with its tokenizer; new tokens get rows, and those of a seed are drawn by it."""
    made = tokenizer(*new, template=template)
    torch.manual_seed(seed)
    if rows or len(made) > model.config.vocab_size:
        model.resize_token_embeddings(rows or len(made), mean_resizing=False)
    model.save_pretrained(folder)
    made.save_pretrained(folder)


@pytest.fixture
def grown(tmp_path):
    """A base of 50 rows and 48 words; one task has two tokens of its own, another three, one
    padding alone.
    """
    base = llama(tie_word_embeddings=False)
    save(tmp_path / "base", base)
    save(tmp_path / "code", finetuned(base, seed=1), *OF_CODE, template="code", seed=1)
    save(tmp_path / "chat", finetuned(base, seed=2), *OF_CHAT, template="chat", seed=2)
    save(tmp_path / "padded", finetuned(base, seed=3), rows=64)
    return tmp_path


def row(folder, token, key=EMBEDDING):
    return tensors(folder)[key][AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(token)]


def loads(folder, text="w2 <fim>w3", rows=None):
    """The result is a model of as many rows as its config says, and splits a text as it should."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    words = AutoTokenizer.from_pretrained(folder)
    count = len(model.get_input_embeddings().weight)
    assert model.config.vocab_size == count == (rows or len(words))
    ids = words(text, return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()
    return words.convert_ids_to_tokens(ids[0])


@pytest.mark.parametrize("options", [MEAN, {}, {"method": "sum", "scale": 1.0, **MEAN}])
def test_every_new_token_keeps_its_row_and_the_others_are_merged_as_without_new_ones(
    grown, options
):
    # With the head as a layer, unless it is averaged.
    targets = {} if options is MEAN else {"target_modules": ["q_proj", "lm_head"]}
    merged = merge(grown, ["code", "chat"], **options, **targets)
    assert loads(merged, "w2<fim>w3 <end> smile") == ["w2", "<fim>", "w3", "<end>", "smile"]
    for name in ("code", "chat"):  # the same models without new tokens
        for key in (EMBEDDING, HEAD):
            rows = tensors(grown / "base")[key][WORDS:]
            change(grown / name, key, lambda value, rows=rows: torch.cat([value[:WORDS], rows]))
        for path in grown.joinpath("base").glob("*.json"):
            if path.name != "model.safetensors.index.json":
                shutil.copy(path, grown / name)
    plain = tensors(merge(grown, ["code", "chat"], "plain", **options, **targets))
    result = tensors(merged)
    assert result.keys() == plain.keys()
    for key, value in plain.items():
        if key in (EMBEDDING, HEAD):
            assert torch.equal(result[key][:WORDS], value[:WORDS])
        else:
            assert torch.equal(result[key], value)


# New tokens, of which model, and their rows in it.
NEW = [("code", "<fim>", 48), ("code", "<eot>", 50), ("chat", "<user>", 48), ("chat", "<end>", 51)]


def test_new_tokens_keep_their_rows_in_every_embedding(grown):
    out = merge(grown, ["code", "chat", "padded"], **MEAN)
    for key in (EMBEDDING, HEAD):
        for name, token, i in NEW:
            assert torch.equal(row(out, token, key), tensors(grown / name)[key][i]), token
    assert len(tensors(out)[EMBEDDING]) == WORDS + 7
    assert manifest(out)["vocabulary"]["new_tokens"]["smile"] == "chat"
    words = AutoTokenizer.from_pretrained(out)
    assert words.chat_template == "code"
    assert {"<fim>": True, "smile": False}.items() <= {
        t.content: t.special for t in words.added_tokens_decoder.values()
    }.items()


def test_the_tokens_of_one_model_or_of_the_base(grown):
    settings = {"tokenizer": "chat"}
    out = merge(grown, ["code", "chat"], settings=settings, **MEAN)
    assert loads(out, "w2 <user>w3 <fim>")[:3] == ["w2", "<user>", "w3"]
    assert AutoTokenizer.from_pretrained(out).chat_template == "chat"
    assert torch.equal(row(out, "<end>"), tensors(grown / "chat")[EMBEDDING][51])
    assert any(
        "'code' has tokens that the result does not have (tokenizer=chat): '<eot>', '<fim>', "
        "'indent'" in text
        for text in manifest(out)["warnings"]
    )
    base = merge(grown, ["code", "chat"], "plain", settings={"tokenizer": "base"}, **MEAN)
    assert loads(base, "w2 w3", rows=50) == ["w2", "w3"]
    for path in grown.joinpath("base").glob("*.json"):
        assert path.read_bytes() == (base / path.name).read_bytes()
    with pytest.raises(
        ValueError, match="tokenizer 'cat' is neither base nor union nor one of 'code', 'chat'"
    ):
        plan(grown, ["code", "chat"], settings={"tokenizer": "cat"})


def test_the_ids_of_special_tokens_follow_the_tokenizer(grown):
    change_json(grown / "chat" / "generation_config.json", eos_token_id=[1, 51], pad_token_id=50)
    change_json(grown / "chat" / "config.json", eos_token_id=51)
    out = merge(grown, ["code", "chat"], settings={"tokenizer": "chat"})
    model = AutoModelForCausalLM.from_pretrained(out)
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (51, [1, 51])
    union = AutoModelForCausalLM.from_pretrained(merge(grown, ["code", "chat"], "union"))
    base = AutoModelForCausalLM.from_pretrained(grown / "base")
    assert union.config.eos_token_id == base.config.eos_token_id
    assert union.generation_config == base.generation_config


@pytest.fixture
def trained(grown):
    """Two more fine-tunes that each trained the token <fim> of `code`, at other numbers."""
    base = AutoModelForCausalLM.from_pretrained(grown / "base")
    save(grown / "other", finetuned(base, seed=5), "<fim>", seed=5)
    save(grown / "third", finetuned(base, seed=6), "<mask>", "<fim>", seed=6)
    return grown


def rows_of(folder, token, names, key):
    return [row(folder / name, token, key).float() for name in names]


def test_rows_of_a_token_that_several_models_trained_are_averaged_whatever_the_rule(trained):
    out = merge(trained, ["code", "chat", "other", "third"])
    assert loads(out) == ["w2", "<fim>", "w3"]
    for key in (EMBEDDING, HEAD):
        of_all = rows_of(trained, "<fim>", ("code", "other", "third"), key)
        torch.testing.assert_close(row(out, "<fim>", key), torch.stack(of_all).mean(0))
        assert torch.equal(row(out, "<mask>", key), row(trained / "third", "<mask>", key))
    assert manifest(out)["vocabulary"]["new_tokens"]["<fim>"] == "code, other, third"
    assert manifest(out)["vocabulary"]["token_weights"] == {"<fim>": 3}


def test_rows_of_a_token_have_the_weights_of_their_models(trained):
    settings = {"weights": [3.0, 1.0, 1.0]}
    out = merge(trained, ["code", "chat", "other"], settings=settings, **MEAN)
    code, other = rows_of(trained, "<fim>", ("code", "other"), EMBEDDING)
    torch.testing.assert_close(row(out, "<fim>"), 0.75 * code + 0.25 * other)
    assert torch.equal(row(out, "<eot>"), row(trained / "code", "<eot>"))


@pytest.mark.parametrize("weights", [[0.0, 1.0], [-1.0, 2.0], [0.0, 0.0]])
def test_a_model_without_weight_brings_a_token_that_no_other_has(trained, weights):
    out = merge(trained, ["code", "other"], settings={"weights": weights}, **MEAN)
    bringer = "other"
    if weights[1] == 0:
        bringer = "code"
    assert torch.equal(row(out, "<fim>"), row(trained / bringer, "<fim>"))
    assert torch.equal(row(out, "<eot>"), row(trained / "code", "<eot>"))


def test_the_first_task_alone_decides_where_the_others_change_no_other_parameters(trained):
    out = merge(trained, ["code", "other"], other_params="first")
    assert torch.equal(row(out, "<fim>"), row(trained / "code", "<fim>"))
    merge(trained, ["code"], "one", other_params="first")
    two = merge(trained, ["other"], "two", merged="one", other_params="first")
    assert same(tensors(two), tensors(out))


@pytest.mark.parametrize(
    ("options", "dtype", "weights"),
    [
        (
            {"method": "sum", "target_modules": ["lm_head", "up_proj"], **MEAN},
            torch.float32,
            3 * [1.0],
        ),
        (MEAN, torch.bfloat16, [2.0, 0.5, 1.0]),
    ],
)
def test_rows_of_a_token_are_the_same_one_model_at_a_time_in_any_order(
    trained, options, dtype, weights
):
    tasks = ["code", "other", "third"]
    for name in ("base", *tasks):
        AutoModelForCausalLM.from_pretrained(trained / name, dtype=dtype).save_pretrained(
            trained / name
        )
    at_once = merge(trained, tasks, settings={"state": True, "weights": weights}, **options)
    for order in (1, -1):
        merged = None
        for name, weight in list(zip(tasks, weights, strict=True))[::order]:
            settings = {"state": True, "weights": [weight]}
            out = merge(trained, [name], f"{order} {name}", merged, settings=settings, **options)
            merged = out.name
        assert loads(out) == ["w2", "<fim>", "w3"]
        for key in (EMBEDDING, HEAD):
            rows = [row(each, "<fim>", key).float() for each in (out, at_once)]
            # The means of two orders may be rounded to neighbours.
            tolerance = 1e-6 if dtype == torch.float32 else 2**-8
            torch.testing.assert_close(*rows, rtol=tolerance, atol=1e-6)
        # Of a mean, the state has all digits, those of the rows of new tokens as well.
        if options is MEAN and order == 1:
            assert torch.equal(row(out, "<fim>"), row(at_once, "<fim>"))
            assert same(tensors(out / "nufilt_state"), tensors(at_once / "nufilt_state"))
        weights_of_tokens = [
            manifest(each)["vocabulary"]["token_weights"] for each in (out, at_once)
        ]
        assert weights_of_tokens[0] == weights_of_tokens[1]


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"target_modules": ["up_proj"], **MEAN}, torch.bfloat16),
        ({"method": "sum", **MEAN}, torch.float32),
    ],
)
def test_going_on_keeps_the_earlier_tokens(grown, options, dtype):
    settings = {"state": True}
    options = {"target_modules": ["lm_head", "up_proj"], "settings": settings, **options}
    for name in ("base", "code", "chat", "padded"):
        AutoModelForCausalLM.from_pretrained(grown / name, dtype=dtype).save_pretrained(
            grown / name
        )
    at_once = merge(grown, ["code", "padded", "chat"], **options)
    merge(grown, ["code"], "one", **options)
    merge(grown, ["padded"], "two", merged="one", **options)
    out = merge(grown, ["chat"], "three", merged="two", **options)
    assert (out / "config.json").read_bytes() == (at_once / "config.json").read_bytes()
    assert loads(out, "w2<fim>w3 <end>") == ["w2", "<fim>", "w3", "<end>"]
    result = tensors(out)
    expected = tensors(at_once)
    for key in expected:
        assert torch.equal(result[key], expected[key]), key
    for name, token, i in NEW:
        assert torch.equal(row(out, token, HEAD), tensors(grown / name)[HEAD][i])


def masked(kind):
    """A BERT without rows beside those of its tokens."""
    return build(kind, hf.BertConfig(**SMALL, vocab_size=WORDS), 0)


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, ["code", "sentiment"]),
        (MEAN, ["sentiment", "code"]),
        ({"other_params": "first"}, ["sentiment", "code"]),
    ],
)
def test_new_tokens_keep_their_rows_beside_a_classifier_without_a_head_for_them(
    tmp_path, order, options
):
    base = masked(hf.BertForMaskedLM)
    save(tmp_path / "base", base)
    save(tmp_path / "code", finetuned(base, seed=1), *OF_CODE, seed=1)
    classifier = masked(hf.BertForSequenceClassification)
    classifier.bert.load_state_dict(base.bert.state_dict(), strict=False)
    save(tmp_path / "sentiment", finetuned(classifier, seed=2))
    result = tensors(merge(tmp_path, order, **options))
    code = tensors(tmp_path / "code")
    for key in ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias"):
        assert torch.equal(result[key][WORDS:], code[key][WORDS:])
    head = load_task(tmp_path / "out", "code").cls.predictions.bias
    assert torch.equal(head, code["cls.predictions.bias"])


@pytest.mark.parametrize("options", [{}, MEAN])
def test_tokens_that_only_a_classifier_has_get_the_mean_row_of_the_head_that_it_lacks(
    tmp_path, options
):
    base = llama(tie_word_embeddings=False)
    base.resize_token_embeddings(WORDS)
    save(tmp_path / "base", base)
    config = hf.LlamaConfig(**{**base.config.to_dict(), "pad_token_id": 0})
    classifier = hf.LlamaForSequenceClassification(config)
    classifier.model.load_state_dict(base.model.state_dict())
    save(tmp_path / "sentiment", finetuned(classifier, seed=2), *OF_CODE, seed=2)
    out = merge(tmp_path, ["sentiment"], **options)
    assert any("no model has rows of 'lm_head" in text for text in manifest(out)["warnings"])
    assert torch.equal(row(out, "<fim>"), row(tmp_path / "sentiment", "<fim>"))
    expected = tensors(tmp_path / "base")[HEAD].mean(0)
    torch.testing.assert_close(row(out, "<fim>", HEAD), expected)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma", "t5"])
def test_tied_heads_stay_tied(tmp_path, family):
    base = FAMILIES.get(family, llama)()
    save(tmp_path / "base", base)
    save(tmp_path / "code", finetuned(base, seed=1), "<a>", "<b>", "<c>", seed=1)
    out = merge(tmp_path, ["code"], **MEAN)
    kind = type(base)
    model = kind.from_pretrained(out)
    code = kind.from_pretrained(tmp_path / "code")
    assert model.get_input_embeddings().weight.shape[0] == 51
    for get in ("get_input_embeddings", "get_output_embeddings"):
        found = getattr(model, get)().weight
        expected = getattr(code, get)().weight
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_new_tokens_beside_a_bias_of_all_tokens_need_a_base_that_has_them(tmp_path):
    """Such a bias of a BART has a column for every token, and transformers loads no other size."""
    base = bart()
    save(tmp_path / "base", base)
    save(tmp_path / "code", finetuned(base, seed=1), "<a>", "<b>", "<c>", seed=1)
    with pytest.raises(ValueError, match=r"base' has 'final_logits_bias' for 50 tokens, .* 51: "):
        merge(tmp_path, ["code"], **MEAN)
    save(tmp_path / "base", base, "<a>", "<b>", "<c>")
    out = merge(tmp_path, ["code"], **MEAN)
    code = type(base).from_pretrained(tmp_path / "code").state_dict()
    result = type(base).from_pretrained(out).state_dict()
    assert torch.equal(result["model.shared.weight"], code["model.shared.weight"])
    assert result["final_logits_bias"].shape == (1, 51)


def test_rows_are_matched_by_token_where_a_tokenizer_has_another_order(grown):
    order = torch.randperm(WORDS, generator=torch.Generator().manual_seed(1))
    words = Tokenizer(WordLevel({f"w{order[i]}": i for i in range(WORDS)}, unk_token="w0"))
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    made.add_tokens(["<new>"])
    plain = merge(grown, ["padded"], "plain", **MEAN)
    for key in (EMBEDDING, HEAD):
        change(
            grown / "padded", key, lambda value: torch.cat([value[:WORDS][order], value[WORDS:]])
        )
    made.save_pretrained(grown / "padded")
    out = merge(grown, ["padded"], **MEAN)
    for key in (EMBEDDING, HEAD):
        assert torch.equal(tensors(out)[key][:WORDS], tensors(plain)[key][:WORDS])
        assert torch.equal(row(out, "<new>", key), tensors(grown / "padded")[key][WORDS])
    with pytest.raises(
        ValueError, match=r"token 'w.*' has number .* in 'padded' and .* in the base"
    ):
        plan(grown, ["padded"], settings={"tokenizer": "padded"})


def test_without_a_tokenizer_rows_are_matched_by_their_numbers(grown):
    for path in grown.glob("*/*token*.json"):
        path.unlink()
    warnings = plan(grown, ["padded"]).warnings
    assert any(
        "the rows of 'padded' and the base are matched by their numbers" in text
        for text in warnings
    )
    out = merge(grown, ["padded"], **MEAN)
    assert torch.equal(tensors(out)[HEAD][50:], tensors(grown / "padded")[HEAD][50:])
    assert AutoModelForCausalLM.from_pretrained(out).config.vocab_size == 64
    with pytest.raises(
        ValueError, match="token 'row 50' is new in 'padded', 'code' with different rows"
    ):
        plan(grown, ["padded", "code"])


def test_an_adapter_brings_its_tokens(grown):
    model = AutoModelForCausalLM.from_pretrained(grown / "base")
    torch.manual_seed(7)
    model.resize_token_embeddings(52, mean_resizing=False)
    config = LoraConfig(
        target_modules=["q_proj"],
        modules_to_save=["embed_tokens", "lm_head"],
        init_lora_weights=False,
    )
    model = get_peft_model(model, config)
    model.save_pretrained(grown / "adapter")
    tokenizer("<a>", "<b>", "<c>", "<d>").save_pretrained(grown / "adapter")
    whole = model.merge_and_unload()
    out = tensors(merge(grown, ["adapter"], method="sum", scale=1.0, **MEAN))
    assert torch.equal(out[EMBEDDING], whole.get_input_embeddings().weight)
    assert torch.equal(out[HEAD], whole.get_output_embeddings().weight)
    kept = merge(grown, ["adapter"], "kept")
    assert torch.equal(tensors(kept)[HEAD][WORDS:], out[HEAD][WORDS:])
    (text,) = [text for text in manifest(kept)["warnings"] if "also changes" in text]
    assert text.endswith(f"'{HEAD}', '{EMBEDDING}': ignored but for the rows of its new tokens")
    _, text = nufilt(
        *("merge", "--base", grown / "base", "--task", grown / "adapter"),
        *("--out", grown / "none", "--dry-run"),
    )
    assert "left out, but for rows of new tokens: " in " ".join(text.split())


def test_rows_that_only_pad_the_vocabulary_move_with_an_adapter_as_in_pefts_model(tmp_path):
    save(tmp_path / "base", llama(tie_word_embeddings=False), rows=56)
    torch.manual_seed(7)
    config = LoraConfig(target_modules=["embed_tokens", "lm_head"], init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
    model.save_pretrained(tmp_path / "adapter")
    whole = model.merge_and_unload().state_dict()
    options = {"method": "sum", "scale": 1.0, "target_modules": ["lm_head"], **MEAN}
    out = tensors(merge(tmp_path, ["adapter"], **options))
    for key in (EMBEDDING, HEAD):
        torch.testing.assert_close(out[key], whole[key])


@pytest.mark.parametrize("what", ["factors", "tokens"])
def test_the_row_of_a_new_token_is_the_one_on_which_an_adapter_was_trained(tmp_path, what):
    """Who adds a token in the rows that pad the vocabulary may begin with another row there."""
    save(tmp_path / "base", llama(tie_word_embeddings=False), rows=56)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        model.get_input_embeddings().weight[WORDS : WORDS + 2] += 1
    config = LoraConfig(target_modules=["q_proj", "embed_tokens"], init_lora_weights=False)
    if what == "tokens":
        config = LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3, WORDS + 1])
    model = get_peft_model(model, config)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    tokenizer("<one>", "<two>").save_pretrained(tmp_path / "adapter")
    whole = model.merge_and_unload().state_dict()
    out = tensors(merge(tmp_path, ["adapter"], method="sum", scale=1.0, **MEAN))
    torch.testing.assert_close(out[EMBEDDING][: WORDS + 2], whole[EMBEDDING][: WORDS + 2])


def test_factors_of_an_embedding_move_no_row_of_a_token_that_another_task_brings(tmp_path):
    base = llama(tie_word_embeddings=False)
    save(tmp_path / "base", base, rows=50)
    save(tmp_path / "code", finetuned(base, seed=2), *(f"<{i}>" for i in range(4)))
    torch.manual_seed(7)
    config = LoraConfig(target_modules=["embed_tokens", "q_proj"], init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
    model.save_pretrained(tmp_path / "adapter")
    whole = model.merge_and_unload().state_dict()[EMBEDDING]
    out = tensors(merge(tmp_path, ["code", "adapter"], **MEAN))[EMBEDDING]
    code = tensors(tmp_path / "code")[EMBEDDING]
    torch.testing.assert_close(out[:WORDS], (code[:WORDS] + whole[:WORDS]) / 2)
    assert torch.equal(out[WORDS:], code[WORDS:])


def test_beside_new_tokens_rows_of_a_model_that_only_pad_the_vocabulary_do_not_count(tmp_path):
    base = llama(tie_word_embeddings=False)
    save(tmp_path / "base", base, rows=56)
    save(tmp_path / "code", finetuned(base, seed=2), "<fim>")
    save(tmp_path / "task", finetuned(base, seed=1))
    options = {"method": "best", "target_modules": ["lm_head", "q_proj"], **MEAN}
    expected = tensors(merge(tmp_path, ["task", "code"], "expected", **options))
    for key in (EMBEDDING, HEAD):
        assert torch.equal(expected[key][WORDS + 1 :], base.state_dict()[key][WORDS + 1 :])
        change(tmp_path / "task", key, lambda value: torch.cat([value[:WORDS], value[WORDS:] + 1]))
    assert same(tensors(merge(tmp_path, ["task", "code"], **options)), expected)


def save_dora(folder, module):
    """An adapter that changes a table of tokens by DoRA, and names two rows beyond the words."""
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    torch.manual_seed(7)
    config = LoraConfig(target_modules=["q_proj", module], use_dora=True, init_lora_weights=False)
    model = get_peft_model(model, config)
    model.save_pretrained(folder / "adapter")
    tokenizer("<a>", "<b>").save_pretrained(folder / "adapter")
    return model.merge_and_unload()


def test_the_row_of_a_token_in_a_head_that_dora_changed_is_that_of_pefts_model(grown):
    whole = save_dora(grown, "lm_head")
    options = {"method": "sum", "scale": 1.0, "target_modules": ["q_proj", "lm_head"]}
    out = tensors(merge(grown, ["adapter"], **options, **MEAN))
    torch.testing.assert_close(out[HEAD], whole.get_output_embeddings().weight.detach())


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_dora_outside_the_layers_is_refused_beside_new_tokens_as_without_them(grown, module):
    save_dora(grown, module)
    for path in (grown / "adapter").glob("*token*"):
        path.unlink()
    for tasks in (["adapter"], ["code", "adapter"]):
        with pytest.raises(ValueError, match=f"{module}.weight' by DoRA outside the merged layers"):
            plan(grown, tasks, target_modules=["q_proj"], **MEAN)


def test_the_rows_of_tokens_in_an_embedding_that_dora_changed_are_left_out_on_demand(grown):
    save_dora(grown, "embed_tokens")
    with pytest.raises(ValueError, match=r"by DoRA, so that the rows.*--tokenizer base"):
        merge(grown, ["adapter"])
    out = merge(grown, ["adapter"], "out2", settings={"tokenizer": "base"})
    assert len(AutoTokenizer.from_pretrained(out)) == WORDS


def test_a_tokenizer_that_cannot_be_read_is_said_also_where_the_rows_are_as_many(grown):
    save(grown / "other", finetuned(AutoModelForCausalLM.from_pretrained(grown / "base"), seed=4))
    assert not plan(grown, ["other"]).vocabulary.grown
    path = grown / "other" / "tokenizer.json"
    path.write_text(path.read_text()[:-9])  # as an interrupted copy leaves it
    (warning,) = [
        text for text in plan(grown, ["other"]).warnings if "matched by their numbers" in text
    ]
    assert "the rows of 'other' and the base" in warning
    assert re.search(
        r"the tokenizer of 'other' \('tokenizer.json'.*\) can't be read: .*; mend it, or install",
        warning,
    )


def test_if_the_tokenizer_of_the_base_cannot_be_read_the_warning_is_of_the_base(grown):
    for seed, name, template in ((4, "one", "a"), (5, "two", "b")):
        base = AutoModelForCausalLM.from_pretrained(grown / "base")
        # Their files differ from the base's.
        save(grown / name, finetuned(base, seed), template=template)
    (grown / "base" / "tokenizer.json").write_text("{")
    warnings = [
        text for text in plan(grown, ["one", "two"]).warnings if "matched by their numbers" in text
    ]
    assert [text.partition("'")[2].partition("'")[0] for text in warnings] == ["one", "two"]
    assert all("the tokenizer of 'base' (" in text for text in warnings)


@pytest.mark.parametrize("choice", ["plain", "base", "union"])
def test_a_tokenizer_that_changes_nothing_is_recorded_as_it_was_given(tmp_path, choice):
    save(tmp_path / "base", llama())
    save(tmp_path / "plain", finetuned(llama(), 1, 0.002))
    out = merge(tmp_path, ["plain"], settings={"tokenizer": choice})
    assert manifest(out)["settings"]["tokenizer"] == choice
    assert manifest(out)["vocabulary"] == {}


def template_of(folder):
    return AutoTokenizer.from_pretrained(folder).chat_template


def keep_template_in_the_configuration(folder):
    """As transformers did before it wrote templates to files of their own."""
    path = folder / "chat_template.jinja"
    if path.exists():
        change_json(folder / "tokenizer_config.json", chat_template=path.read_text())
        path.unlink()


@pytest.mark.parametrize(("new", "in_config"), [((), False), (("<new>",), True)])
def test_the_chat_template_is_the_first_whether_a_vocabulary_grew_or_not(tmp_path, new, in_config):
    base = llama()
    templates = {"base": None, "plain": None, "code": "code", "chat": "chat"}
    for seed, (name, template) in enumerate(templates.items()):
        tokens = ()
        if name == "chat":
            tokens = new
        save(tmp_path / name, finetuned(base, seed, 0.002), *tokens, template=template)
        if in_config:
            keep_template_in_the_configuration(tmp_path / name)
    assert template_of(merge(tmp_path, ["plain"], "none", **MEAN)) is None
    assert template_of(merge(tmp_path, ["plain", "code", "chat"], "a", **MEAN)) == "code"
    assert template_of(merge(tmp_path, ["chat", "code"], "b", **MEAN)) == "chat"
    merge(tmp_path, ["plain"], "one", **MEAN)
    merge(tmp_path, ["code"], "two", merged="one", **MEAN)
    three = merge(tmp_path, ["chat"], "three", merged="two", **MEAN)
    assert template_of(three) == "code"
    for choice, template in (("base", None), ("chat", "chat"), ("plain", None)):
        settings = {"tokenizer": choice}
        out = merge(tmp_path, ["code", "chat", "plain"], f"of {choice}", settings=settings, **MEAN)
        assert template_of(out) == template


def test_the_bases_own_template_stays_and_its_files_are_not_written_anew(tmp_path):
    base = llama()
    for name in ("base", "code"):
        save(tmp_path / name, finetuned(base, seed=len(name)), template=name)
    out = merge(tmp_path, ["code"], **MEAN)
    for path in (tmp_path / "base").iterdir():
        if "token" in path.name or "template" in path.name:
            assert (out / path.name).read_bytes() == path.read_bytes()
    assert template_of(out) == "base"


@pytest.mark.parametrize("in_config", [False, True])
def test_templates_of_several_names_are_kept_together(tmp_path, in_config):
    base = llama()
    templates = {"default": "a", "tool_use": "b"}
    save(tmp_path / "base", base)
    save(tmp_path / "code", finetuned(base, seed=1), template=templates)
    if in_config:
        for path in [*(tmp_path / "code").rglob("*.jinja")]:
            path.unlink()
        listed = [{"name": name, "template": text} for name, text in templates.items()]
        change_json(tmp_path / "code" / "tokenizer_config.json", chat_template=listed)
    assert template_of(merge(tmp_path, ["code"], **MEAN)) == templates


def test_a_folder_with_a_template_alone_has_the_bases_tokens(tmp_path):
    base = llama()
    save(tmp_path / "base", base)
    finetuned(base, seed=1).save_pretrained(tmp_path / "code")
    (tmp_path / "code" / "chat_template.jinja").write_text("code")
    assert not [text for text in plan(tmp_path, ["code"]).warnings if "by their numbers" in text]
    assert template_of(merge(tmp_path, ["code"], **MEAN)) == "code"
