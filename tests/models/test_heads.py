"""Which modules of a classifier are its head, by family: compared with what the classes put outside
their backbone.
"""

import pytest
import torch
import transformers as hf

from fusion_bench_nufilt.models.heads import Heads, labels
from tests.tiny_models import SMALL, VISION

TEXT = {**SMALL, "vocab_size": 50}
DISTIL = {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2, "vocab_size": 50}
CLIP = {"text_config": TEXT, "vision_config": VISION.to_dict()}
WAV = {
    **SMALL,
    "conv_dim": [8],
    "conv_kernel": [3],
    "conv_stride": [2],
    "num_conv_pos_embeddings": 4,
}
# By name: the configuration, its values, the class with a head, a backbone without it, and the
# head's modules.
FAMILIES = {
    "vit": ("ViT", dict(SMALL), "ViTForImageClassification", "ViTModel", {"classifier"}),
    "bert": ("Bert", TEXT, "BertForSequenceClassification", "BertModel", {"classifier"}),
    "bert, masked": ("Bert", TEXT, "BertForTokenClassification", "BertForMaskedLM", {"classifier"}),
    "roberta": (
        "Roberta",
        TEXT,
        "RobertaForSequenceClassification",
        "RobertaModel",
        {"classifier"},
    ),
    "distilbert": (
        "DistilBert",
        DISTIL,
        "DistilBertForSequenceClassification",
        "DistilBertModel",
        {"pre_classifier", "classifier"},
    ),
    "deberta": (
        "DebertaV2",
        TEXT,
        "DebertaV2ForSequenceClassification",
        "DebertaV2Model",
        {"pooler", "classifier"},
    ),
    "llama": ("Llama", TEXT, "LlamaForSequenceClassification", "LlamaForCausalLM", {"score"}),
    "clip": ("CLIP", CLIP, "CLIPForImageClassification", None, {"classifier"}),
    "wav2vec2": (
        "Wav2Vec2",
        WAV,
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Model",
        {"projector", "classifier"},
    ),
}


def build(family, count, names=None, *, bare=False):
    """The shapes and the configuration of a model with so many labels; one with a head or, if there
    is one, without.
    """
    config, values, with_head, backbone, _ = FAMILIES[family]
    config = getattr(hf, f"{config}Config")(**values, num_labels=count)
    if names:
        config.id2label = dict(enumerate(names))
    kind = with_head
    if bare and backbone:
        kind = backbone
    with torch.device("meta"):
        model = getattr(hf, kind)(config)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    return shapes, {**config.to_dict(), "model_type": config.model_type}, model.base_model_prefix


@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_is_all_that_a_class_has_beside_its_backbone(family, bare):
    base, config, prefix = build(family, 7, bare=bare)
    task, its_config, _ = build(family, 5)
    has_prefix = any(name.startswith(f"{prefix}.") for name in base)
    if bare and not has_prefix:  # as a merge names what both have
        task = {name.removeprefix(f"{prefix}."): shape for name, shape in task.items()}
    heads = Heads("auto", base, config, prefix)
    heads.add("task", task, its_config)
    assert heads.modules == FAMILIES[family][4]
    assert {name.split(".")[0] for name in heads.of(task)} == heads.modules


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_a_head_of_equal_size_is_a_tasks_own_if_its_labels_are(family):
    base, config, prefix = build(family, 3, "abc")
    for names, expected in (("abc", set()), ("xyz", FAMILIES[family][4])):
        heads = Heads("auto", base, config, prefix)
        heads.add("task", *build(family, 3, names)[:2])
        assert heads.modules == expected


def test_what_has_as_many_rows_as_there_are_labels_is_no_head_by_that_alone():
    """A BERT has two token types, and a backbone keeps the labels of the classifier that it was cut
    from.
    """
    base, config, prefix = build("bert", 2, bare=True)
    for names in (None, ("no", "yes")):
        heads = Heads("auto", base, config, prefix)
        its_config = dict(config)
        if names:
            its_config["id2label"] = dict(enumerate(names))
        heads.add("task", base, its_config)
        assert not heads.modules


def test_what_an_adapter_trained_is_a_head_only_if_it_is_new_or_as_long_as_the_labels():
    """What the adapter lacks is in its model all the same, so that no module around is the head."""
    base, config, prefix = build("bert", 3)
    trained = {"bert.pooler.dense.weight": (32, 32), "bert.pooler.dense.bias": (32,)}
    heads = Heads("auto", base, config, prefix)
    heads.add("task", trained, {}, ["pooler"])
    assert not heads.modules
    heads.add("task", {"bert.score.weight": (4, 32)}, {}, ["score"])
    assert heads.modules == {"bert.score"}
    heads.add(
        "task", {name: base[name] for name in base if "classifier" in name}, {}, ["classifier"]
    )
    assert heads.modules == {"bert.score", "classifier"}


@pytest.mark.parametrize("trained", ["out_proj", "classifier.out_proj"])
def test_the_module_that_an_adapter_trained_may_be_named_by_the_end_of_its_path(trained):
    bert, config, prefix = build("bert", 3)
    base = {name: shape for name, shape in bert.items() if name.startswith("bert.")}
    head = {"classifier.out_proj.weight": (3, 32), "classifier.out_proj.bias": (3,)}
    base |= {**head, "classifier.dense.weight": (32, 32)}
    heads = Heads("auto", base, config, prefix)
    heads.add("task", head, {}, [trained])
    assert heads.modules == {"classifier.out_proj"}


@pytest.mark.parametrize("family", ["llama", "bert, masked"])
def test_a_longer_vocabulary_is_no_head(family):
    base, config, prefix = build(family, 2, bare=True)
    task = dict(base)
    for name, shape in base.items():
        if shape[0] == 50:  # the vocabulary
            task[name] = (52, *shape[1:])
    for known in (config, {}):
        heads = Heads("auto", base, known, prefix)
        heads.add("task", task, known)
        assert not heads.modules


def test_without_a_configuration_the_last_matrix_of_another_length_is_the_head():
    base = {
        "features.0.0.weight": (8, 3, 3, 3),
        "classifier.1.weight": (1000, 8),
        "classifier.1.bias": (1000,),
    }
    task = {**base, "classifier.1.weight": (5, 8), "classifier.1.bias": (5,)}
    heads = Heads("auto", base, {})
    heads.add("task", base, {})
    assert not heads.modules
    heads.add("task", task, {})
    assert heads.of(task) == ["classifier.1.weight", "classifier.1.bias"]


def test_labels_are_read_as_transformers_writes_them():
    assert labels({"model_type": "vit"}) == {"0": "LABEL_0", "1": "LABEL_1"}
    assert labels({"model_type": "vit", "id2label": {0: "a"}}) == labels(
        {"model_type": "vit", "id2label": {"0": "a"}}
    )
    assert labels({}) is None
