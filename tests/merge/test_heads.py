"""Classifiers of one backbone with heads of their own: the backbone is merged, each task's head is
kept.
"""

import json
from copy import deepcopy

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from fusion_bench_nufilt import LayerwiseMergingAlgorithm, load_task
from tests.classifiers import KINDS, labels, logits_and_accuracy, train
from tests.merge.helpers import change, change_json, manifest, merge, plan, same, tensors
from tests.models.test_quantised import quantise
from tests.tiny_models import SMALL, adapt_at_random, build, finetuned

VIT = {**SMALL, "image_size": 16, "patch_size": 8}


def save(folder, kind, base=None):
    """Save a backbone, or another base, and the classifiers that were trained from it."""
    backbone, models = train(kind)
    (base or backbone).save_pretrained(folder / "base")
    for task, model in models.items():
        model.save_pretrained(folder / task)
    return models


def imagenet():
    """A classifier of 1000 classes with the backbone that the tasks start from."""
    base = build(hf.ViTForImageClassification, hf.ViTConfig(**VIT, num_labels=1000), 0)
    base.vit.load_state_dict(train("vit")[0].state_dict(), strict=False)
    return base


def by_hand(out, model, backbone):
    """A trained classifier whose backbone is the one in a folder."""
    whole = type(model)(model.config).eval()
    whole.load_state_dict(model.state_dict())
    merged = backbone.from_pretrained(out).base_model
    whole.base_model.load_state_dict(merged.state_dict(), strict=False)
    return whole


@pytest.mark.parametrize(("kind", "base"), [("vit", imagenet), ("bert", None)])
def test_a_task_scores_as_the_merged_backbone_with_its_head_put_on_by_hand(tmp_path, kind, base):
    models = save(tmp_path, kind, base and base())
    out = merge(tmp_path, list(models))
    backbone = KINDS[kind][2]
    if base is not None:
        backbone = hf.ViTForImageClassification
    for task, model in models.items():
        loaded = load_task(out, task)
        expected, accuracy = logits_and_accuracy(by_hand(out, model, backbone), kind, task)
        logits, loaded_accuracy = logits_and_accuracy(loaded, kind, task)
        assert torch.equal(logits, expected)
        assert loaded_accuracy == accuracy > 1 / len(model.config.id2label)
        assert type(loaded) is type(model)
        assert loaded.config.id2label == model.config.id2label
        assert not loaded.training
        unmerged_logits, _ = logits_and_accuracy(model, kind, task)
        assert not torch.equal(unmerged_logits, expected)


def test_the_merged_folder_is_that_of_the_backbones_and_heads_are_kept_bit_by_bit(tmp_path):
    options = {"target_modules": "all-linear", "other_params": "mean"}
    models = save(tmp_path, "bert")
    for task, model in models.items():
        model.bert.save_pretrained(tmp_path / f"{task} bare")
    out = merge(tmp_path, list(models), **options)
    bare = merge(tmp_path, [f"{task} bare" for task in models], "bare", **options)
    assert same(tensors(out), tensors(bare))
    for task, model in models.items():
        head = load_file(out / "heads" / f"{task}.safetensors")
        trained = model.classifier.state_dict()
        assert same(head, {f"classifier.{key}": value for key, value in trained.items()})
        description = manifest(out)["heads"][task]
        assert description["modules"] == ["classifier"]
        assert description["config"]["label2id"] == model.config.label2id
        assert f"heads/{task}.safetensors" in manifest(out)["files"]
    assert "load_task(" in (out / "README.md").read_text()


def test_a_task_that_is_added_leaves_the_earlier_heads_as_they_are(tmp_path):
    save(tmp_path, "vit")
    merge(tmp_path, ["few", "ten"], "first")
    out = merge(tmp_path, ["letters"], "second", merged="first")
    at_once = merge(tmp_path, ["few", "ten", "letters"])
    assert list(manifest(out)["heads"]) == ["few", "ten", "letters"]
    for task in ("few", "ten", "letters"):
        file = f"heads/{task}.safetensors"
        assert (out / file).read_bytes() == (at_once / file).read_bytes()
    kept = tmp_path / "first" / "heads" / "ten.safetensors"
    kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match=r"heads/ten.safetensors is not what was saved"):
        merge(tmp_path, ["letters"], "third", merged="first")
    with pytest.raises(ValueError, match=r"heads/ten.safetensors is not what was saved"):
        load_task(tmp_path / "first", "ten")
    assert len(load_task(tmp_path / "first", "few").config.id2label) == 5
    assert not (tmp_path / "third").exists()


