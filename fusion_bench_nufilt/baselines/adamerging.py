"""Layer-wise AdaMerging as a continual method, shown the new task's data alone."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from fusion_bench import BaseAlgorithm, BaseModelPool, auto_register_config
from fusion_bench.mixins import LightningFabricMixin
from torch import Tensor, nn
from torch.func import functional_call

from .task_data import task_data


@auto_register_config
class NewTaskAdaMergingAlgorithm(LightningFabricMixin, BaseAlgorithm):
    """Layer-wise AdaMerging (Yang et al., ICLR 2024), adapted to the last model's task.

    One weight for each parameter tensor and task vector, trained to make the merged model's predictions on test data,
    without labels, certain (least entropy). FusionBench's algorithms take data from the model pool and adapt to the
    tasks of all its models, and the one for Flan-T5 does not train the embedding's weight, which has several names.

    Args:
        init_values: of the weights.
        lr: of Adam.
        max_steps: steps of Adam, a batch each.
        batch_size: items in a batch.
        samples_per_class: how many of each class are looked at; None: all.
        seed: of the order of the items.
    """

    # set by auto_register_config
    init_values: float
    lr: float
    max_steps: int
    batch_size: int
    samples_per_class: int | None
    seed: int

    def __init__(
        self,
        init_values: float = 0.3,
        lr: float = 1e-4,
        max_steps: int = 50,
        batch_size: int = 16,
        samples_per_class: int | None = None,
        seed: int = 42,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)

    @torch.enable_grad()
    def run(self, modelpool: BaseModelPool, **kwargs: Any) -> nn.Module:
        """Merge all models of a pool at once; neither they nor the pretrained model are changed.

        Raises:
            ValueError: the task pool has no data of the last model's task.
        """
        names = modelpool.model_names
        data = task_data("AdaMerging", None if self._program is None else self._program.taskpool, names[-1])
        theta_0, *models = (modelpool.load_model(name) for name in ("_pretrained_", *names))
        merged = _Merged(theta_0, models, self.init_values, self.fabric.device)
        data.make_certain(
            merged,
            [merged.weights],
            lr=self.lr,
            steps=self.max_steps,
            batch_size=self.batch_size,
            per_class=self.samples_per_class,
            seed=self.seed,
        )
        model = deepcopy(theta_0).requires_grad_()
        with torch.no_grad():
            for name, value in merged.now().items():
                model.get_parameter(name).copy_(value)
        return model


class _Merged(nn.Module):
    r"""A model with the parameters :math:`\theta_l + \sum_t \lambda_{tl} \tau_{tl}`, where l is a parameter tensor."""

    def __init__(
        self, pretrained: nn.Module, models: Sequence[nn.Module], init_values: float, device: torch.device
    ) -> None:
        super().__init__()
        # A copy, also because `functional_call` leaves its own tensors behind in modules that have several names.
        self.model = deepcopy(pretrained).to(device).requires_grad_(False)
        self.theta = dict(self.model.named_parameters())  # a parameter with several names is here once
        self.tau = [
            {name: model.get_parameter(name).detach().to(device) - value for name, value in self.theta.items()}
            for model in models
        ]
        #: lambda, ``(models, layers)``
        self.weights = nn.Parameter(torch.full((len(models), len(self.theta)), init_values, device=device))

    def now(self) -> dict[str, Tensor]:
        return {
            name: sum((weight * tau[name] for weight, tau in zip(column, self.tau, strict=True)), start=value)
            for column, (name, value) in zip(self.weights.T, self.theta.items(), strict=True)
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.model, self.now(), args, kwargs)
