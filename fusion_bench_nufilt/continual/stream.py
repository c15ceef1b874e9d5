"""The order in which models arrive, what came before them, and what is scored on the way."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from fusion_bench import BaseModelPool

from fusion_bench_nufilt.storage.manifest import Manifest, read_manifest

Evaluate = Literal["last", "diagonal", "every_step", "every_step_all"]
MERGED = "_merged_"


def task_order(names: Sequence[str], *, shuffle: bool, seed: int) -> list[str]:
    """Return the names in the order of the run: as given, or shuffled as in the paper (its orders are seeds 42 to 51).

    FusionBench's continual methods use the same order for the same seed.
    """
    order = list(names)
    if shuffle:
        random.Random(seed).shuffle(order)
    return order


def tasks_to_score(order: Sequence[str], step: int, evaluate: Evaluate) -> list[str]:
    """Return the tasks to score after a step (from 1).

    Args:
        order: all tasks in merging order.
        step: how many of them are merged.
        evaluate: ``last`` scores all tasks after the last step; ``diagonal`` also each task right after its own step,
            all that ACC and BWT need (2T-1 scores); ``every_step`` all tasks seen so far after each (T(T+1)/2 scores);
            ``every_step_all`` also those that are still to come, which forward transfer needs (T^2 scores).
    """
    if evaluate == "every_step_all":
        return list(order)
    if step == len(order) or evaluate == "every_step":
        return list(order[:step])
    return [order[step - 1]] if evaluate == "diagonal" else []


def merged_before(modelpool: BaseModelPool, num_merged: int | None) -> tuple[list[str], int]:
    """Return what is in the pool's ``_merged_`` model.

    Args:
        modelpool: may have no such model.
        num_merged: how many models are in it; None: the manifest of its checkpoint says.

    Returns:
        Their names, as far as they are known, and the number of the next one (from 1).

    Raises:
        ValueError: their number is not known, or is given where there is no such model.
    """
    if MERGED not in modelpool.all_model_names:
        if num_merged is not None:
            raise ValueError(f"num_merged={num_merged}, but the model pool has no '{MERGED}' model")
        return [], 1
    _, manifest = merged_checkpoint(modelpool)
    num_merged = num_merged or manifest.get("step")
    if num_merged is None:
        raise ValueError(f"how many models are in '{MERGED}'? Its checkpoint does not say: set num_merged")
    return list(manifest.get("tasks", [])), num_merged + 1


def merged_checkpoint(modelpool: BaseModelPool) -> tuple[Path | None, Manifest]:
    """Return the folder of the pool's ``_merged_`` model, and its manifest; empty if it has none."""
    entry = modelpool._models[MERGED]
    path = entry if isinstance(entry, str) else getattr(entry, "pretrained_model_name_or_path", None)
    if path is None:
        return None, {}
    folder = Path(path).expanduser()
    return folder, read_manifest(folder) or {}
