"""Samples of a FusionBench task pool, and what the layers of a model that runs on them get and give."""

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from fusion_bench.compat.taskpool import TaskPool as V01TaskPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from transformers import PreTrainedModel

Loader = DataLoader[Any]


def task_inputs(taskpool: Any, task: str, samples: int, seed: int) -> Loader:
    """Draw samples of a task's test set, in batches as the pool's own loader makes them.

    The pool tells the data of one task from another's: FusionBench's for CLIP vision or Flan-T5 (0.1 pools), or any
    with ``get_test_dataloader(task)``. All samples are taken if there are fewer.

    Raises:
        ValueError: the pool has no data of a single task, or not of this one.
    """
    loader = _test_loader(taskpool, task)
    dataset, count = loader.dataset, len(loader.dataset)
    if samples < count:
        dataset = Subset(dataset, sorted(random.Random(seed).sample(range(count), samples)))
    return DataLoader(dataset, batch_size=loader.batch_size or 1, collate_fn=loader.collate_fn)


def _test_loader(taskpool: Any, task: str) -> Any:
    """Return the loader of a task's test data; each of FusionBench's pools keeps it in a place of its own."""
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
        pool = type(taskpool).__name__
        raise ValueError(f"the task pool {pool} has no data of task '{task}', only of {', '.join(known)}")


@torch.no_grad()
def forward(model: nn.Module, batch: Any) -> None:
    """Run a model on a batch: a mapping that has its arguments, or a sequence that begins with the input."""
    device = next(model.parameters()).device
    model.eval()
    if hasattr(batch, "keys"):
        known = inspect.signature(model.forward).parameters
        model(**{key: batch[key].to(device) for key in batch if key in known and isinstance(batch[key], Tensor)})
    else:
        model(batch[0].to(device))


@contextmanager
def watched_layers(
    model: nn.Module, names: Sequence[str], receive: Callable[[str, Tensor, Tensor], None]
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Call ``receive`` with the name, the very input and the output of each of these layers whenever the model runs.

    Yields:
        A function that returns those rows ``(n, d)`` of an input or output ``(..., d)`` that are no padding. What is
        padding says the ``attention_mask`` of the transformer that is running, in a model that may hold several.
    """
    mask: Tensor | None = None  # 1 for a token, 0 for padding

    def note_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal mask
        if "attention_mask" in kwargs:
            given = kwargs["attention_mask"]
            mask = given if isinstance(given, Tensor) and given.dim() == 2 else None

    def hand_out(name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        receive(name, args[0], output)

    def tokens(X: Tensor) -> Tensor:
        return X[mask.bool()] if mask is not None and mask.shape == X.shape[:-1] else X.flatten(0, -2)

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                stack.callback(module.register_forward_pre_hook(note_mask, with_kwargs=True).remove)
        for name in names:
            stack.callback(model.get_submodule(name).register_forward_hook(partial(hand_out, name)).remove)
        yield tokens


@contextmanager
def layer_outputs(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Yield a dictionary that holds, after each forward pass, the outputs ``(n, d_o)`` of the layers."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, X: Tensor, Y: Tensor) -> None:
        outputs[name] = tokens(Y)

    with watched_layers(model, names, keep) as tokens:
        yield outputs
