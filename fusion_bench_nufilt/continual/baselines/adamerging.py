"""Layer-wise AdaMerging as a continual method, which sees only the new task's data."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from fusion_bench import BaseAlgorithm, BaseModelPool, auto_register_config
from fusion_bench.mixins import LightningFabricMixin
from torch import Tensor, nn
from torch.func import functional_call

from fusion_bench_nufilt.continual.models import PRETRAINED, load_stored
from fusion_bench_nufilt.continual.stopwatch import DATA, Stopwatch
from fusion_bench_nufilt.utils.options import options_of, split_options, takes_options

from .task_data import EntropyConfig, task_data


@auto_register_config
@takes_options(EntropyConfig)
class NewTaskAdaMergingAlgorithm(LightningFabricMixin, BaseAlgorithm):
    """Layer-wise AdaMerging (Yang et al., ICLR 2024), adapted to the last model's task.

    Every parameter tensor of every task vector has a coefficient, which is trained to make the
    merged model's predictions on a few unlabelled items certain. FusionBench's own version adapts
    to the tasks of all models, and that for Flan-T5 does not train the coefficient of the
    embedding, which has several names.

    Args:
        init_values: the coefficients before training.
        seed: the seed of the items and their order.
        **kwargs: options of :class:`EntropyConfig`.
    """

    uses_training_data = True  # of the model pool, where it has some

    # These are set by auto_register_config.
    init_values: float
    seed: int

    def __init__(self, init_values: float = 0.3, seed: int = 42, **kwargs: Any) -> None:
        _, other_options = split_options([EntropyConfig], kwargs)
        super().__init__(**other_options)

    @torch.enable_grad()
    def run(self, modelpool: BaseModelPool, **kwargs: Any) -> nn.Module:
        """Merge all models of a pool at once, without changing them."""
        names = modelpool.model_names
        taskpool = None
        stopwatch = Stopwatch()
        loaded_data: dict[str, Any] = {}
        if self._program is not None:
            taskpool = self._program.taskpool
            # Those of the run in which the baseline is a step.
            stopwatch = getattr(self._program, "stopwatch", stopwatch)
            loaded_data = getattr(self._program, "task_data", {})
        data = loaded_data.get(names[-1])
        if data is None:
            with stopwatch.part(DATA):
                data = task_data("AdaMerging", taskpool, names[-1], modelpool)
        pretrained = load_stored(modelpool, PRETRAINED)
        models = [load_stored(modelpool, name) for name in names]
        merged = _Merged(pretrained, models, self.init_values, self.fabric.device)
        config = options_of(EntropyConfig, self)
        data.minimise_entropy(merged, [merged.coefficients], config, self.seed, stopwatch)
        result = deepcopy(pretrained).requires_grad_()
        with torch.no_grad():
            for name, value in merged.merged_parameters().items():
                result.get_parameter(name).copy_(value)
        return result


class _Merged(nn.Module):
    r"""A model with the parameters :math:`\theta_l + \sum_t \lambda_{tl} \tau_{tl}`, where l is a
    parameter tensor.
    """

    def __init__(
        self,
        pretrained: nn.Module,
        models: Sequence[nn.Module],
        init_values: float,
        device: torch.device,
    ) -> None:
        super().__init__()
        # `functional_call` would leave tensors of its own in the caller's modules that have several
        # names.
        self.model = deepcopy(pretrained).to(device).requires_grad_(False)
        # A parameter with several names is here once.
        self.theta = dict(self.model.named_parameters())
        self.tau: list[dict[str, Tensor]] = []  # task vectors by parameter, one dict for each model
        for model in models:
            task_vectors = {}
            for name, value in self.theta.items():
                task_vectors[name] = model.get_parameter(name).detach().to(device) - value
            self.tau.append(task_vectors)
        # lambda, (models, parameter tensors)
        coefficients = torch.full((len(models), len(self.theta)), init_values, device=device)
        self.coefficients = nn.Parameter(coefficients)

    def merged_parameters(self) -> dict[str, Tensor]:
        merged: dict[str, Tensor] = {}
        for number, (name, theta) in enumerate(self.theta.items()):
            value: Tensor = theta
            for task_vectors, coefficients in zip(self.tau, self.coefficients, strict=True):
                value = value + coefficients[number] * task_vectors[name]
            merged[name] = value
        return merged

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.model, self.merged_parameters(), args, kwargs)
