"""A model that computes otherwise than its base is said, and one of another type is refused,
wherever models are merged.
"""

import json
import logging

import pytest
from safetensors.torch import load_file, save_file

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm
from tests.merge.helpers import RANKS, change_json, manifest, merge, plan, save_stream
from tests.models.test_adapters import save_all
from tests.tiny_models import finetuned, llama, llava

OTHER = {"rms_norm_eps": 0.5, "hidden_act": "gelu"}
REFUSED = "is of model_type 'mistral', and the base of 'llama'.*--no-verify"


def test_what_a_task_computes_otherwise_is_in_plan_manifest_and_card_with_both_values(stream):
    change_json(stream / "task2" / "config.json", **OTHER)
    (warning,) = plan(stream).warnings
    assert "hidden_act 'gelu' instead of 'silu'" in warning
    assert "rms_norm_eps 0.5 instead of 1e-06" in warning
    out = merge(stream)
    (recorded,) = manifest(out)["warnings"]
    assert recorded == warning.replace(str(stream / "task2"), "task2")
    assert f"- {recorded}\n" in (out / "README.md").read_text()


@pytest.mark.parametrize("task", ["task2", "adapter", "merged"])
def test_another_type_is_refused_and_no_verify_goes_on(tmp_path, task):
    save_all(tmp_path, llama())
    finetuned(llama(), 2).save_pretrained(tmp_path / "task2")
    finetuned(llama(), 3).save_pretrained(tmp_path / "merged")
    names = {"tasks": [task], "settings": {}}
    other = tmp_path / task
    if task == "merged":
        names = {"tasks": ["task1"], "merged": "merged", "settings": {"step": 2}}
    if task == "adapter":
        # The model that it was trained on, which is another one than the base.
        other = tmp_path / "trained_on"
        finetuned(llama(), 4).save_pretrained(other)
        change_json(tmp_path / task / "adapter_config.json", base_model_name_or_path=str(other))
    change_json(other / "config.json", model_type="mistral")
    with pytest.raises(ValueError, match=REFUSED):
        plan(tmp_path, **names)
    names["settings"]["verify"] = False
    warnings = plan(tmp_path, **names).warnings
    assert any("model_type 'mistral' instead of 'llama'" in warning for warning in warnings)


def test_the_base_of_an_adapter_is_compared_where_it_is_at_hand(tmp_path):
    save_all(tmp_path, llama())
    config = tmp_path / "adapter" / "adapter_config.json"
    trained_on = tmp_path / "there" / "base"
    finetuned(llama(), 4).save_pretrained(trained_on)
    change_json(config, base_model_name_or_path=str(trained_on))
    assert plan(tmp_path, ["adapter"]).warnings == []
    change_json(trained_on / "config.json", **OTHER)
    (warning,) = plan(tmp_path, ["adapter"]).warnings
    assert "'gelu' instead of 'silu'" in warning
    for absent in (str(tmp_path / "nowhere" / "base"), "owner/base", "no such name/of/a/base"):
        change_json(config, base_model_name_or_path=absent)
        assert plan(tmp_path, ["adapter"]).warnings == []


def test_a_language_model_is_compared_with_that_of_the_vision_language_model_it_goes_into(tmp_path):
    base = llava()
    save_stream(tmp_path, base, tasks=1, shards="1GB")
    # The language model of the task, by the names that it has in the base.
    file = tmp_path / "task1" / "model.safetensors"
    state = {key: value for key, value in load_file(file).items() if "vision" not in key}
    save_file(state, file, metadata={"format": "pt"})
    base.config.text_config.save_pretrained(tmp_path / "task1")
    assert plan(tmp_path, ["task1"]).warnings == []
    change_json(tmp_path / "task1" / "config.json", **OTHER)
    (warning,) = plan(tmp_path, ["task1"]).warnings
    assert "rms_norm_eps 0.5 instead of 1e-06" in warning
    change_json(tmp_path / "task1" / "config.json", model_type="mistral")
    with pytest.raises(ValueError, match="'mistral', and the base of 'llava'"):
        plan(tmp_path, ["task1"])


def test_what_only_names_and_numbers_labels_and_tokens_or_trains_is_no_warning(stream):
    fields = {"id2label": {"0": "no", "1": "yes"}, "attention_dropout": 0.1, "use_cache": False}
    change_json(
        stream / "task2" / "config.json", **fields, eos_token_id=3, transformers_version="4.0.0"
    )
    assert plan(stream).warnings == []


@pytest.mark.parametrize("check_models", [True, False])
def test_models_of_a_pool_are_compared_by_the_same_rule(caplog, check_models):
    base = llama()
    models = {"_pretrained_": base, "task1": finetuned(base, 1), "task2": finetuned(base, 2)}
    models["task2"].config.rms_norm_eps = 0.5
    options = {**RANKS, "shuffle_order": False, "check_models": check_models}
    with caplog.at_level(logging.WARNING):
        NufiltContinualMergingAlgorithm(**options).run(models)
    (warning,) = [text for text in caplog.messages if "computes otherwise" in text]
    assert "'task2' computes otherwise than the base" in warning
    assert "rms_norm_eps 0.5 instead of 1e-06" in warning
    models["task2"].config = type("Config", (type(base.config),), {"model_type": "mistral"})(
        **json.loads(base.config.to_json_string())
    )
    with pytest.raises(ValueError, match=r"of model_type 'mistral'.*method\.verify=false"):
        NufiltContinualMergingAlgorithm(**options).run(models)
    NufiltContinualMergingAlgorithm(**options, verify=False).run(models)
