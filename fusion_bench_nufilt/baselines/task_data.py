"""What references that need data take from FusionBench's task pools."""

from collections.abc import Sequence
from typing import Any

from fusion_bench.models.hf_clip import HFCLIPClassifier
from fusion_bench.taskpool import CLIPVisionModelTaskPool
from fusion_bench.tasks.clip_classification import get_classnames_and_templates
from torch import nn

from fusion_bench_nufilt.continual import Evaluator


def clip_pool(method: str, evaluator: Evaluator | None, tasks: Sequence[str]) -> Any:
    """The evaluator's task pool, set up, if it is one for CLIP vision towers that has the tasks.

    Raises:
        ValueError: it is not; names the method and what it lacks.
    """
    pool = None if evaluator is None else evaluator.taskpool
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
