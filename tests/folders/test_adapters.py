"""A peft adapter folder is the model that peft makes of it."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import CLIPVisionModel, LlamaForCausalLM, LlavaForConditionalGeneration

from fusion_bench_nufilt.folders import plan_merge
from tests.folders.helpers import change, merge, same, save_stream, tensors
from tests.models import clip, finetuned, llama, llava

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def save_adapter(folder, base, seed=5, **config):
    """Folders `adapter` and `task9`, the same fine-tuned model as peft's adapter and merged by peft."""
    model = get_peft_model(base, LoraConfig(**{**LORA, **config}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder / "adapter")
    model.merge_and_unload().save_pretrained(folder / "task9")


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.self_attn.v_proj": 32}},
        {
            "rank_pattern": {r"^model\..*layers\.0\.self_attn\.q_proj": 2, r".*\.v_proj": 8},
            "alpha_pattern": {r".*layers\.\d\.self_attn\.q_proj": 16, "down_proj": 4},
            "layers_to_transform": [0],
        },
        {"modules_to_save": ["lm_head"]},
    ],
    ids=["plain", "rslora", "patterns", "regular-expressions", "modules_to_save"],
)
@pytest.mark.parametrize("make", [llama, llava])
def test_an_adapter_is_the_model_that_peft_merges_it_into(tmp_path, make, config):
    """To the bit as the first task, which is taken whole; to rounding later, where its factors are worked on."""
    base = llama(tie_word_embeddings=False) if make is llama else llava()
    save_stream(tmp_path, base, tasks=1, dtype=torch.float64)
    save_adapter(tmp_path, type(base).from_pretrained(tmp_path / "base", dtype=torch.float64), **config)
    options = {"other_params": "mean"} if "modules_to_save" in config else {}
    assert same(*(tensors(merge(tmp_path, [task], f"first_{task}", **options)) for task in ("adapter", "task9")))
    expected = tensors(merge(tmp_path, ["task1", "task9"], "full", **options))
    result = tensors(merge(tmp_path, ["task1", "adapter"], "out", **options))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-9)
    without = tensors(merge(tmp_path, ["task1"], "without", **options))
    assert max((result[key] - without[key]).abs().max() for key in result) > 1e-4


def test_layers_that_an_adapter_leaves_alone_stay_as_they_are(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    save_adapter(tmp_path, LlamaForCausalLM.from_pretrained(tmp_path / "base"))
    before, after = (
        tensors(merge(tmp_path, ["task1"], "one")),
        tensors(merge(tmp_path, ["adapter"], "two", merged="one")),
    )
    changed = {key.split(".")[-2] for key in after if not torch.equal(after[key], before[key])}
    assert changed == {"q_proj", "v_proj", "down_proj"}


def refuse(folder, message):
    with pytest.raises(ValueError, match=message):
        plan_merge(str(folder / "base"), [str(folder / "adapter")])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"use_dora": True}, "uses DoRA.*merge it into its base with peft"),
        ({"peft_type": "IA3"}, "of type IA3: only LORA"),
        ({"init_lora_weights": "pissa_niter_4"}, "initialised with pissa_niter_4, which changes the base"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"lora_bias": True}, "lora_bias"),
        ({"init_lora_weights": "lora_ga"}, "initialised with lora_ga, which changes the base"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "uses layer_replication"),
    ],
)
def test_an_adapter_that_is_no_plain_product_is_refused_by_name(tmp_path, setting, message):
    save_stream(tmp_path, llama(), tasks=1)
    save_adapter(tmp_path, LlamaForCausalLM.from_pretrained(tmp_path / "base"))
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **setting}))
    refuse(tmp_path, message)