def test_classifiers_of_the_same_labels_share_their_head_unless_the_user_names_it(tmp_path):
    base = build(hf.ViTForImageClassification, hf.ViTConfig(**VIT, num_labels=3), 0)
    base.save_pretrained(tmp_path / "base")
    for seed, name in enumerate(("one", "two"), 1):
        finetuned(base, seed, scale=0.002).save_pretrained(tmp_path / name)
    assert not plan(tmp_path, ["one", "two"], target_modules="all-linear").heads
    alone = plan(tmp_path, ["one"], target_modules="all-linear")
    assert "classifier" in [layer.name for layer in alone.layers]
    named = plan(tmp_path, ["one", "two"], target_modules="all-linear", heads="classifier")
    assert list(named.heads) == ["one", "two"]
    assert "classifier" not in [layer.name for layer in named.layers]
    change_json(tmp_path / "two" / "config.json", **labels(["cat", "dog", "cow"]))
    # One task's own head is every task's.
    assert list(plan(tmp_path, ["one", "two"]).heads) == ["one", "two"]
    with pytest.raises(ValueError, match=r"one': heads='clasifier' matches none of its modules"):
        plan(tmp_path, ["one", "two"], heads="clasifier")


def test_where_all_layers_to_merge_are_in_heads_the_message_says_what_merges_them(tmp_path):
    base = build(hf.ViTForImageClassification, hf.ViTConfig(**VIT, num_labels=3), 0)
    base.save_pretrained(tmp_path / "base")
    finetuned(base, 1, scale=0.002).save_pretrained(tmp_path / "one")
    options = {"target_modules": ["classifier"]}
    message = r"all 1 layers to merge in '.*base' belong to the tasks' own heads \(classifier\).*"
    with pytest.raises(ValueError, match=f"{message} say heads=none"):
        plan(tmp_path, ["one"], heads="classifier", **options)
    assert len(plan(tmp_path, ["one"], heads="none", **options).layers) == 1


#: Encoders: configuration, model with the head of a masked language model, classifier.
ENCODERS = {
    "bert": (hf.BertConfig, hf.BertForMaskedLM, hf.BertForSequenceClassification),
    "bert pretraining": (hf.BertConfig, hf.BertForPreTraining, hf.BertForSequenceClassification),
    "roberta": (hf.RobertaConfig, hf.RobertaForMaskedLM, hf.RobertaForSequenceClassification),
    "xlm-roberta": (
        hf.XLMRobertaConfig,
        hf.XLMRobertaForMaskedLM,
        hf.XLMRobertaForSequenceClassification,
    ),
    "deberta": (
        hf.DebertaV2Config,
        hf.DebertaV2ForMaskedLM,
        hf.DebertaV2ForSequenceClassification,
    ),
    "distilbert": (
        hf.DistilBertConfig,
        hf.DistilBertForMaskedLM,
        hf.DistilBertForSequenceClassification,
    ),
    "electra": (hf.ElectraConfig, hf.ElectraForPreTraining, hf.ElectraForSequenceClassification),
    "modernbert": (
        hf.ModernBertConfig,
        hf.ModernBertForMaskedLM,
        hf.ModernBertForSequenceClassification,
    ),
}


