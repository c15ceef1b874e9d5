"""The samples that a FusionBench task pool has for a model to run on."""

import inspect
import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from fusion_bench.compat.taskpool import TaskPool as V01TaskPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset


class TaskInputs:
    """A task's samples, which models are run on.

    Args:
        loader: gives batches as the pool's own loader does.
        keep: whether to hold the batches in memory, for samples that are run again and again.
    """

    def __init__(self, loader: "DataLoader[Any]", *, keep: bool = False) -> None:
        self._loader = loader
        self._batches: Iterable[Any] = list(loader) if keep else loader

    def __len__(self) -> int:
        return len(self._loader.dataset)  # type: ignore[arg-type]

    def run(self, model: nn.Module) -> None:
        """Run the model on all samples."""
        for _ in self.run_each(model):
            pass

    def run_each(self, *models: nn.Module) -> Iterator[None]:
        """Run every model on a batch, then yield, then go on with the next batch."""
        for batch in self._batches:
            for model in models:
                _forward(model, batch)
            yield

    def run_one(self, model: nn.Module) -> None:
        """Run the model on a single sample."""
        first = Subset(self._loader.dataset, [0])
        _forward(model, next(iter(DataLoader(first, batch_size=1, collate_fn=self._loader.collate_fn))))


def task_inputs(taskpool: Any, task: str, samples: int, seed: int, *, keep: bool = False) -> TaskInputs:
    """Draw samples of a task's test set, without labels.

    Args:
        taskpool: a FusionBench pool that tells the data of one task from another's: CLIP vision, Flan-T5 (0.1 pools),
            or any with ``get_test_dataloader(task)``.
        task: the name of the task's model.
        samples: how many samples are drawn, or all there are if that is fewer.
        seed: decides which samples are drawn.
        keep: see :class:`TaskInputs`.

    Raises:
        ValueError: the pool has no data of a single task, or not of this one.
    """
    loader = _test_loader(taskpool, task)
    count = len(loader.dataset)
    drawn = sorted(random.Random(seed).sample(range(count), samples)) if samples < count else None
    dataset = loader.dataset if drawn is None else Subset(loader.dataset, drawn)
    return TaskInputs(DataLoader(dataset, batch_size=loader.batch_size or 1, collate_fn=loader.collate_fn), keep=keep)


@torch.no_grad()
def _forward(model: nn.Module, batch: Any) -> None:
    """Run the model on a batch: a mapping that has its arguments, or a sequence that begins with the input."""
    device = next(model.parameters()).device
    model.eval()
    if hasattr(batch, "keys"):
        known = inspect.signature(model.forward).parameters
        model(**{key: batch[key].to(device) for key in batch if key in known and isinstance(batch[key], Tensor)})
    else:
        model(batch[0].to(device))


def _test_loader(taskpool: Any, task: str) -> Any:
    """The loader of a task's test data; each of FusionBench's pools keeps it in a place of its own."""
    if hasattr(taskpool, "_test_datasets"):
        _check_known(taskpool, task, list(taskpool._test_datasets))
    if hasattr(taskpool, "get_test_dataloader"):
        return taskpool.get_test_dataloader(task)
    if hasattr(taskpool, "_test_datasets"):
        if not taskpool._is_setup:
            taskpool.setup()
        return taskpool.test_dataloaders[task]
    if isinstance(taskpool, V01TaskPool):
        own = next((name for name in taskpool.task_names if task in (name, f"glue-{name}")), task)
        _check_known(taskpool, own, taskpool.task_names)
        return taskpool.load_task(own).test_loader
    raise ValueError(
        f"the task pool {type(taskpool).__name__} has no test data of a single task (no test_dataloaders, "
        "get_test_dataloader or load_task), so that nothing can be recorded; `nufilt analyze --base … --task …` needs "
        "no data"
    )


def _check_known(taskpool: Any, task: str, known: list[str]) -> None:
    if task not in known:
        raise ValueError(
            f"the task pool {type(taskpool).__name__} has no data of task '{task}', only of {', '.join(known)}"
        )
