"""peft reads a merged adapter, on the class that it is for, as the update that was merged."""

import json
from functools import partial

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Mamba2Config,
    Mamba2ForCausalLM,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    __version__,
)

from fusion_bench_nufilt.merge import merge_folders
from fusion_bench_nufilt.models.adapter_reader import AdapterReader
from fusion_bench_nufilt.models.adapters import adapter_config
from fusion_bench_nufilt.models.architecture import Architecture
from fusion_bench_nufilt.models.peft_layers import PREFIX, auto_class
from fusion_bench_nufilt.utils.tensors import TensorInfo
from tests.merge.helpers import change_json, merge, plan
from tests.oracle.test_classes import tiny, tiny_model
from tests.released import released
from tests.tiny_models import SMALL, T5, adapt_at_random, build, clip, full_clip, llama, llava, t5

SUM = {"method": "sum", "scale": 1.0}
MEAN = {"target_modules": "all-linear", "other_params": "mean", **SUM}
modern = pytest.mark.skipif(__version__ < "5", reason="transformers 4 has the old names")


def vit():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = ViTConfig(**sizes, num_attention_heads=2, image_size=32, patch_size=16)
    return build(ViTForImageClassification, config, 0)


def biased_llama():
    config = LlamaConfig(**SMALL, vocab_size=50, attention_bias=True, tie_word_embeddings=False)
    return build(LlamaForCausalLM, config, 0)


def save_base(folder, model):
    model.double().save_pretrained(folder / "base")
    return type(model)


def save_adapter(folder, kind, seed=1, rename=str, **config):
    """Save a random adapter of a class, whose keys may be renamed."""
    base = kind.from_pretrained(folder / "base", dtype=torch.float64)
    model = get_peft_model(base, LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **config}))
    adapt_at_random(model, seed, 0.1)
    target = folder / f"adapter{seed}"
    model.save_pretrained(target)
    path = target / "adapter_model.safetensors"
    save_file({rename(key): value for key, value in load_file(path).items()}, path)
    return target.name


def answers(model, inputs):
    model.eval()
    with torch.no_grad():
        result = model(**inputs)
    return getattr(result, "logits", result[0])


def assert_read_as_merged(folder, kind, inputs, adapters, options=MEAN):
    """The adapter on its base answers as the base into which the same is merged, and that of one
    adapter as this one.
    """
    name = "_".join(adapters)
    merge(folder, adapters, f"{name}_whole", **options)
    options = {**options, "base": "base", "settings": {"adapter": True}}
    out = merge(folder, adapters, f"{name}_out", **options)
    expected = answers(kind.from_pretrained(folder / f"{name}_whole", dtype=torch.float64), inputs)
    assert_answers(folder, kind, inputs, out, expected)
    if len(adapters) == 1:
        assert_answers(folder, kind, inputs, folder / name, expected)
    return out


def assert_answers(folder, kind, inputs, adapter, expected):
    base = kind.from_pretrained(folder / "base", dtype=torch.float64)
    before = answers(base, inputs)
    found = answers(PeftModel.from_pretrained(base, adapter), inputs)
    assert (expected - before).abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_tensor_that_peft_takes_for_no_layer_is_refused():
    model = llama()
    reader = AdapterReader(model, Architecture(llama()))
    config = adapter_config([{}], None, {"model.layers.0.self_attn.q_proj": 2}, None)
    infos = {}
    for key, shape in reader.wrap(config).items():
        infos[key] = TensorInfo("", "F32", shape, 0, 0)
    changed = ["model.layers.0.self_attn.q_proj.weight"]
    reader.check(infos, changed)
    infos[f"{PREFIX}model.extra.weight"] = TensorInfo("", "F32", (2, 2), 0, 0)
    with pytest.raises(ValueError, match=r"it takes other tensors: '.*model\.extra"):
        reader.check(infos, changed)


@pytest.mark.oldest
def test_peft_tells_the_class_of_each_type_of_task():
    classes = {task.value: auto_class({"task_type": task.value}) for task in peft.TaskType}
    assert classes["SEQ_CLS"] is AutoModelForSequenceClassification
    assert len({*classes.values()} - {None}) == len(classes)
    assert auto_class({}) is None


def pixels(size=32):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1, 3, size, size, generator=generator, dtype=torch.float64)
    return {"pixel_values": values}


TEXT = {"input_ids": torch.arange(20)[None]}
OLD_NAMES = {
    "CLIP": (clip, None, lambda key: key.replace("model.encoder", "model.vision_model.encoder")),
    "ViT": (
        vit,
        pixels(),
        lambda key: key.replace("layers.", "encoder.layer.").replace(
            "attention.q_proj", "attention.attention.query"
        ),
    ),
    "LLaVA": (
        llava,
        TEXT,
        lambda key: key.replace("model.language_model", "language_model.model"),
    ),
    "Qwen2.5-VL": (
        partial(released, "Qwen2.5-VL"),
        TEXT,
        lambda key: key.replace("model.language_model", "model"),
    ),
}


