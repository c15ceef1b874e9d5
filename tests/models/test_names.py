"""What the names of layers say, and names of before for the same tensors."""

from copy import deepcopy
from importlib import import_module
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

from fusion_bench_nufilt import load_task
from fusion_bench_nufilt.merge import merge_folders
from fusion_bench_nufilt.methods.base import block_of
from fusion_bench_nufilt.models.layers import in_module_of_block, without_numbers
from tests.families import FAMILIES
from tests.merge.helpers import change_json, merge, plan, rename, same, save_stream, tensors
from tests.tiny_models import SMALL, build

BLOCKS = {
    "model.layers.3.mlp.up_proj": ("model.layers.", 3, "mlp.up_proj"),
    "layers.0.experts.12.w": ("layers.", 0, "experts.12.w"),
    "0.weight": (None, 0, "weight"),
    "blocks.7": None,
    "head.weight": None,
    "conv2.weight": None,
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_block_of_a_layer_is_the_outermost_numbered_one(name):
    assert block_of(name) == BLOCKS[name]


def test_a_blocks_own_parameter_belongs_to_no_module_of_it():
    assert in_module_of_block("layers.0.mlp.weight")
    assert not in_module_of_block("layers.0.gamma")


def test_the_same_layers_of_all_blocks_have_one_name():
    assert without_numbers("0.layers.1.experts.22.w1.weight") == "*.layers.*.experts.*.w1.weight"
    assert without_numbers("layers.1") == "layers.1"


# --- names that transformers gave tensors before ---

#: New names, and the old ones that transformers loads as these.
OLD = {
    "LayerNorm.weight": "LayerNorm.gamma",
    "LayerNorm.bias": "LayerNorm.beta",
    "parametrizations.weight.original0": "weight_g",
    "parametrizations.weight.original1": "weight_v",
}
ALL = {"target_modules": "all-linear", "other_params": "mean"}


def wav2vec2():
    sizes = {"conv_dim": [16, 16], "conv_kernel": [4, 4], "conv_stride": [2, 2]}
    groups = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = hf.Wav2Vec2Config(**SMALL, **sizes, **groups, vocab_size=20)
    return build(hf.Wav2Vec2ForCTC, config, 0)


MODELS = {"bert": FAMILIES["bert"], "wav2vec2": wav2vec2}


def old_name(key):
    for new, old in OLD.items():
        key = key.replace(new, old)
    return key


@pytest.mark.oldest
@pytest.mark.parametrize("old", [["base"], ["task1"], ["task1", "task2"], ["base", "task2"]])
@pytest.mark.parametrize("family", MODELS)
def test_old_names_and_new_ones_are_those_of_the_same_tensors(tmp_path, family, old):
    save_stream(tmp_path, MODELS[family](), tasks=2)
    expected = tensors(merge(tmp_path, ["task1", "task2"], "expected", **ALL))
    assert any(old_name(key) != key for key in expected)
    for name in old:
        rename(tmp_path / name, old_name)
    planned = plan(tmp_path, ["task1", "task2"], **ALL)
    assert not planned.heads
    assert [text for text in planned.warnings if "lacks" in text or "left out" in text] == []
    if "base" in old:
        expected = {old_name(key): value for key, value in expected.items()}
    assert same(tensors(merge_folders(planned, tmp_path / "out")), expected)


@pytest.mark.oldest
def test_old_names_are_the_same_tensors_where_names_alone_tell_the_layers(tmp_path):
    save_stream(tmp_path, MODELS["bert"](), tasks=2)
    change_json(tmp_path / "base" / "config.json", architectures=["TheirOwnModel"])
    expected = tensors(merge(tmp_path, ["task1", "task2"], "expected", **ALL))
    rename(tmp_path / "task1", old_name)
    assert same(tensors(merge(tmp_path, ["task1", "task2"], **ALL)), expected)


ADAPTERS = {"biases": {"bias": "all"}, "norms": {"modules_to_save": ["LayerNorm"]}}


@pytest.mark.oldest
@pytest.mark.parametrize("what", ADAPTERS)
def test_an_adapter_changes_the_layer_norms_of_a_base_with_old_names(tmp_path, what):
    models = save_stream(tmp_path, MODELS["bert"](), tasks=1)
    config = LoraConfig(r=4, target_modules=["query"], **ADAPTERS[what])
    adapted = get_peft_model(deepcopy(models["_pretrained_"]), config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter += 0.02 * parameter.requires_grad
    adapted.save_pretrained(tmp_path / "adapter")
    expected = tensors(merge(tmp_path, ["adapter"], "expected", **ALL))
    rename(tmp_path / "base", old_name)
    result = tensors(merge(tmp_path, ["adapter"], **ALL))
    assert same(result, {old_name(key): value for key, value in expected.items()})
    norm = "bert.embeddings.LayerNorm.beta"
    assert not torch.equal(result[norm], tensors(tmp_path / "base")[norm])


@pytest.mark.oldest
def test_a_head_with_old_names_is_loaded_with_the_merged_model(tmp_path):
    base = hf.BertModel(hf.BertConfig(**SMALL, vocab_size=50))
    base.save_pretrained(tmp_path / "base")
    head = hf.BertForPreTraining(hf.BertConfig(**SMALL, vocab_size=50)).eval()
    head.bert.load_state_dict(base.state_dict())
    head.save_pretrained(tmp_path / "task1")
    rename(tmp_path / "task1", old_name)
    out = merge(tmp_path, ["task1"], **ALL)
    norm = head.cls.predictions.transform.LayerNorm.weight
    assert torch.equal(load_task(out, "task1").cls.predictions.transform.LayerNorm.weight, norm)


@pytest.mark.skipif(hf.__version__ < "5", reason="transformers 4 loads one layout")
@pytest.mark.parametrize("family", ["vit", "dinov2"])
@pytest.mark.parametrize("renamed", ["base", "task1"])
def test_names_of_transformers_5_and_those_that_it_saves_are_of_the_same_tensors(
    tmp_path, family, renamed
):
    models = save_stream(tmp_path, FAMILIES[family](), tasks=1)
    loaded = type(models["task1"]).from_pretrained
    expected = loaded(merge(tmp_path, ["task1"], "expected", **ALL)).state_dict()
    names = {"base": "_pretrained_", "task1": "task1"}
    for path in (tmp_path / renamed).glob("model*"):
        path.unlink()
    models[names[renamed]].save_pretrained(tmp_path / renamed, save_original_format=False)
    assert tensors(tmp_path / "base").keys() != tensors(tmp_path / "task1").keys()
    assert same(loaded(merge(tmp_path, ["task1"], **ALL)).state_dict(), expected)


#: Names of transformers that the package uses and that are not all public, by its major version.
USED = {
    4: ["modeling_utils:PreTrainedModel._fix_state_dict_key_on_load"],
    5: [
        "conversion_mapping:get_model_conversion_mapping",
        "conversion_mapping:get_checkpoint_conversion_mapping",
        "core_model_loading:rename_source_key",
        "core_model_loading:revert_weight_conversion",
        "core_model_loading:WeightTransform.was_used",
        "core_model_loading:WeightTransform._original_source_patterns",
        "core_model_loading:WeightTransform.source_patterns",
        "modeling_utils:PreTrainedModel.get_expanded_tied_weights_keys",
    ],
}
IN_ALL = ["PreTrainedModel._from_config", "PreTrainedModel._keys_to_ignore_on_load_unexpected"]


@pytest.mark.oldest
def test_transformers_has_the_names_that_are_used_of_it():
    version = int(hf.__version__.partition(".")[0])
    for path in [*USED[version], *(f"modeling_utils:{name}" for name in IN_ALL)]:
        module, _, attributes = path.partition(":")
        attrgetter(attributes)(import_module(f"transformers.{module}"))  # or it raises
    if version > 4:
        model = FAMILIES["gpt2"]()
        assert model.all_tied_weights_keys == {"lm_head.weight": "transformer.wte.weight"}
        legacy = import_module("transformers.conversion_mapping")
        assert legacy.get_checkpoint_conversion_mapping("legacy")
        # An empty list of conversions, and not the model's own, is what was used.
        stored = {"lm_head.weight": torch.ones(1)}
        holder = SimpleNamespace(_weight_conversions=[], config=model.config)
        core = import_module("transformers.core_model_loading")
        assert core.revert_weight_conversion(holder, stored) == stored
