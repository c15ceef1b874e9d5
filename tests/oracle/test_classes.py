"""Adapters of every class of transformers that builds tiny are merged as peft merges each."""

import re
import warnings
from copy import deepcopy

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from tests.merge.helpers import merge
from tests.oracle.cases import linear_names
from tests.tiny_models import adapt_at_random

# From the class of most uses to the one without a head.
MAPPINGS = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CTC_MAPPING",
    "MODEL_MAPPING",
)
# Sizes by the names of fields, the first that fits.
SIZES = (
    (r"vocab_size|.*_vocab_size", 64),
    (r"(num_|n_|text_num_|vision_)?(hidden_|encoder_|decoder_)?layers?|depth|n_layers?", 2),
    (r".*(num_attention_heads|num_heads|n_heads?|attention_heads|key_value_heads|kv_heads)", 2),
    (r".*(num_experts|n_routed_experts|num_local_experts|moe_num_experts)", 3),
    (r"num_experts_per_tok|top_k|moe_k|moe_topk", 2),
    (r".*head_dim|d_kv|.*rope_dim", 16),
    (r".*(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|mlp_dim)", 48),
    (r"image_size|img_size", 32),
    (r"patch_size", 8),
    (r".*(hidden_size|d_model|n_embd|embed_dim|hidden_dim|projection_dim|lora_rank)", 32),
    (r".*(max_position_embeddings|n_positions|max_source_positions|max_target_positions)", 64),
    (r".*_token_(id|index)", 3),
)
MOST_PARAMETERS = 3_000_000


def tiny(fields):
    """The sizes of a configuration's fields, those of its parts included."""
    small = {}
    for name, value in fields.items():
        if isinstance(value, dict) and "model_type" in value:
            small[name] = {**tiny(value), "model_type": value["model_type"]}
        elif isinstance(value, int) and not isinstance(value, bool):
            for pattern, size in SIZES:
                if re.fullmatch(pattern, name):
                    small[name] = size
                    break
    return small


def tiny_model(model_type):
    """A model of the first class that transformers has of a type, or None if it builds not tiny."""
    config_class = transformers.CONFIG_MAPPING[model_type]
    try:
        config = config_class(**tiny(config_class().to_dict()))
        for mapping in MAPPINGS:
            kind = getattr(transformers, mapping).get(config_class, None)
            if kind is not None:
                break
        if isinstance(kind, tuple):
            kind = kind[0]
        with torch.device("meta"):
            size = sum(weight.numel() for weight in kind(deepcopy(config)).parameters())
        if size > MOST_PARAMETERS:
            return None
        torch.manual_seed(0)
        return kind(config).eval()
    except Exception:  # whatever such sizes do not fit
        return None


def layers_of_adapters(model):
    """The last parts of the names of linear layers, but for those of convolutions, too."""
    if model is None:
        return []
    others = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            others.add(path.rpartition(".")[2])
    return [name for name in linear_names(model) if name not in others]


def save_adapter(folder, base, seed, targets):
    model = get_peft_model(base, LoraConfig(r=2, target_modules=targets))
    adapt_at_random(model, seed, 0.1)
    model.save_pretrained(folder)


def merged_by_peft(kind, folder, adapter):
    base = kind.from_pretrained(folder / "base", dtype=torch.float64)
    # It says so where it leaves tensors of an adapter out.
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        wrapped = PeftModel.from_pretrained(base, folder / adapter)
    return wrapped.merge_and_unload().state_dict()


@pytest.mark.oracle
@pytest.mark.parametrize("model_type", sorted(transformers.CONFIG_MAPPING))
def test_adapters_of_a_class_are_merged_as_peft_merges_each(model_type, tmp_path):
    model = tiny_model(model_type)
    names = layers_of_adapters(model)
    if not names:
        pytest.skip("does not build tiny, or has no linear layer with a name")
    kind = type(model)
    model.double().save_pretrained(tmp_path / "base")
    for number in (1, 2):
        base = kind.from_pretrained(tmp_path / "base", dtype=torch.float64)
        targets = [names[number % len(names)], names[-1]]
        try:
            save_adapter(tmp_path / f"task{number}", base, number, targets)
        except ValueError as error:
            pytest.skip(f"peft does not wrap it: {error}")
    before = kind.from_pretrained(tmp_path / "base", dtype=torch.float64).state_dict()
    if any(not torch.equal(value, before[name]) for name, value in model.state_dict().items()):
        pytest.skip("transformers does not load what it saved")
    expected = deepcopy(before)
    for number in (1, 2):
        try:
            merged = merged_by_peft(kind, tmp_path, f"task{number}")
        except UserWarning:
            pytest.skip("peft does not read what it saved")
        for name, value in merged.items():
            # What is infinite, such as a bound of activations, has no difference.
            change = torch.where(value == before[name], 0, value - before[name])
            expected[name] = expected[name] + change
    options = {"method": "sum", "scale": 1.0, "target_modules": "all-linear"}
    options["other_params"] = "mean"
    out = merge(tmp_path, ["task1", "task2"], "out", settings={"adapter": True}, **options)
    found = merged_by_peft(kind, tmp_path, out.name)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