QUERIES = ["q_proj", "up_proj"]


@modern
@pytest.mark.parametrize("family", OLD_NAMES)
def test_names_of_before_and_of_today_are_those_of_the_class(tmp_path, family):
    make, inputs, rename = OLD_NAMES[family]
    kind = save_base(tmp_path, make())
    inputs = inputs or pixels(kind.from_pretrained(tmp_path / "base").config.image_size)
    names = [
        save_adapter(tmp_path, kind, 1, rename, target_modules=QUERIES),
        save_adapter(tmp_path, kind, 2, target_modules=QUERIES),
        save_adapter(tmp_path, kind, 3, rename, target_modules=QUERIES),
    ]
    assert_read_as_merged(tmp_path, kind, inputs, names[:2])
    assert_read_as_merged(tmp_path, kind, inputs, names[::2])


@modern
@pytest.mark.parametrize("model_type", ["hrm_text", "nomic_bert"])
def test_layers_that_transformers_divides_on_loading_are_changed_row_by_row(tmp_path, model_type):
    kind = save_base(tmp_path, tiny_model(model_type))
    modules = ["q_proj", "v_proj", "gate_proj"]
    first = {"target_modules": modules, "use_rslora": True, "rank_pattern": {"v_proj": 3}}
    names = [
        save_adapter(tmp_path, kind, 1, **first),
        save_adapter(tmp_path, kind, 2, target_modules=[*modules, "up_proj", "down_proj"]),
    ]
    assert_read_as_merged(tmp_path, kind, TEXT, names[:1])
    assert_read_as_merged(tmp_path, kind, TEXT, names)


@modern
def test_a_merge_goes_on_from_an_adapter_under_the_names_of_the_class(tmp_path):
    make, inputs, rename = OLD_NAMES["LLaVA"]
    kind = save_base(tmp_path, make())
    patterns = {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"layers.1.self_attn.q_proj": 5}}
    options = {"target_modules": ["q_proj", "up_proj"], "use_rslora": True, **patterns}
    names = [
        save_adapter(tmp_path, kind, 1, rename, **options),
        save_adapter(tmp_path, kind, 2, **options),
        save_adapter(tmp_path, kind, 3, rename),
    ]
    merge(tmp_path, names, "whole", **MEAN)
    whole = kind.from_pretrained(tmp_path / "whole", dtype=torch.float64)
    out = None
    for name in names:
        out = merge(tmp_path, [name], f"{name}_out", out, settings={"adapter": True}, **MEAN)
    assert_answers(tmp_path, kind, inputs, out, answers(whole, inputs))


def test_adapters_of_two_classes_are_one_for_the_class_of_the_base(tmp_path):
    kind = save_base(tmp_path, llama())
    names = [save_adapter(tmp_path, LlamaModel, 1), save_adapter(tmp_path, kind, 2)]
    out = assert_read_as_merged(tmp_path, kind, TEXT, names)
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["auto_mapping"]["base_model_class"] == "LlamaForCausalLM"
    # And those of one class stay for it.
    assert_read_as_merged(tmp_path, LlamaModel, TEXT, names[:1])


def test_a_layer_that_the_class_of_the_base_lacks_is_named(tmp_path):
    model = llama(tie_word_embeddings=False)
    save_base(tmp_path, model)
    config = tmp_path / "base" / "config.json"
    first = save_adapter(tmp_path, LlamaForCausalLM, 1, target_modules=["q_proj", "lm_head"])
    second = save_adapter(tmp_path, LlamaModel, 2)
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "architectures": ["LlamaModel"]}))
    with pytest.raises(ValueError, match="lm_head"):
        plan(tmp_path, [first, second], settings={"adapter": True}, **MEAN)


def test_without_a_config_two_names_of_one_layer_are_refused(tmp_path):
    kind = save_base(tmp_path, llama())
    names = [save_adapter(tmp_path, LlamaModel, 1), save_adapter(tmp_path, kind, 2)]
    (tmp_path / "base" / "config.json").unlink()
    with pytest.raises(ValueError, match=r"'layers\.0.*' and 'model\.layers\.0.*may be one layer"):
        plan(tmp_path, names, settings={"adapter": True}, **MEAN)


TIED = {
    "LoRA of the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "LoRA of the head": {"target_modules": ["q_proj", "lm_head"]},
    "saved embedding": {"modules_to_save": ["embed_tokens"]},
    "saved head": {"modules_to_save": ["lm_head"]},
}


