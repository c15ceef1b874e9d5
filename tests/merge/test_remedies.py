"""Every remedy that a message about an adapter gives is followed here, and its result compared."""

import shutil
from copy import deepcopy

import peft
import pytest
import torch
import transformers as hf
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

from fusion_bench_nufilt.merge import merge_folders
from tests.families import FAMILIES, openclip
from tests.merge.helpers import merge, plan, save_stream, tensors
from tests.models.test_experts import fused, square
from tests.released import released
from tests.tiny_models import adapt_at_random, finetuned, llama

pytest.importorskip("peft", minversion="0.21", reason="KaSA and others came with peft 0.21")

WORDS = torch.arange(12).reshape(1, 12)
ALONE = {"method": "sum", "scale": 1.0, "other_params": "mean", "target_modules": "all-linear"}
WITH_PEFT = "with peft (merge_and_unload), and give that folder"
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


@torch.no_grad()
def train(folder, model, config, name="adapter"):
    """Save a base, and an adapter on it; return the logits of peft's model."""
    model.save_pretrained(folder / "base")
    return train_on(folder, load(folder / "base"), config, name)


@torch.no_grad()
def train_on(folder, base, config, name="adapter", words=WORDS, **options):
    adapted = get_peft_model(base, config)
    adapt_at_random(adapted, 5, 0.1)
    adapted.save_pretrained(folder / name, **options)
    return adapted.eval()(words).logits


def refusal(folder, base="base"):
    with pytest.raises(ValueError, match="adapter") as refused:
        merge_folders(plan(folder, ["adapter"], base=base, **ALONE), folder / "refused")
    return str(refused.value)


def merge_with_peft(folder, base):
    adapted = PeftModel.from_pretrained(base, folder / "adapter")
    adapted.merge_and_unload().save_pretrained(folder / "merged")


@torch.no_grad()
def logits(folder, words=WORDS):
    return load(folder).eval()(words).logits


def copy_head(folder):
    """Do what messages say about a base with a tied head."""
    model = load(folder / "base")
    model.lm_head.weight = nn.Parameter(model.get_input_embeddings().weight.detach().clone())
    model.config.tie_word_embeddings = False
    model.save_pretrained(folder / "untied")
    return load(folder / "untied")


MERGED_BY_PEFT = {
    "KasaLinearVariant": LoraConfig(**LORA, kasa_config=peft.tuners.lora.config.KasaConfig()),
    "BdLoraLinearVariant": LoraConfig(
        **LORA, use_bdlora=peft.BdLoraConfig(target_modules_bd_a=["q_proj"], nblocks=2)
    ),
    "ADALORA": peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10),  # with A and B, too
    "IA3": peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
    "OFT": peft.OFTConfig(target_modules=["q_proj"], oft_block_size=4),
    "DoRA": LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], use_dora=True),
    "VERA": peft.VeraConfig(target_modules=["q_proj"], r=4),
}


@pytest.mark.parametrize("feature", MERGED_BY_PEFT)
def test_what_peft_merges_is_given_as_a_folder(tmp_path, feature):
    expected = train(tmp_path, llama(tie_word_embeddings=False), MERGED_BY_PEFT[feature])
    message = refusal(tmp_path)
    assert feature in message
    assert message.endswith(f"merge it into its base {WITH_PEFT}")
    merge_with_peft(tmp_path, load(tmp_path / "base"))
    torch.testing.assert_close(logits(merge(tmp_path, ["merged"], **ALONE)), expected)


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_what_peft_merges_is_merged_into_a_base_with_two_weights_where_it_ties_them(
    tmp_path, module
):
    config = LoraConfig(r=4, target_modules=["q_proj", module], use_dora=True)
    expected = train(tmp_path, llama(), config)
    message = refusal(tmp_path)
    assert "copy the embedding of its base into the head, and save that with tie_word" in message
    assert message.endswith(f"merge it into that {WITH_PEFT}")
    merge_with_peft(tmp_path, copy_head(tmp_path))
    torch.testing.assert_close(logits(merge(tmp_path, ["merged"], **ALONE)), expected)


