"""Sequential fine-tuning, the reference that has all training data: FusionBench's own, a task at a time."""

from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from fusion_bench import BaseModelPool, auto_register_config
from fusion_bench.method.classification import ContinualImageClassificationFineTuningForCLIP
from omegaconf import DictConfig
from torch import nn
from torch.utils.data import Dataset

from fusion_bench_nufilt.continual import ContinualMergingAlgorithm

from .task_data import classifier, clip_pool

_FineTuning: Any = ContinualImageClassificationFineTuningForCLIP


@auto_register_config
class SequentialFineTuning(ContinualMergingAlgorithm):
    """One CLIP vision tower, fine-tuned on the tasks one after another; the pool's fine-tuned models are not used.

    Cross-entropy, Adam, and for each task a cosine from the learning rate down to zero. The training images are the
    model pool's ``train_datasets``, by the names of the models; classes and prompts are the task pool's.

    Args:
        learning_rate: at the first step of each task.
        num_steps: of Adam, on each task.
        batch_size: images in a batch.
        num_workers: processes that read images; 0: this one.
        **kwargs: the protocol, see :class:`fusion_bench_nufilt.continual.ContinualMergingAlgorithm`.

    Raises:
        ValueError: a task without training images, or no task pool for CLIP vision towers.
    """

    # set by auto_register_config
    learning_rate: float
    num_steps: int
    batch_size: int
    num_workers: int

    def __init__(
        self,
        learning_rate: float = 1e-5,
        num_steps: int = 4000,
        batch_size: int = 128,
        num_workers: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)

    def merge_stream(self, modelpool: BaseModelPool, pretrained: nn.Module, names: list[str]) -> nn.Module:
        if missing := [name for name in names if name not in modelpool.train_dataset_names]:
            raise ValueError(
                f"{self.name} needs training data: the model pool has no train_datasets of {', '.join(missing)}"
            )
        self._modelpool, self._taskpool = modelpool, clip_pool(self.name, self.taskpool, names)
        return super().merge_stream(modelpool, pretrained, names)

    def merge_step(self, step: int, name: str, pretrained: nn.Module, merged: nn.Module, task: nn.Module) -> nn.Module:
        method = _OneTaskFineTuning(
            seed=self.seed,
            learning_rate=self.learning_rate,
            num_steps=self.num_steps,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
        )
        method._fabric_instance, method._program = self.fabric, SimpleNamespace(taskpool=None)
        images = self._modelpool.load_train_dataset(name)
        with torch.enable_grad(), TemporaryDirectory() as method.log_dir:
            method.run(_OneTask(self._taskpool, merged.requires_grad_(), name, images))
        return merged


class _OneTask(BaseModelPool):
    """What the fine-tuning asks a model pool for: one task's images, and a CLIP with the tower to train."""

    def __init__(self, taskpool: Any, tower: nn.Module, task: str, images: Dataset[Any]) -> None:
        self.classifier = classifier(taskpool, tower, task)
        super().__init__({"_pretrained_": self.classifier.clip_model}, train_datasets=DictConfig({task: None}))
        self._images, self._to_pixels = images, taskpool.data_processor

    def load_train_dataset(self, dataset_name: str, *args: Any, **kwargs: Any) -> Dataset[Any]:
        return self._images

    def load_clip_model(self, model_name: str) -> nn.Module:
        return self.load_model(model_name)

    def load_processor(self) -> Any:
        return self._to_pixels


class _OneTaskFineTuning(_FineTuning):
    """FusionBench's continual fine-tuning, which keeps nothing on disk: the protocol does that.

    It starts its optimizer anew for every task, so that tasks given one at a time are trained as those given at once.
    """

    log_dir: str | None = None  # it wants one for a list of the tasks

    def setup_zero_shot_classification_head(self, task_names: list[str], **kwargs: Any) -> None:
        self.zeroshot_weights = dict.fromkeys(task_names, self.modelpool.classifier.zeroshot_weights)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Not here: the run's own logger has them."""

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Not here."""