@pytest.mark.skipif(peft.__version__ < "0.19", reason="peft 0.18 ties what it saves in part")
@pytest.mark.parametrize("what", TIED)
def test_a_tie_that_adapters_keep_is_in_their_merge(tmp_path, what):
    kind = save_base(tmp_path, llama())
    names = []
    for seed in (1, 2):
        names.append(save_adapter(tmp_path, kind, seed, ensure_weight_tying=True, **TIED[what]))
    assert_read_as_merged(tmp_path, kind, TEXT, names)
    assert_read_as_merged(tmp_path, kind, TEXT, names[:1])


def test_a_saved_bias_of_a_layer_that_another_adapter_changes_is_read(tmp_path):
    kind = save_base(tmp_path, biased_llama())
    names = [
        save_adapter(tmp_path, kind, 1, target_modules=["q_proj"], bias="all"),
        save_adapter(tmp_path, kind, 2, target_modules=["q_proj", "k_proj"]),
    ]
    assert_read_as_merged(tmp_path, kind, TEXT, names, {**MEAN, "other_params": "first"})


@pytest.mark.oldest
def test_a_bias_that_is_a_modules_own_parameter_is_read_beside_layers_in_that_module(tmp_path):
    """Saved as all of its module, it would take the layers with it."""
    sizes = {"hidden_size": 32, "head_dim": 8, "num_heads": 8, "state_size": 8, "n_groups": 1}
    config = Mamba2Config(**sizes, num_hidden_layers=2, vocab_size=50, chunk_size=8)
    kind = save_base(tmp_path, build(Mamba2ForCausalLM, config, 0))
    names = []
    for seed in (1, 2):
        lora = {"target_modules": ["in_proj"], "bias": "all"}
        names.append(save_adapter(tmp_path, kind, seed, **lora))
    assert_read_as_merged(tmp_path, kind, TEXT, names)


@pytest.mark.oldest
def test_biases_that_are_not_trained_are_read_as_peft_saves_them(tmp_path):
    """Such as those by which DeepSeek's routers are balanced, if all biases are saved."""
    kind = save_base(tmp_path, released("DeepSeek-V3"))
    lora = {"target_modules": ["o_proj"], "bias": "all"}
    names = [save_adapter(tmp_path, kind, seed, **lora) for seed in (1, 2)]
    whole = kind.from_pretrained(merge(tmp_path, names, "whole", **MEAN), dtype=torch.float64)
    out = merge(tmp_path, names, base="base", settings={"adapter": True}, **MEAN)
    base = kind.from_pretrained(tmp_path / "base", dtype=torch.float64)
    state = PeftModel.from_pretrained(base, out).merge_and_unload().state_dict()
    torch.testing.assert_close(state, whole.state_dict(), rtol=0, atol=1e-6)


def test_the_strength_is_that_of_the_whole_model(tmp_path):
    """Most of whose layers are left alone here, and are larger."""
    config = LlamaConfig(**{**SMALL, "num_hidden_layers": 4}, vocab_size=50, num_key_value_heads=1)
    kind = save_base(tmp_path, build(LlamaForCausalLM, config, 0))
    names = []
    for seed in (1, 2):
        names.append(save_adapter(tmp_path, kind, seed, r=4, target_modules=["k_proj"]))
    best = {"method": "best", "target_modules": "all-linear", "other_params": "mean"}
    assert_read_as_merged(tmp_path, kind, TEXT, names, best)


def test_an_untied_head_is_a_layer_where_no_weight_of_the_base_is_read(tmp_path):
    kind = save_base(tmp_path, t5())
    change_json(tmp_path / "base" / "config.json", tie_word_embeddings=False)
    targets = ["q", "lm_head"]
    names = [save_adapter(tmp_path, kind, seed, target_modules=targets) for seed in (1, 2)]
    options = {"base": "base", "settings": {"adapter": True}, "target_modules": targets}
    planned = plan(tmp_path, names, **SUM, **options)
    assert "lm_head.weight" in [layer.param for layer in planned.layers]


