"""Tiny classifiers of one backbone that are trained on tasks of their own, each with its own
labels.
"""

from functools import cache

import torch
import transformers as hf

from tests.tiny_models import SMALL

STEPS = 20
BATCH = 64
TEST = 200


def labels(names):
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: i for i, name in enumerate(names)},
    }


def images(count, classes, seed):
    """Images of a pattern for each class, in noise."""
    patterns = torch.randn(
        classes, 3, 16, 16, generator=torch.Generator().manual_seed(100 + classes)
    )
    random = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (count,), generator=random)
    return {"pixel_values": patterns[y] + torch.randn(count, 3, 16, 16, generator=random)}, y


def sentences(count, classes, seed):
    """Sentences of eight words, half of them from a small vocabulary for each class."""
    random = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (count,), generator=random)
    words = torch.randint(3, 50, (count, 8), generator=random)
    first_of_class = 7 * y[:, None]
    of_class = first_of_class + torch.randint(4, (count, 4), generator=random)
    words[:, 1:5] = 5 + of_class % 44
    return {"input_ids": words}, y


#: By kind: the class with a head, its configuration, the backbone's class, the numbers of labels,
#: and the data.
KINDS = {
    "vit": (
        hf.ViTForImageClassification,
        hf.ViTConfig(**SMALL, image_size=16, patch_size=8),
        hf.ViTModel,
        {"few": 5, "ten": 10, "letters": 26},
        images,
    ),
    "bert": (
        hf.BertForSequenceClassification,
        hf.BertConfig(**SMALL, vocab_size=50),
        hf.BertModel,
        {"yes": 2, "four": 4, "six": 6},
        sentences,
    ),
}


@cache
def train(kind):
    """Return the backbone that all start from, and a trained classifier for each task."""
    with_head, config, backbone, tasks, data = KINDS[kind]
    torch.manual_seed(0)
    base = backbone(config).eval()
    trained = {}
    for task, count in tasks.items():
        names = [f"{task} {i}" for i in range(count)]
        config = type(config)(**{**config.to_dict(), **labels(names)})
        model = with_head(config)
        # Not strict: some classifiers have no pooler.
        model.base_model.load_state_dict(base.state_dict(), strict=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        for step in range(STEPS):
            x, y = data(BATCH, count, seed=step)
            optimizer.zero_grad()
            model(**x, labels=y).loss.backward()
            optimizer.step()
        trained[task] = model.eval()
    return base, trained


@torch.no_grad()
def logits_and_accuracy(model, kind, task):
    *_, tasks, data = KINDS[kind]
    x, y = data(TEST, tasks[task], seed=1000)
    logits = model(**x).logits
    return logits, (logits.argmax(-1) == y).float().mean().item()
