"""Unlabelled data of one task, for the methods that need it: not the scored data if there is other
data.
"""

import random
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from typing import Any

import torch
from datasets import Dataset
from fusion_bench import BaseModelPool
from fusion_bench.compat.taskpool.flan_t5_glue_text_generation import (
    FlanT5GLUETextGenerationTaskPool,
)
from fusion_bench.dataset import CLIPDataset
from fusion_bench.method.adamerging.entropy_loss import entropy_loss
from fusion_bench.models.hf_clip import HFCLIPClassifier
from fusion_bench.taskpool import CLIPVisionModelTaskPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from transformers import default_data_collator

from fusion_bench_nufilt.continual import ContinualMergingAlgorithm
from fusion_bench_nufilt.continual.content import load_data, refuse_other_spelling
from fusion_bench_nufilt.continual.evaluation import classes_and_templates, name_in_pool, set_up
from fusion_bench_nufilt.continual.precision import widened
from fusion_bench_nufilt.continual.stopwatch import DATA, Stopwatch
from fusion_bench_nufilt.utils.options import option


@dataclass(frozen=True)
class EntropyConfig:
    """How parameters are trained on the entropy of predictions."""

    lr: float = option(1e-4, "Learning rate of Adam.")
    max_steps: int = option(50, "Steps of Adam, one batch each.")
    batch_size: int = option(16, "Items in a batch.")
    samples_per_class: int | None = option(
        5, "Items used of each class, drawn by the seed; null takes all."
    )


@dataclass
class TaskData(ABC):
    """Data of one task. Its labels only serve to draw a few items of each class."""

    dataset: Any
    collate: Any = None  # makes a batch from items; None is torch's default

    @abstractmethod
    def labels(self) -> Iterable[Hashable]:
        """Return the label of each item."""

    @abstractmethod
    def logits(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the logits ``(items, classes)`` of a batch, on the model's device."""

    def batches(self, size: int, *, per_class: int | None, seed: int) -> Iterator[Any]:
        """Draw ``per_class`` items of each class (None: all), and return batches of them without
        end.
        """
        items = self.dataset
        order = torch.Generator().manual_seed(seed)
        if per_class is not None:
            by_class = defaultdict(list)
            for index, label in enumerate(self.labels()):
                by_class[label].append(index)
            rng = random.Random(seed)
            chosen: list[int] = []
            for indices in by_class.values():
                chosen += rng.sample(indices, min(per_class, len(indices)))
            items = Subset(items, chosen)
        loader = DataLoader(items, size, shuffle=True, generator=order, collate_fn=self.collate)
        return chain.from_iterable(repeat(loader))

    def minimise_entropy(
        self,
        model: nn.Module,
        parameters: Iterable[Tensor],
        config: EntropyConfig,
        seed: int,
        stopwatch: Stopwatch,
    ) -> None:
        """Train parameters of a model by Adam to minimise the entropy of its predictions."""
        with stopwatch.part(DATA):
            batches = self.batches(config.batch_size, per_class=config.samples_per_class, seed=seed)
        optimizer = torch.optim.Adam(parameters, lr=config.lr)
        for batch in islice(batches, config.max_steps):
            optimizer.zero_grad()
            loss = entropy_loss(self.logits(model, batch))
            loss.backward()
            optimizer.step()


class Images(TaskData):
    """Images for CLIP towers: the model pool's training images, or else the task pool's test
    images.
    """

    def __init__(self, pool: Any, task: str, modelpool: BaseModelPool) -> None:
        if task in modelpool.train_dataset_names:
            images = CLIPDataset(load_train_set(modelpool, task), pool.data_processor)
        else:
            images = pool.test_datasets[task]
        super().__init__(images)
        self._classifier = classifier(pool, nn.Identity(), task)

    def minimise_entropy(self, *args: Any) -> None:
        # The model that is trained is wide, and the pool's CLIP may not be.
        with widened(self._classifier):
            super().minimise_entropy(*args)

    def labels(self) -> Iterable[Hashable]:
        items: Any = self.dataset.dataset
        if isinstance(items, Dataset):
            return items["label"]  # a column, which is read without the images
        return (item["label"] for item in items)

    def logits(self, model: nn.Module, batch: Any) -> Tensor:
        self._classifier.clip_model.vision_model = model
        device = next(model.parameters()).device
        return self._classifier.to(device)(batch[0].to(device))


class Texts(TaskData):
    """Texts for Flan-T5 on GLUE, of the training split if there is one; the prediction is the
    answer's first token.
    """

    def __init__(self, pool: FlanT5GLUETextGenerationTaskPool, task: str) -> None:
        loaded = pool.load_task(task)
        super().__init__(loaded.dataset.get("train", loaded.test_dataset), default_data_collator)
        self._start = pool.tokenizer.pad_token_id  # T5's answers begin with it

    def labels(self) -> Iterable[Hashable]:
        return map(tuple, self.dataset["labels"])

    def logits(self, model: nn.Module, batch: Any) -> Tensor:
        device = next(model.parameters()).device
        length = int(batch["attention_mask"].sum(dim=1).max())  # of the longest text
        input_ids = batch["input_ids"][:, :length].to(device)
        attention_mask = batch["attention_mask"][:, :length].to(device)
        answer = torch.full((len(input_ids), 1), self._start, device=device)
        output = model(input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=answer)
        return output.logits[:, 0]


def data_of_run(run: ContinualMergingAlgorithm) -> dict[str, TaskData]:
    """Return the data of all tasks of a run, by name."""
    with run.stopwatch.part(DATA):
        return {name: task_data(run.name, run.taskpool, name, run.modelpool) for name in run.names}


def task_data(method: str, pool: Any, task: str, modelpool: BaseModelPool) -> TaskData:
    """Return the data of a task in the two pools; a ValueError names the method if there is
    none.
    """
    refuse_other_spelling([task], modelpool.train_dataset_names, "train_datasets")
    if not isinstance(pool, FlanT5GLUETextGenerationTaskPool):
        return Images(clip_pool(method, pool, [task]), task, modelpool)
    name = name_in_pool(task, pool.task_names)
    if name is not None:
        return Texts(pool, name)
    raise ValueError(
        f"{method} needs data of '{task}'; the task pool has {', '.join(pool.task_names)}"
    )


def load_train_set(modelpool: BaseModelPool, task: str) -> Any:
    """Return the training data of a task; a ValueError names the task whose data can't be
    loaded.
    """
    return load_data(task, partial(modelpool.load_train_dataset, task), "training data")


def clip_pool(method: str, pool: Any, tasks: Sequence[str]) -> Any:
    """Set up and return a task pool for CLIP towers; refuse another kind, or one that lacks a
    task.
    """
    needs = f"{method} needs a CLIPVisionModelTaskPool"
    if not isinstance(pool, CLIPVisionModelTaskPool):
        raise ValueError(f"{needs}, got {type(pool).__name__}")
    missing_tasks = [task for task in tasks if task not in pool._test_datasets]
    if missing_tasks:
        raise ValueError(f"{needs} with {', '.join(missing_tasks)}")
    set_up(pool)
    return pool


def classifier(pool: Any, tower: nn.Module, task: str) -> HFCLIPClassifier:
    """Return the pool's CLIP with another vision tower and the classification head of a task."""
    pool.clip_model.vision_model = tower
    model = HFCLIPClassifier(pool.clip_model, pool.processor)
    # FusionBench's own set-up caches heads by the CLIP's path, even if another CLIP lies there now.
    classnames, templates = classes_and_templates(pool, task)
    model.set_classification_task(classnames, templates)
    return model