@modern
def test_rows_of_tokens_are_in_a_head_that_transformers_ties(tmp_path):
    config = T5Config(**T5, decoder_start_token_id=0, tie_word_embeddings=False)
    kind = save_base(tmp_path, build(T5ForConditionalGeneration, config, 0))
    change_json(tmp_path / "base" / "config.json", tie_word_embeddings=False)
    path = tmp_path / "base" / "model.safetensors"
    state = load_file(path)
    save_file({**state, "lm_head.weight": state["shared.weight"] * 1.1}, path, {"format": "pt"})
    options = {"target_modules": ["q"], "trainable_token_indices": {"shared": [3, 7]}}
    names = [save_adapter(tmp_path, kind, seed, **options) for seed in (1, 2)]
    inputs = {**TEXT, "decoder_input_ids": TEXT["input_ids"]}
    planned = plan(tmp_path, names[:1], **MEAN)
    assert any("also puts into 'lm_head.weight'" in line for line in planned.warnings)
    merge_folders(planned, tmp_path / "whole")
    whole = kind.from_pretrained(tmp_path / "whole", dtype=torch.float64)
    assert_answers(tmp_path, kind, inputs, tmp_path / names[0], answers(whole, inputs))
    with pytest.raises(ValueError, match=r"would not have 'lm_head\.weight' by itself"):
        plan(tmp_path, names, base="base", settings={"adapter": True}, **MEAN)


@modern
def test_an_adapter_of_a_tower_is_merged_on_the_model_that_has_it(tmp_path):
    save_base(tmp_path, full_clip())
    kind = type(AutoModel.from_pretrained(tmp_path / "base").vision_model)
    names = [save_adapter(tmp_path, kind, seed) for seed in (1, 2)]
    config = kind.from_pretrained(tmp_path / "base").config
    out = assert_read_as_merged(tmp_path, kind, pixels(config.image_size), names)
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["auto_mapping"]["base_model_class"] == kind.__name__


@pytest.mark.parametrize("with_config", [True, False])
def test_transposed_layers_are_told_by_the_config_of_the_base_or_need_not_be(tmp_path, with_config):
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 50, "n_positions": 32}
    kind = save_base(tmp_path, build(GPT2LMHeadModel, GPT2Config(**sizes), 0))
    names = []
    for seed in (1, 2):
        options = {"target_modules": ["c_fc"], "fan_in_fan_out": True}
        names.append(save_adapter(tmp_path, kind, seed, **options))
    merge(tmp_path, names, "whole", **MEAN)
    whole = kind.from_pretrained(tmp_path / "whole", dtype=torch.float64)
    config = (tmp_path / "base" / "config.json").read_text()
    if not with_config:
        (tmp_path / "base" / "config.json").unlink()
    out = merge(tmp_path, names, "out", settings={"adapter": True}, **MEAN)
    (tmp_path / "base" / "config.json").write_text(config)
    assert_answers(tmp_path, kind, TEXT, out, answers(whole, TEXT))


def saved_with_the_whole(key):
    """The key after ``model.model = get_peft_model(model.model)``, saved as ``model``."""
    return "model." + key.replace(f"{PREFIX}model.", PREFIX)


def thinker():
    sizes = tiny(Qwen2_5OmniThinkerConfig().to_dict())
    sizes["text_config"]["rope_scaling"] = {"type": "default", "mrope_section": [2, 3, 3]}
    config = Qwen2_5OmniThinkerConfig(**sizes)
    return build(Qwen2_5OmniThinkerForConditionalGeneration, config, 0)


@pytest.mark.parametrize(
    ("make", "rename"),
    [(llama, PREFIX.__add__), (llama, saved_with_the_whole), (thinker, "thinker.".__add__)],
    ids=["twice", "in the middle", "in an Omni"],
)
def test_an_adapter_is_read_wherever_peft_has_its_prefix(tmp_path, make, rename):
    kind = save_base(tmp_path, make())
    names = [save_adapter(tmp_path, kind, 1), save_adapter(tmp_path, kind, 2, rename)]
    assert_read_as_merged(tmp_path, kind, TEXT, names)


def test_placeholders_of_what_is_the_bases_own_are_passed_over_as_peft_does(tmp_path):
    kind = save_base(tmp_path, llama())
    name = save_adapter(tmp_path, kind, 1)
    path = tmp_path / name / "adapter_model.safetensors"
    save_file({**load_file(path), f"{PREFIX}lm_head.base_layer.weight": torch.empty(0)}, path)
    assert_read_as_merged(tmp_path, kind, TEXT, [name])


@pytest.mark.parametrize("name", ["lora_a", "lora_down.weight"])
def test_an_adapter_that_is_not_pefts_is_called_so(tmp_path, name):
    save_base(tmp_path, llama())
    (tmp_path / "adapter").mkdir()
    state = {f"model.layers.0.self_attn.q_proj.{name}": torch.ones(32, 2)}
    save_file(state, tmp_path / "adapter" / "adapters.safetensors")
    for settings in ({}, {"adapter": True}):
        with pytest.raises(ValueError, match="adapter' is an adapter that is not peft's"):
            plan(tmp_path, ["adapter"], base="base", settings=settings, **MEAN)
