"""Classifiers with heads of their own through `fusion_bench`: the backbone is merged, each task's
head is kept.
"""

import pytest
import torch
import transformers as hf

from fusion_bench_nufilt import (
    LayerwiseMergingAlgorithm,
    NufiltContinualMergingAlgorithm,
    load_task,
)
from tests.classifiers import KINDS, logits_and_accuracy, train
from tests.continual.helpers import logging_to
from tests.merge import helpers
from tests.merge.helpers import RANKS
from tests.tiny_models import finetuned

OPTIONS = {**RANKS, "shuffle_order": False}


def save(folder, kind):
    base, models = train(kind)
    for name, model in {"_pretrained_": base, **models}.items():
        model.save_pretrained(folder / name)
    return models


def pool(folder, names, kind):
    """Of folders that are all loaded as classifiers, the base with a head that is drawn at
    random.
    """
    names = {name: name for name in ("_pretrained_", *names)}
    return helpers.pool(folder, KINDS[kind][0], **names)


def step(folder, number):
    return folder / "checkpoints" / f"merged_model_{number - 1}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_scores_as_the_merged_backbone_with_the_head_put_on_by_hand(tmp_path, kind):
    models = save(tmp_path, kind)
    merged = logging_to(tmp_path / "log", NufiltContinualMergingAlgorithm(**OPTIONS)).run(
        pool(tmp_path, models, kind)
    )
    backbone = merged.base_model.state_dict()
    for task, model in models.items():
        by_hand = type(model)(model.config).eval()
        by_hand.base_model.load_state_dict(backbone)
        by_hand.classifier.load_state_dict(model.classifier.state_dict())
        expected = logits_and_accuracy(by_hand, kind, task)
        loaded = load_task(step(tmp_path / "log", 3), task)
        found = logits_and_accuracy(loaded, kind, task)
        assert torch.equal(found[0], expected[0])
        assert found[1] == expected[1]
        assert loaded.config.id2label == model.config.id2label
    with pytest.raises(ValueError, match=f"no head of '{task}'"):
        load_task(step(tmp_path / "log", 2), task)


def test_a_head_that_comes_after_the_first_step_unchecked_is_refused():
    base = hf.BertForSequenceClassification(KINDS["bert"][1])
    one = finetuned(base, 1)
    two = finetuned(base, 2)
    two.config.id2label = {0: "no", 1: "yes"}
    method = NufiltContinualMergingAlgorithm(**OPTIONS, check_models=False)
    with pytest.raises(
        ValueError,
        match=r"model 'two' has a head of its own \(classifier\).*set heads='classifier'",
    ):
        method.run({"_pretrained_": base, "one": one, "two": two})
    checked = NufiltContinualMergingAlgorithm(**OPTIONS, target_modules="all-linear")
    checked.run({"_pretrained_": base, "one": one, "two": two})
    assert list(checked.task_heads) == ["one", "two"]
    assert "classifier" not in checked.method.layers


def relabelled(base, seed):
    """A model with the base's class and shapes, and a head for labels of its own."""
    model = finetuned(base, seed)
    model.config.id2label = {0: "no", 1: "yes"}
    return model


def in_two_parts(folder, algorithm, base, one, two, **later):
    """Merge ``one``, and then ``two`` onto the checkpoint of that; ``later`` has options of the
    second run.
    """
    options = {**algorithm, "shuffle_order": False, "target_modules": "all-linear"}
    logging_to(folder / "log", LayerwiseMergingAlgorithm(**options)).run(
        {"_pretrained_": base, "one": one}
    )
    for name, model in {"_pretrained_": base, "two": two}.items():
        model.save_pretrained(folder / name)
    (folder / "_merged_").symlink_to(step(folder / "log", 1))
    second = logging_to(folder / "more", LayerwiseMergingAlgorithm(**options, **later))
    return second.run(pool(folder, ["_merged_", "two"], "bert")), second


ALGORITHMS = {"nufilt": {"layer_method": "nufilt", **RANKS}, "sum": {"layer_method": "sum"}}


@pytest.mark.parametrize(("algorithm", "check_models"), [("nufilt", True), ("sum", False)])
def test_a_head_that_was_set_aside_stays_aside_when_a_model_with_the_bases_labels_comes(
    tmp_path, algorithm, check_models
):
    base = hf.BertForSequenceClassification(KINDS["bert"][1]).eval()
    one = relabelled(base, 1)
    two = finetuned(base, 2)
    parts, method = in_two_parts(
        tmp_path, ALGORITHMS[algorithm], base, one, two, check_models=check_models
    )
    assert torch.equal(parts.classifier.weight, base.classifier.weight)
    assert list(method.task_heads) == ["one", "two"]
    whole = LayerwiseMergingAlgorithm(
        **ALGORITHMS[algorithm], shuffle_order=False, target_modules="all-linear"
    )
    expected = whole.run({"_pretrained_": base, "one": one, "two": two}).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in parts.state_dict().items())


@pytest.mark.parametrize("algorithm", ["nufilt", "sum"])
def test_a_head_that_an_earlier_merge_took_for_a_layer_is_refused_unchecked(tmp_path, algorithm):
    base = hf.BertForSequenceClassification(KINDS["bert"][1]).eval()
    with pytest.raises(ValueError, match=r"model 'two' has a head of its own \(classifier\)"):
        in_two_parts(
            tmp_path,
            ALGORITHMS[algorithm],
            base,
            finetuned(base, 1),
            relabelled(base, 2),
            check_models=False,
        )