def save_encoders(folder, family, counts=(3, 4)):
    """A masked language model, and the classifiers ``task1``, ``task2`` made from it; return all by
    name.
    """
    config, with_lm_head, classifier = ENCODERS[family]
    options = {**SMALL, "pad_token_id": 0, "num_labels": 2}
    if family == "distilbert":
        options = {"n_layers": 2, "n_heads": 2, "dim": 32, "hidden_dim": 64}
    options["vocab_size"] = 50
    if family == "modernbert":
        for token in ("bos", "cls", "eos", "sep"):
            options[f"{token}_token_id"] = 1
    base = build(with_lm_head, config(**options), 0)
    models = {"_pretrained_": base}
    for number, count in enumerate(counts, 1):
        task = build(classifier, config(**{**options, "num_labels": count}), number)
        task.base_model.load_state_dict(base.base_model.state_dict(), strict=False)
        models[f"task{number}"] = finetuned(task, number, scale=0.002)
        models[f"task{number}"].save_pretrained(folder / f"task{number}")
    base.save_pretrained(folder / "base")
    return models


LINEAR = {"method": "sum", "target_modules": "all-linear", "other_params": "mean"}


@pytest.mark.parametrize("family", ENCODERS)
def test_the_base_may_have_the_head_of_a_masked_language_model(tmp_path, family):
    models = save_encoders(tmp_path, family)
    out = merge(tmp_path, ["task1", "task2"], **LINEAR)
    base = tensors(tmp_path / "base")
    result = tensors(out)
    prefix = models["_pretrained_"].base_model_prefix
    for key, value in base.items():
        in_backbone = key.startswith(f"{prefix}.")
        assert in_backbone != torch.equal(result[key], value), key
    words = torch.arange(3, 19).reshape(2, 8)
    for task, count in (("task1", 3), ("task2", 4)):
        head = load_file(out / "heads" / f"{task}.safetensors")
        assert not any("embedding" in key for key in head)
        assert load_task(out, task)(words).logits.shape == (2, count)


@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_pools_and_folders_take_the_same_heads_from_a_masked_language_model(tmp_path, family):
    models = save_encoders(tmp_path, family)
    result = tensors(merge(tmp_path, ["task1", "task2"], **LINEAR))
    merge(tmp_path, ["task1"], "one", **LINEAR)
    assert same(tensors(merge(tmp_path, ["task2"], "two", merged="one", **LINEAR)), result)
    options = {key: value for key, value in LINEAR.items() if key != "method"}
    algorithm = LayerwiseMergingAlgorithm("sum", shuffle_order=False, **options)
    loaded = algorithm.run(models).state_dict()
    assert same({key: loaded[key] for key in result}, result)


@pytest.mark.parametrize("family", ["bert", "roberta", "deberta"])
def test_a_masked_language_model_whose_config_names_no_class_takes_classifiers(tmp_path, family):
    save_encoders(tmp_path, family)
    expected = tensors(merge(tmp_path, ["task1", "task2"], **LINEAR))
    change_json(tmp_path / "base" / "config.json", architectures=None)
    assert same(tensors(merge(tmp_path, ["task1", "task2"], "out2", **LINEAR)), expected)


@pytest.mark.parametrize("order", [["task1", "lm"], ["lm", "task1"]])
def test_a_masked_language_model_among_classifiers_keeps_its_head(tmp_path, order):
    base = save_encoders(tmp_path, "roberta")["_pretrained_"]
    task = finetuned(base, 5, scale=0.002)
    task.save_pretrained(tmp_path / "lm")
    out = merge(tmp_path, order, **LINEAR)
    before = tensors(tmp_path / "base")
    after = tensors(out)
    assert torch.equal(after["lm_head.dense.weight"], before["lm_head.dense.weight"])
    loaded = load_task(out, "lm").state_dict()
    assert torch.equal(loaded["lm_head.dense.weight"], task.lm_head.dense.weight)
    embedding = "roberta.embeddings.word_embeddings.weight"
    assert torch.equal(loaded[embedding], after[embedding])


def test_a_classifier_without_its_output_layer_is_refused_though_the_base_has_one(tmp_path):
    base = build(hf.ViTForImageClassification, hf.ViTConfig(**VIT, num_labels=3), 0)
    base.save_pretrained(tmp_path / "base")
    finetuned(base, 1, scale=0.002).save_pretrained(tmp_path / "task1")
    change(tmp_path / "task1", "classifier.weight", lambda value: None)
    with pytest.raises(ValueError, match=r"task1' lacks 'classifier\.weight'"):
        merge(tmp_path, ["task1"], **LINEAR)


