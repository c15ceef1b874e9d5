"""What all runs of a comparison share: models, data, classification heads, and the scores of the single models."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import lightning
import torch
from omegaconf import DictConfig
from torch import nn

from fusion_bench_nufilt.continual.evaluation import score
from fusion_bench_nufilt.layers import select_layers
from fusion_bench_nufilt.storage.versions import package_versions

from .configs import make_fabric, make_modelpool, make_taskpool, plain, taskpool_config
from .memory import WatchingEvaluator
from .store import References


class Workbench:
    """The model pool and the evaluator of all runs, made when they are first needed."""

    def __init__(self, config: DictConfig) -> None:
        self._config = config
        pools = {"modelpool": config.modelpool, "taskpool": taskpool_config(config)}
        self.settings = {name: plain(pool) for name, pool in pools.items()}

    @cached_property
    def fabric(self) -> lightning.Fabric:
        return make_fabric(self._config.fabric)

    @cached_property
    def modelpool(self) -> Any:
        return make_modelpool(self._config, self.fabric)

    @cached_property
    def evaluator(self) -> WatchingEvaluator:
        return WatchingEvaluator(make_taskpool(self._config, self.fabric), self.fabric.device)

    @property
    def tasks(self) -> list[str]:
        """In the model pool's order."""
        return list(self.modelpool.model_names)

    @cached_property
    def parameters(self) -> int:
        """How many the pretrained model has."""
        return num_parameters(self.modelpool.load_model("_pretrained_"))

    @cached_property
    def width(self) -> int:
        """d_i of the narrowest layer that NUFILT merges."""
        layers = select_layers(self.modelpool.load_model("_pretrained_"))
        return min(view.shape[1] for view in layers.values())

    @property
    def environment(self) -> dict[str, str]:
        """Versions and device."""
        device = self.fabric.device
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        return {**package_versions(), "device": kind}


def num_parameters(model: nn.Module) -> int:
    """Those with several names count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def score_references(workbench: Workbench, on_step: Callable[[int], Any]) -> References:
    """Scores of the pretrained model and of each task's own fine-tuned model; ``on_step`` is called T + 1 times."""
    pool, tasks = workbench.modelpool, workbench.tasks

    def scores(name: str, tasks: Sequence[str]) -> dict[str, float]:
        with torch.no_grad():
            report = workbench.evaluator.report(pool.load_model(name), tasks)
        return {task: score(report.get(task, {})) for task in tasks}

    references: References = {"pretrained": scores("_pretrained_", tasks), "individual": {}}
    on_step(0)
    for step, task in enumerate(tasks, 1):
        references["individual"] |= scores(task, [task])
        on_step(step)
    return references