def test_an_adapter_for_another_base_is_refused(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    save_stream(tmp_path / "other", llava(), tasks=1)
    save_adapter(tmp_path, LlavaForConditionalGeneration.from_pretrained(tmp_path / "other" / "base"))
    refuse(tmp_path, "adapter '.*' is for another base: '.*base' has no '.*language_model")


def test_an_adapter_of_another_width_is_refused_with_the_shapes(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    save_adapter(tmp_path, LlamaForCausalLM.from_pretrained(tmp_path / "base"))
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    change(tmp_path / "adapter", key, lambda value: torch.zeros(4, 48))
    refuse(tmp_path, r"tensor 'model\.layers\.0\.self_attn\.q_proj\.weight': shape \(32, 48\) differs from \(32, 32\)")


def test_an_adapter_that_changes_no_merged_layer_is_refused(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    save_adapter(tmp_path, LlamaForCausalLM.from_pretrained(tmp_path / "base"), target_modules=["lm_head"])
    refuse(tmp_path, "changes none of the 14 layers")


def test_what_an_adapter_changes_outside_the_merged_layers_is_said(tmp_path):
    save_stream(tmp_path, llama(tie_word_embeddings=False), tasks=1)
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    save_adapter(tmp_path, base, target_modules=["q_proj", "lm_head"])
    plan = plan_merge(str(tmp_path / "base"), [str(tmp_path / "adapter")])
    assert any("also changes 'lm_head.weight': ignored" in text for text in plan.warnings)


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_trained_with_an_adapter_are_averaged_as_those_of_a_model(tmp_path, bias):
    save_stream(tmp_path, clip(), tasks=1)
    base = CLIPVisionModel.from_pretrained(tmp_path / "base")
    save_adapter(tmp_path, base, target_modules=["q_proj", "fc1"], bias=bias)
    result, expected = (
        tensors(merge(tmp_path, [task], f"out_{task}", other_params="mean")) for task in ("adapter", "task9")
    )
    assert same(result, expected)
    assert not torch.equal(
        *(t["vision_model.encoder.layers.0.mlp.fc1.bias"] for t in (result, tensors(tmp_path / "base")))
    )


def test_a_head_that_the_base_lacks_is_ignored_with_a_warning_as_in_a_model(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    save_adapter(tmp_path, LlamaForCausalLM.from_pretrained(tmp_path / "base"))
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({**load_file(path), "base_model.model.score.weight": torch.zeros(2, 32)}, path)
    plan = plan_merge(str(tmp_path / "base"), [str(tmp_path / "adapter")])
    assert any("1 tensors that the base lacks, ignored: 'score.weight'" in text for text in plan.warnings)


def test_an_update_of_the_head_for_another_vocabulary_is_left_out_whole(tmp_path):
    save_stream(tmp_path, llama(tie_word_embeddings=False), tasks=1)
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    save_adapter(tmp_path, base, target_modules=["q_proj", "lm_head"])
    key = "base_model.model.lm_head.lora_B.weight"
    change(tmp_path / "adapter", key, lambda value: torch.cat([value, value[:2]]))
    out = merge(tmp_path, ["adapter"], on_shape_mismatch="keep-base", other_params="mean")
    assert torch.equal(*(tensors(folder)["lm_head.weight"] for folder in (out, tmp_path / "base")))


def test_a_lora_of_a_convolution_is_refused_by_name(tmp_path):
    save_stream(tmp_path, clip(), tasks=1)
    base = CLIPVisionModel.from_pretrained(tmp_path / "base")
    save_adapter(tmp_path, base, target_modules=["q_proj", "patch_embedding"])
    refuse(tmp_path, r"patch_embedding\.lora_A\.weight': no LoRA of a linear layer")


@pytest.mark.parametrize("lost", ["A", "B"])
def test_half_a_lora_is_refused_by_name(tmp_path, lost):
    save_stream(tmp_path, llama(), tasks=1)
    save_adapter(tmp_path, LlamaForCausalLM.from_pretrained(tmp_path / "base"))
    key = f"base_model.model.model.layers.0.self_attn.q_proj.lora_{lost}.weight"
    change(tmp_path / "adapter", key, lambda value: None)
    refuse(tmp_path, r"layers\.0\.self_attn\.q_proj\.lora_(B\.weight': no LoRA|A\.weight' and no '.*lora_B)")


def test_an_adapter_config_that_is_no_json_is_refused_by_name(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    save_adapter(tmp_path, LlamaForCausalLM.from_pretrained(tmp_path / "base"))
    (tmp_path / "adapter" / "adapter_config.json").write_text("{")
    refuse(tmp_path, r"adapter/adapter_config\.json' is damaged")


def test_an_adapter_is_no_base_and_no_merged_model(tmp_path):
    models = save_stream(tmp_path, llama(), tasks=1)
    save_adapter(tmp_path, finetuned(models["_pretrained_"], 0, scale=0.0))
    base, adapter, task = (str(tmp_path / name) for name in ("base", "adapter", "task1"))
    with pytest.raises(ValueError, match=r"base '.*adapter' is an adapter"):
        plan_merge(adapter, [task])
    with pytest.raises(ValueError, match=r"merged model '.*adapter' is an adapter"):
        plan_merge(base, [task], adapter)