def test_without_heads_another_number_of_labels_is_refused(tmp_path):
    save(tmp_path, "vit", imagenet())
    message = r"few', tensor 'classifier.*: shape \(5.*a head that --heads can name"
    with pytest.raises(ValueError, match=message):
        plan(tmp_path, ["few"], heads="none")


def test_tasks_whose_folders_have_one_name_keep_their_heads_apart(tmp_path):
    save(tmp_path, "vit")
    folders = [tmp_path / task / "last" for task in ("few", "ten")]
    for folder in folders:
        files = list(folder.parent.iterdir())
        folder.mkdir()
        for file in files:
            file.rename(folder / file.name)
    out = merge(tmp_path, folders)
    sizes = {task: len(load_task(out, task).config.id2label) for task in manifest(out)["heads"]}
    assert sizes == {"last": 5, "last-2": 10}


def save_adapter(folder, backbone, with_head, target_modules, **config):
    """Folders `base` and `adapter`, of LoRA and a trained classifier; return peft's model."""
    backbone.save_pretrained(folder / "base")
    model = with_head.from_pretrained(folder / "base", num_labels=4)
    # An adapter for this type of task comes with its classifier.
    lora = LoraConfig(r=4, target_modules=target_modules, task_type="SEQ_CLS", **config)
    adapted = get_peft_model(model, lora)
    adapt_at_random(adapted, 1)
    adapted.save_pretrained(folder / "adapter")
    return adapted


def save_bert_adapter(folder):
    with_head = hf.BertForSequenceClassification
    return save_adapter(folder, train("bert")[0], with_head, ["query", "value"])


def save_distilbert_adapter(folder):
    """By name, the layer before the output layer follows it."""
    sizes = {"dim": 32, "hidden_dim": 64, "n_layers": 1, "n_heads": 2, "vocab_size": 50}
    backbone = build(hf.DistilBertModel, hf.DistilBertConfig(**sizes), 0)
    with_head = hf.DistilBertForSequenceClassification
    return save_adapter(folder, backbone, with_head, ["q_lin", "v_lin"])


@pytest.mark.parametrize("save", [save_bert_adapter, save_distilbert_adapter])
def test_an_adapters_trained_classifier_is_a_head(tmp_path, save):
    adapted = save(tmp_path)
    out = merge(tmp_path, ["adapter"])
    merged = adapted.merge_and_unload().eval()
    loaded = load_task(out, "adapter")
    assert loaded.num_labels == 4
    assert torch.equal(loaded.classifier.weight, merged.classifier.weight)
    words = torch.arange(3, 19).reshape(2, 8)
    torch.testing.assert_close(loaded(words).logits, merged(words).logits)


def test_beside_an_adapter_the_configuration_of_its_base_does_not_tell_the_class(tmp_path):
    """Some programs write it there, with the labels that the adapter was trained for."""
    adapted = save_bert_adapter(tmp_path)
    config = hf.AutoConfig.from_pretrained(tmp_path / "base", **labels(["a", "b", "c", "d"]))
    assert config.architectures == ["BertModel"]
    config.save_pretrained(tmp_path / "adapter")
    loaded = load_task(merge(tmp_path, ["adapter"]), "adapter")
    assert list(loaded.config.label2id) == ["a", "b", "c", "d"]
    merged = adapted.merge_and_unload()
    assert torch.equal(loaded.classifier.weight, merged.classifier.weight)


def test_the_labels_of_an_adapter_are_the_outputs_of_the_last_layer_of_its_head(tmp_path):
    """Which is neither the last by name nor the only one that is not square."""
    convolutions = {"conv_dim": [8, 8], "conv_kernel": [3, 3], "conv_stride": [2, 2]}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    sizes = {**SMALL, "vocab_size": 20, "classifier_proj_size": 64, **convolutions, **positions}
    build(hf.Wav2Vec2Model, hf.Wav2Vec2Config(**sizes), 0).save_pretrained(tmp_path / "base")
    with_head = hf.Wav2Vec2ForSequenceClassification
    model = with_head.from_pretrained(tmp_path / "base", num_labels=4)
    modules = ["projector", "classifier"]
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=modules))
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = load_task(merge(tmp_path, ["adapter"], target_modules=["q_proj"]), "adapter")
    assert loaded.config.num_labels == 4
    merged = adapted.merge_and_unload()
    assert torch.equal(loaded.projector.weight, merged.projector.weight)