def test_dora_of_a_layer_is_merged_where_target_modules_name_it(tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], use_dora=True)
    expected = train(tmp_path, llama(tie_word_embeddings=False), config)
    assert "'lm_head.weight' by DoRA outside the merged layers: name them in" in refusal(tmp_path)
    options = {**ALONE, "target_modules": ["q_proj", "lm_head"]}
    torch.testing.assert_close(logits(merge(tmp_path, ["adapter"], **options)), expected)


@pytest.mark.parametrize("start", ["pissa", "olora", "OLoRA"])  # peft compares some in lower case
def test_an_initialisation_that_changes_the_base_is_converted_by_peft(tmp_path, start):
    expected = train(tmp_path, llama(), LoraConfig(**LORA, init_lora_weights=start))
    assert refusal(tmp_path).endswith("peft's path_initial_model_for_weight_conversion")
    initial = get_peft_model(load(tmp_path / "base"), LoraConfig(**LORA, init_lora_weights=start))
    initial.peft_config["default"].init_lora_weights = True  # as peft's page says
    initial.save_pretrained(tmp_path / "initial")
    options = {"path_initial_model_for_weight_conversion": str(tmp_path / "initial")}
    config = LoraConfig(**LORA, init_lora_weights=start)
    train_on(tmp_path, load(tmp_path / "base"), config, "converted", **options)
    torch.testing.assert_close(logits(merge(tmp_path, ["converted"], **ALONE)), expected)


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_tokens_that_the_base_lacks_come_with_a_base_that_was_resized(tmp_path, tied):
    llama(tie_word_embeddings=tied).save_pretrained(tmp_path / "base")

    def resized(seed):
        torch.manual_seed(seed)
        model = load(tmp_path / "base")
        model.resize_token_embeddings(52, mean_resizing=False)
        return model

    config = LoraConfig(**LORA, trainable_token_indices=[50, 51])
    words = torch.arange(40, 52).reshape(1, 12)
    expected = train_on(tmp_path, resized(0), config, words=words)
    message = refusal(tmp_path)
    assert "load its base, resize its embeddings as for the training (resize_token_embe" in message
    merge_with_peft(tmp_path, resized(0))
    out = merge(tmp_path, ["merged"], **ALONE)
    torch.testing.assert_close(logits(out, words), expected)
    assert len(tensors(out)["model.embed_tokens.weight"]) == 52


@torch.no_grad()
def test_an_adapter_on_an_attention_with_packed_projections_is_merged_by_peft(tmp_path):
    base = openclip()
    (tmp_path / "base").mkdir()
    save_file(base.state_dict(), tmp_path / "base" / "model.safetensors")
    config = LoraConfig(r=4, target_modules=["attn", "c_fc"], init_lora_weights=False)
    adapted = get_peft_model(deepcopy(base), config)
    adapted.save_pretrained(tmp_path / "adapter")
    message = refusal(tmp_path)
    assert "no LoRA of a linear layer" in message
    assert message.endswith(f"merge it into its base {WITH_PEFT}")
    (tmp_path / "merged").mkdir()
    merged = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    expected = dict(merged.state_dict())
    save_file(expected, tmp_path / "merged" / "model.safetensors")
    torch.testing.assert_close(tensors(merge(tmp_path, ["merged"], **ALONE)), expected)


@torch.no_grad()
def test_lora_of_a_classifier_is_merged_into_the_model_that_has_it(tmp_path):
    llama().save_pretrained(tmp_path / "base")
    load_classifier = hf.AutoModelForSequenceClassification.from_pretrained
    classifier = load_classifier(tmp_path / "base", num_labels=3, pad_token_id=0)
    classifier.save_pretrained(tmp_path / "classifier")
    config = LoraConfig(**{**LORA, "target_modules": ["q_proj", "score"]})
    expected = train_on(tmp_path, load_classifier(tmp_path / "classifier"), config)
    message = refusal(tmp_path)
    assert "changes 'score.weight', which the base" in message
    remedy = "give as the base the model with that layer, on which the adapter was trained"
    assert message.endswith(remedy)
    out = merge_folders(plan(tmp_path, ["adapter"], base="classifier", **ALONE), tmp_path / "out")
    torch.testing.assert_close(load_classifier(out).eval()(WORDS).logits, expected)


