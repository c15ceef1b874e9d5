"""What two models compute otherwise is told from their configurations, whichever version wrote
them, and nothing else is.
"""

import json

import pytest
import transformers as hf

from fusion_bench_nufilt.models.configurations import check_configuration, config_differences

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}


def llama(**fields):
    return {"model_type": "llama", **SIZES, **fields}


def llava(**fields):
    vision = {"model_type": "clip_vision_model", "hidden_act": "quick_gelu"}
    return {"model_type": "llava", "text_config": llama(**fields), "vision_config": vision}


def fields_of(base, task):
    """The base's and the task's values of what differs, by the names of transformers 4."""
    values = {}
    for difference in config_differences(base, task):
        name = difference.name.replace("rope_parameters.", "").replace("rope_type", "rope_scaling")
        values[name] = (difference.stored, difference.wanted)
    return values


@pytest.mark.parametrize(
    ("field", "value", "default"),
    [
        ("rope_theta", 1e6, 1e4),
        ("hidden_act", "gelu", "silu"),
        ("rms_norm_eps", 1e-5, 1e-6),
        ("num_key_value_heads", 2, 4),
        ("max_position_embeddings", 4096, 2048),
        ("attention_bias", True, False),
    ],
)
def test_a_field_that_the_model_computes_with_is_named_with_both_values(field, value, default):
    assert fields_of(llama(), llama(**{field: value})) == {field: (default, value)}
    assert fields_of(llama(**{field: value}), llama()) == {field: (value, default)}
    assert fields_of(llava(), llava(**{field: value})) == {f"text_config.{field}": (default, value)}
    assert fields_of(llama(**{field: value}), llama(**{field: value})) == {}


def test_longer_contexts_are_told_however_they_are_written():
    scaling = {"rope_type": "linear", "factor": 2.0}
    of_version_5 = llama(rope_parameters={"rope_theta": 1e4, **scaling})
    of_version_4 = llama(rope_scaling=scaling)
    of_version_3 = llama(rope_scaling={"type": "linear", "factor": 2.0})
    for long in (of_version_5, of_version_4, of_version_3):
        assert list(fields_of(llama(), long)) == ["rope_scaling"]
        assert fields_of(of_version_4, long) == {}
    wider = llama(rope_scaling={"rope_type": "linear", "factor": 4.0})
    assert fields_of(of_version_4, wider)


@pytest.mark.oldest
def test_what_two_versions_of_transformers_write_is_the_same():
    of_version_4 = {"rope_theta": 1e6, "rope_scaling": None, "torch_dtype": "bfloat16"}
    rope = {"rope_theta": 1e6, "rope_type": "default"}
    of_version_5 = {"rope_parameters": rope, "dtype": "bfloat16", "pad_token_id": None}
    assert fields_of(llama(**of_version_4), llama(**of_version_5)) == {}
    assert fields_of(llava(**of_version_5), llava(**of_version_4)) == {}


KINDS = ["Llama", "Mistral", "Qwen2", "Gemma2", "GPTNeoX", "Phi3", "T5", "Bert", "ViT", "CLIP"]


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_that_are_written_out_are_those_that_are_left_out(kind):
    config = getattr(hf, f"{kind}Config")()
    written_out = config.to_dict()
    assert config_differences(config.to_diff_dict(), written_out) == []
    assert config_differences(written_out, {"model_type": config.model_type}) == []


def test_keys_that_a_class_reads_as_numbers_are_compared_as_the_file_has_them():
    for kind in ("aria", "llama"):
        config = hf.CONFIG_MAPPING[kind]()
        for content in (config.to_dict(), json.loads(config.to_json_string(use_diff=False))):
            written = {**content, "a_field_of_mine": 1}
            (difference,) = config_differences(written, {**written, "a_field_of_mine": 2})
            assert difference.name == "a_field_of_mine"
    aria = hf.CONFIG_MAPPING["aria"]().to_dict()
    changed = {**aria, "projector_patch_to_query_dict": {"1225": 64, "4900": 256}}
    assert list(fields_of(aria, changed)) == ["projector_patch_to_query_dict.1225"]


IDLE = {
    "id2label": {"0": "cat", "1": "dog", "2": "bird"},
    "num_labels": 5,
    "problem_type": "regression",
    "vocab_size": 77,
    "eos_token_id": 7,
    "pad_token_id": 3,
    "torch_dtype": "float16",
    "transformers_version": "4.0.0",
    "unsloth_version": "2024.9",
    "_name_or_path": "elsewhere",
    "architectures": ["LlamaForSequenceClassification"],
    "use_cache": False,
    "attention_dropout": 0.1,
    "initializer_range": 0.1,
    "max_length": 5,
    "temperature": 0.5,
    "tie_word_embeddings": True,
    "output_attentions": True,
}


@pytest.mark.parametrize("field", IDLE)
def test_labels_tokens_dtypes_names_and_what_only_training_needs_are_no_difference(field):
    changed = llama(**{field: IDLE[field]})
    assert config_differences(llama(), changed) == config_differences(changed, llama()) == []
    assert (
        config_differences({**llama(), "model_type": "mine"}, {**changed, "model_type": "mine"})
        == []
    )


def test_a_part_of_a_model_is_compared_with_a_model_that_is_that_part():
    assert fields_of(llava(), llama()) == fields_of(llama(), llava()) == {}
    assert fields_of(llava(), llama(rope_theta=1e6)) == {"rope_theta": (1e4, 1e6)}
    assert fields_of(llama(), llava(rope_theta=1e6)) == {"rope_theta": (1e4, 1e6)}
    qwen = hf.Qwen2VLConfig().to_dict()
    alone = {**qwen["text_config"], "model_type": "qwen2", "hidden_act": "relu"}
    assert fields_of(qwen, alone)["hidden_act"] == ("silu", "relu")
    towers = hf.CLIPConfig().to_dict()
    assert config_differences(towers, towers["vision_config"]) == []


def test_another_type_is_all_that_is_said():
    mistral = {**llama(), "model_type": "mistral", "rms_norm_eps": 0.5}
    for base in (llama(), llava()):
        (difference,) = config_differences(base, mistral)
        assert difference.name == "model_type"
        assert (difference.stored, difference.wanted) == (base["model_type"], "mistral")
    text = {"text_config": {**llama(), "model_type": "mistral"}}
    names = [difference.name for difference in config_differences(llava(), {**llava(), **text})]
    assert "text_config.model_type" in names


def test_a_type_that_transformers_does_not_know_is_compared_field_by_field():
    base = {"model_type": "mine", "theta": 1, "only": 2}
    assert fields_of(base, {"model_type": "mine", "theta": 3, "new": 4}) == {"theta": (1, 3)}
    assert fields_of(base, {}) == fields_of({}, base) == {}


def test_values_that_transformers_refuses_are_compared_as_they_are():
    damaged = llama(hidden_size="wide", rms_norm_eps=0.5)
    assert fields_of(llama(rms_norm_eps=0.25), damaged)["rms_norm_eps"] == (0.25, 0.5)


def test_a_configuration_is_not_changed_by_comparing_it():
    base = llava(rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    before = repr(base)
    config_differences(base, base)
    assert repr(base) == before


def test_values_from_elsewhere_are_short_and_printable():
    task = {**llama(), "model_type": "mine", "act": "\x1b[2J" + 100 * "x"}
    base = {**llama(), "model_type": "mine", "act": "silu"}
    (warning,) = check_configuration("task", task, base, verify=True, remedy="")
    assert warning.isprintable()
    assert len(warning) < 200
