"""Functions of the task files beside this; lmms-eval reads them in its own environment, without
this package.
"""

import re
from typing import Any

import datasets


def picture(doc: dict[str, Any]) -> list[Any]:
    """Return the image of an item."""
    return [doc["image"].convert("RGB")]


def with_class_names(dataset: Any, card: str = "ILSVRC/imagenet-1k") -> Any:
    """Add the names of each item's class, such as ``tench, Tinca tinca``, to a data set of labels.

    The names are those of the data set, or of its card, which datasets 5 passes over where single
    files are loaded.
    """
    labels = dataset.features["label"]
    if not hasattr(labels, "names"):
        labels = datasets.load_dataset_builder(card).info.features["label"]
    return dataset.add_column("names", [labels.int2str(label) for label in dataset["label"]])


def matches_a_name(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Score whether an answer is one of the names, ignoring case, punctuation and articles."""
    names = [normalised(name) for name in doc["names"].split(",")]
    return {"exact_match": float(normalised(results[0]) in names)}


def with_references(doc: dict[str, Any], results: list[str]) -> dict[str, Any]:
    """Return a caption with its human references, which are scored together."""
    references = doc["caption"]
    if isinstance(references, str):
        references = [references]
    return {"CIDEr": (normalised(results[0]), [normalised(text) for text in references])}


def cider(captions: list[tuple[str, list[str]]]) -> float:
    """Return CIDEr of all captions."""
    from pycocoevalcap.cider.cider import Cider

    references = {}
    answers = {}
    for number, (answer, human_captions) in enumerate(captions):
        references[number] = human_captions
        answers[number] = [answer]
    mean, _ = Cider().compute_score(references, answers)
    return float(mean)


def normalised(text: str) -> str:
    """Return the words of a text in lower case, without punctuation and articles."""
    words = re.sub(r"[^\w\s]", " ", text.lower()).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))
