"""Sequential fine-tuning, the reference that sees all training data: FusionBench's own, one task at
a time.
"""

from dataclasses import asdict, dataclass
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from fusion_bench import BaseModelPool, auto_register_config
from fusion_bench.method.classification import ContinualImageClassificationFineTuningForCLIP
from omegaconf import DictConfig
from torch import nn

from fusion_bench_nufilt.continual import ContinualMergingAlgorithm
from fusion_bench_nufilt.continual.content import refuse_other_spelling
from fusion_bench_nufilt.continual.precision import widened
from fusion_bench_nufilt.continual.stopwatch import DATA
from fusion_bench_nufilt.methods.options import ProtocolConfig
from fusion_bench_nufilt.utils.options import option, options_of, takes_options

from .task_data import classifier, clip_pool, load_train_set

_FineTuning: Any = ContinualImageClassificationFineTuningForCLIP


@dataclass(frozen=True)
class FineTuningConfig:
    """How each task is trained."""

    learning_rate: float = option(1e-5, "Learning rate of Adam at the first step of each task.")
    num_steps: int = option(4000, "Steps of Adam on each task.")
    batch_size: int = option(128, "Images in a batch.")
    num_workers: int = option(
        0, "Processes that read images; 0 reads them in this one.", scope="run"
    )


@auto_register_config
@takes_options(FineTuningConfig, ProtocolConfig)
class SequentialFineTuning(ContinualMergingAlgorithm):
    """One CLIP vision tower, fine-tuned on the tasks one after another; the pool's fine-tuned
    models are not used.

    The loss is the cross-entropy, and the learning rate falls to zero along a cosine on each task.
    The images are the model pool's ``train_datasets``, named like the models; classes and prompts
    are the task pool's.

    Args:
        **kwargs: options of :class:`FineTuningConfig` and
            :class:`fusion_bench_nufilt.continual.ProtocolConfig`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    def training_data(self) -> dict[str, Any]:
        names = self.modelpool.train_dataset_names
        refuse_other_spelling(self.names, names, "train_datasets")
        missing = [name for name in self.names if name not in names]
        if missing:
            raise ValueError(
                f"{self.name} needs training data: the model pool has no train_datasets of "
                f"{', '.join(missing)}"
            )
        self._taskpool = clip_pool(self.name, self.taskpool, self.names)
        with self.stopwatch.part(DATA):
            self._images = {name: load_train_set(self.modelpool, name) for name in self.names}
        return self._images

    def start(self, pretrained: nn.Module, names: list[str]) -> None:
        self._options = options_of(FineTuningConfig, self)

    def merge_step(
        self, step: int, name: str, pretrained: nn.Module, merged: nn.Module, task: nn.Module
    ) -> nn.Module:
        device = next(merged.parameters()).device
        with self.stopwatch.part(DATA):
            head = classifier(self._taskpool, merged.requires_grad_(), name)
        # A pool with this task alone, whose pretrained model is the one that is trained on.
        pool: Any = BaseModelPool(
            {"_pretrained_": head.clip_model}, train_datasets=DictConfig({name: None})
        )
        pool.load_train_dataset = lambda task: self._images[task]
        pool.load_clip_model = pool.load_model
        pool.load_processor = lambda: self._taskpool.data_processor
        method = _OneTaskFineTuning(seed=self.seed, **asdict(self._options))
        method._fabric_instance = self.fabric
        method._program = SimpleNamespace(taskpool=None)
        # In 16 bits, most of an optimizer's steps would be rounded away.
        with torch.enable_grad(), TemporaryDirectory() as method.log_dir, widened(head):
            method.zeroshot_weights = {name: head.zeroshot_weights}
            method.run(pool)
        return merged.to(device)


class _OneTaskFineTuning(_FineTuning):
    """FusionBench's continual fine-tuning, whose optimizer starts anew for every task, without its
    files and logs.
    """

    log_dir: str | None = None  # it writes a list of the tasks there

    def _do_nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    setup_zero_shot_classification_head = log_hyperparams = save_model = _do_nothing
