"""What a FusionBench task pool has for a model to look at."""

import inspect
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from fusion_bench.compat.taskpool import TaskPool as V01TaskPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset


def task_inputs(taskpool: Any, task: str, samples: int, seed: int, *, keep: bool = False) -> "TaskInputs":
    """Samples of a task's test set, without labels.

    Args:
        taskpool: a FusionBench pool that tells the data of one task from another's: CLIP vision, Flan-T5 (0.1 pools),
            or any with ``get_test_dataloader(task)``.
        task: by the name of its model.
        samples: how many, or all there are if that is fewer.
        seed: of the draw.
        keep: hold the few samples in memory, for what is run again and again.

    Raises:
        ValueError: the pool has no data of a single task, or not of this one.
    """
    loader = _loader(taskpool, task)
    count = len(loader.dataset)
    drawn = sorted(random.Random(seed).sample(range(count), samples)) if samples < count else None
    dataset = loader.dataset if drawn is None else Subset(loader.dataset, drawn)
    return TaskInputs(DataLoader(dataset, batch_size=loader.batch_size or 1, collate_fn=loader.collate_fn), keep=keep)


class TaskInputs:
    """A task's samples.

    Args:
        loader: gives batches as the pool's own loader does.
        keep: whether to read them once only.
    """

    def __init__(self, loader: "DataLoader[Any]", *, keep: bool = False) -> None:
        self._loader = loader
        self._batches: Iterable[Any] = list(loader) if keep else loader

    def __len__(self) -> int:
        """How many samples."""
        return len(self._loader.dataset)  # type: ignore[arg-type]

    def passes(self, *models: nn.Module) -> Callable[[], Iterator[None]]:
        """What gives every batch to each model in turn, and then yields."""

        def run() -> Iterator[None]:
            for batch in self._batches:
                for model in models:
                    _forward(model, batch)
                yield

        return run

    def one(self, model: nn.Module) -> None:
        """Give the model a single sample."""
        first = Subset(self._loader.dataset, [0])
        _forward(model, next(iter(DataLoader(first, batch_size=1, collate_fn=self._loader.collate_fn))))


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


def _loader(taskpool: Any, task: str) -> Any:
    if hasattr(taskpool, "test_dataloaders") or hasattr(taskpool, "_test_datasets"):
        known = list(taskpool._test_datasets)
        _check(taskpool, task, known)
        if hasattr(taskpool, "get_test_dataloader"):
            return taskpool.get_test_dataloader(task)
        if not taskpool._is_setup:
            taskpool.setup()
        return taskpool.test_dataloaders[task]
    if isinstance(taskpool, V01TaskPool):
        own = next((name for name in taskpool.task_names if task in (name, f"glue-{name}")), task)
        _check(taskpool, own, taskpool.task_names)
        return taskpool.load_task(own).test_loader
    if hasattr(taskpool, "get_test_dataloader"):
        return taskpool.get_test_dataloader(task)
    raise ValueError(
        f"the task pool {type(taskpool).__name__} has no test data of a single task (no test_dataloaders, "
        "get_test_dataloader or load_task), so that nothing can be recorded; `nufilt analyze --base … --task …` needs "
        "no data"
    )


def _check(taskpool: Any, task: str, known: list[str]) -> None:
    if task not in known:
        raise ValueError(
            f"the task pool {type(taskpool).__name__} has no data of task '{task}', only of {', '.join(known)}"
        )