def test_the_head_of_an_adapter_on_an_fp8_base_belongs_to_a_model_that_is_not_quantised(tmp_path):
    """As the result is: on a GPU, transformers would look for the scales of its weights."""
    save_bert_adapter(tmp_path)
    quantise(tmp_path / "base", layers=r".*(query|key|value)\.weight")
    out = merge(tmp_path, ["adapter"])
    assert "quantization_config" not in manifest(out)["heads"]["adapter"]["config"]
    assert not getattr(load_task(out, "adapter").config, "quantization_config", None)


def test_rows_of_tokens_that_a_head_of_the_base_is_tied_to_are_no_head(tmp_path):
    """Another adapter changes the base's output layer alone, which is a weight of its own then."""
    base = save_encoders(tmp_path, "roberta", ())["_pretrained_"]
    of_words = get_peft_model(deepcopy(base), LoraConfig(r=2, target_modules=["value", "decoder"]))
    adapt_at_random(of_words, 2)
    of_words.save_pretrained(tmp_path / "words")
    with_head = hf.RobertaForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=4)
    tokens = {"word_embeddings": [3, 7]}
    lora = LoraConfig(
        r=4, target_modules=["query"], task_type="SEQ_CLS", trainable_token_indices=tokens
    )
    adapted = get_peft_model(with_head, lora)
    adapt_at_random(adapted, 1)
    adapted.save_pretrained(tmp_path / "adapter")
    out = merge(tmp_path, ["words", "adapter"], other_params="mean")
    head = load_file(out / "heads" / "adapter.safetensors")
    assert not any("embedding" in key for key in head)
    assert len(load_task(out, "adapter").config.id2label) == 4


def test_of_all_biases_those_of_a_head_have_the_names_of_the_model_alone(tmp_path):
    """Peft saves them under its own as well."""
    backbone = build(hf.ElectraModel, hf.ElectraConfig(**SMALL, vocab_size=50), 0)
    with_head = hf.ElectraForSequenceClassification
    adapted = save_adapter(tmp_path, backbone, with_head, ["query"], bias="all")
    loaded = load_task(merge(tmp_path, ["adapter"]), "adapter")
    merged = adapted.merge_and_unload()
    assert torch.equal(loaded.classifier.out_proj.bias, merged.classifier.out_proj.bias)


def test_a_head_under_the_name_of_pefts_wrapper_is_kept_under_that_of_the_model(tmp_path):
    adapted = save_bert_adapter(tmp_path)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    state = load_file(path)
    for key in [key for key in state if ".classifier." in key]:
        state[key.replace("classifier.", "classifier.modules_to_save.")] = state.pop(key)
    save_file(state, path)
    loaded = load_task(merge(tmp_path, ["adapter"]), "adapter")
    merged = adapted.merge_and_unload()
    assert torch.equal(loaded.classifier.weight, merged.classifier.weight)


def test_a_merge_is_made_again_when_the_names_of_labels_change(tmp_path):
    save(tmp_path, "vit")
    merge(tmp_path, ["few"])
    assert merge(tmp_path, ["few"])  # finished
    change_json(tmp_path / "few" / "config.json", **labels("abcde"))
    with pytest.raises(ValueError, match="exists"):
        merge(tmp_path, ["few"])


def test_what_load_task_cannot_do_is_said(tmp_path):
    save(tmp_path, "vit")
    out = merge(tmp_path, ["few", "ten"])
    with pytest.raises(ValueError, match="no head of 'birds': there are those of 'few', 'ten'"):
        load_task(out, "birds")
    with pytest.raises(ValueError, match="no head of 'few': its tasks have no heads of their own"):
        load_task(tmp_path / "base", "few")
    content = manifest(out)
    content["heads"]["few"]["config"]["architectures"] = ["MyOwn"]
    (out / "nufilt.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="transformers has no class 'MyOwn'"):
        load_task(out, "few")
