"""What references that need data take from FusionBench's task pools."""

import random
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from datasets import Dataset
from fusion_bench.compat.taskpool.flan_t5_glue_text_generation import FlanT5GLUETextGenerationTaskPool
from fusion_bench.method.adamerging.entropy_loss import entropy_loss
from fusion_bench.models.hf_clip import HFCLIPClassifier
from fusion_bench.taskpool import CLIPVisionModelTaskPool
from fusion_bench.tasks.clip_classification import get_classnames_and_templates
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from transformers import default_data_collator

from fusion_bench_nufilt.continual.evaluation import names_of


def clip_pool(method: str, pool: Any, tasks: Sequence[str]) -> Any:
    """A task pool, set up, if it is one for CLIP vision towers that has the tasks.

    Raises:
        ValueError: it is not; names the method and what it lacks.
    """
    if not isinstance(pool, CLIPVisionModelTaskPool):
        raise ValueError(f"{method} needs a CLIPVisionModelTaskPool, got {type(pool).__name__}")
    if missing := [task for task in tasks if task not in pool._test_datasets]:
        raise ValueError(f"{method} needs a CLIPVisionModelTaskPool with {', '.join(missing)}")
    if not pool._is_setup:
        pool.setup()
    return pool


def classifier(pool: Any, tower: nn.Module, task: str) -> HFCLIPClassifier:
    """The pool's CLIP with a vision tower, and the head of a task."""
    pool.clip_model.vision_model = tower
    made = HFCLIPClassifier(pool.clip_model, pool.processor)
    # Not FusionBench's own set-up of heads, which keeps them on disk by the CLIP's path, whatever lies there now.
    made.set_classification_task(*get_classnames_and_templates(task))
    return made


class TaskData(ABC):
    """Test data of one task. The labels serve to draw a few items of each class, and nothing else.

    Args:
        dataset: the items.
        collate: makes a batch; None: torch's own.
    """

    def __init__(self, dataset: Any, collate: Any = None) -> None:
        self.dataset, self.collate = dataset, collate

    def batches(self, size: int, *, per_class: int | None, seed: int) -> Iterator[Any]:
        """Batches without end, of at most ``size`` items, out of ``per_class`` of each class (None: all)."""
        items, order = self.dataset, torch.Generator().manual_seed(seed)
        if per_class is not None:
            items = Subset(items, self._draw(per_class, random.Random(seed)))
        loader = DataLoader(items, size, shuffle=True, generator=order, collate_fn=self.collate)
        while True:
            yield from loader

    def make_certain(
        self,
        model: nn.Module,
        parameters: Iterable[Tensor],
        *,
        lr: float,
        steps: int,
        batch_size: int,
        per_class: int | None,
        seed: int,
    ) -> None:
        """Train some parameters of a model by Adam until its predictions are certain: of least entropy."""
        optimizer = torch.optim.Adam(parameters, lr=lr)
        for batch in islice(self.batches(batch_size, per_class=per_class, seed=seed), steps):
            optimizer.zero_grad()
            entropy_loss(self.logits(model, batch)).backward()
            optimizer.step()

    def _draw(self, per_class: int, rng: random.Random) -> list[int]:
        """Places of so many items of each class, or of all that a class has."""
        of_class: dict[Any, list[int]] = {}
        for place, label in enumerate(self.labels()):
            of_class.setdefault(label, []).append(place)
        drawn = (rng.sample(places, min(per_class, len(places))) for places in of_class.values())
        return [place for places in drawn for place in places]

    @abstractmethod
    def labels(self) -> Iterable[Hashable]:
        """Of each item."""

    @abstractmethod
    def logits(self, model: nn.Module, batch: Any) -> Tensor:
        """``(items, classes)``, on the model's device."""


class Images(TaskData):
    """Of a pool for CLIP vision towers."""

    def __init__(self, pool: Any, task: str) -> None:
        super().__init__(pool.test_datasets[task])
        self._classifier = classifier(pool, nn.Identity(), task)

    def labels(self) -> Iterable[Hashable]:
        raw: Any = self.dataset.dataset  # a column of `datasets` is read without the images
        return raw["label"] if isinstance(raw, Dataset) else (item["label"] for item in raw)

    def logits(self, model: nn.Module, batch: Any) -> Tensor:
        self._classifier.clip_model.vision_model = model
        device = next(model.parameters()).device
        logits: Tensor = self._classifier.to(device)(batch[0].to(device))
        return logits


class Texts(TaskData):
    """Of the pool for Flan-T5 on GLUE; what is predicted is the first token of the answer."""

    def __init__(self, pool: FlanT5GLUETextGenerationTaskPool, task: str) -> None:
        super().__init__(pool.load_task(task).test_dataset, default_data_collator)
        self._start = pool.tokenizer.pad_token_id  # with which T5's answers begin

    def labels(self) -> Iterable[Hashable]:
        return map(tuple, self.dataset["labels"])

    def logits(self, model: nn.Module, batch: Any) -> Tensor:
        device, length = next(model.parameters()).device, int(batch["attention_mask"].sum(dim=1).max())
        start = torch.full((len(batch["input_ids"]), 1), self._start, device=device)
        inputs = {key: batch[key][:, :length].to(device) for key in ("input_ids", "attention_mask")}
        logits: Tensor = model(**inputs, decoder_input_ids=start).logits
        return logits[:, 0]


def task_data(method: str, pool: Any, task: str) -> TaskData:
    """The test data that a task pool has of a task.

    Raises:
        ValueError: it has none, or is of a kind whose data cannot be had; names the method.
    """
    if not isinstance(pool, FlanT5GLUETextGenerationTaskPool):
        return Images(clip_pool(method, pool, [task]), task)
    own = next((name for name in pool.task_names if task in names_of(name)), None)
    if own is None:
        raise ValueError(f"{method} needs test data of '{task}'; the task pool has {', '.join(pool.task_names)}")
    return Texts(pool, own)