def test_a_bias_of_b_goes_into_the_bias_of_the_layer(tmp_path):
    base = FAMILIES["gpt_oss"]()
    config = LoraConfig(r=4, target_modules=["q_proj"], lora_bias=True)
    expected = train(tmp_path, base, config)
    assert "uses lora_bias, and only LoRA" in refusal(tmp_path)
    merge_with_peft(tmp_path, load(tmp_path / "base"))
    torch.testing.assert_close(logits(merge(tmp_path, ["merged"], **ALONE)), expected)


@fused
def test_experts_that_can_be_read_in_two_ways_are_read_as_the_peft_that_trained_them_does(tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["down_proj"])
    expected = train(tmp_path, square(), config)
    torch.testing.assert_close(logits(merge(tmp_path, ["adapter"], **ALONE)), expected)


@fused
def test_an_adapter_on_the_language_model_of_a_larger_one_is_merged_by_peft(tmp_path):
    released("Qwen3.5").save_pretrained(tmp_path / "base")
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    expected = train_on(tmp_path, load(tmp_path / "base"), config)
    message = refusal(tmp_path)
    assert "trained on another class of the model, " in message
    assert "'model.layers.0.mlp.down_proj.weight', which the base" in message
    assert "where this is 'model.language_model.la" in message
    assert message.endswith(f"; with that class, merge it into its base {WITH_PEFT}")
    merge_with_peft(tmp_path, load(tmp_path / "base"))
    out = merge(tmp_path, ["merged"], **ALONE, exclude_modules=".*visual.*")
    torch.testing.assert_close(logits(out), expected)
    assert tensors(out).keys() == tensors(tmp_path / "base").keys()


@fused
def test_a_language_model_without_the_vision_tower_of_the_base_is_merged_without_it(tmp_path):
    released("Qwen3.5").save_pretrained(tmp_path / "base")
    task = finetuned(load(tmp_path / "base"), 1)
    task.save_pretrained(tmp_path / "task1")
    with pytest.raises(ValueError, match=r"lacks '.*visual") as refused:
        plan(tmp_path, ["task1"], **ALONE)
    assert str(refused.value).endswith("; exclude_modules='.*visual.*' leaves them out")
    out = merge(tmp_path, ["task1"], **ALONE, exclude_modules=".*visual.*")
    torch.testing.assert_close(logits(out), task(WORDS).logits)


@fused
@pytest.mark.parametrize("joined", ["base", "task1"])
def test_experts_that_one_model_stores_joined_are_merged_as_the_message_says(tmp_path, joined):
    models = save_stream(tmp_path, FAMILIES["mixtral"](), tasks=1)
    expected = merge(tmp_path, ["task1"], "expected", **ALONE)
    expected = load(expected).state_dict()
    other = {"base": "task1", "task1": "base"}[joined]
    names = {"base": "_pretrained_", "task1": "task1"}
    models[names[joined]].save_pretrained(tmp_path / joined, save_original_format=False)
    with pytest.raises(ValueError, match="experts one by one, and the other joined") as refused:
        plan(tmp_path, ["task1"], **ALONE)
    message = str(refused.value)
    assert f"Load '{tmp_path / other}' with transformers 5" in message
    assert message.endswith("save_pretrained(FOLDER, save_original_format=False)")
    loaded = load(tmp_path / other)
    shutil.rmtree(tmp_path / other)
    loaded.save_pretrained(tmp_path / other, save_original_format=False)
    result = load(merge(tmp_path, ["task1"], **ALONE)).state_dict()
    torch.testing.assert_close(result, expected)
