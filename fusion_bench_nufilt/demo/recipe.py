"""The numbers that the demo is made from."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Recipe:
    """All numbers that the eight models depend on. The models of another recipe are kept in another folder."""

    edition: int = 1  # is raised when the code changes the models of the same numbers
    seed: int = 0
    # torch threads while building: a fixed number, because the order of sums depends on it, and one, because two
    # threads that wait for each other come to a crawl when the machine is busy
    threads: int = 1

    # pictures of each task
    train_pictures: int = 2000
    test_pictures: int = 320

    # the model
    width: int = 128
    layers: int = 3
    heads: int = 4
    patch: int = 8
    widening: int = 2  # of the MLPs; it is 4 in CLIP, but 2 is enough here and a third faster
    text_width: int = 64
    text_layers: int = 1

    # pretraining on all tasks at once
    text_steps: int = 100
    text_lr: float = 2e-3
    pretrain_steps: int = 1000
    pretrain_lr: float = 2e-3
    pretrain_warmup: int = 50
    misalignment: float = 6.0  # how far, in feature lengths, prompts are then moved away from their pictures

    # fine-tuning on one task
    finetune_steps: int = 90
    finetune_lr: float = 5e-4

    batch: int = 64

    def fingerprint(self) -> str:
        """Return a short name for exactly this recipe."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:12]


TINY = Recipe(
    train_pictures=64, test_pictures=16, width=64, layers=2, heads=2, text_width=32,
    text_steps=10, pretrain_steps=10, finetune_steps=5, batch=32,
)  # fmt: skip
"""A recipe that builds in seconds for tests of everything but accuracy, since its models know next to nothing."""

RECIPES = {"full": Recipe(), "tiny": TINY}


def active_recipe() -> Recipe:
    """Return the recipe that the environment variable NUFILT_DEMO names: "full" (the default) or "tiny"."""
    name = os.environ.get("NUFILT_DEMO", "full")
    if name not in RECIPES:
        raise ValueError(f"NUFILT_DEMO={name!r}: there is no such demo, only {', '.join(RECIPES)}")
    return RECIPES[name]
