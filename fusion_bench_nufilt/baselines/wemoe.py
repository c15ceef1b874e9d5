"""LoRA-WEMoE, a reference method that adds parameters and needs data: every MLP is a mixture of low-rank experts."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from fusion_bench import auto_register_config
from fusion_bench.models.we_moe import WeightEnsemblingMoE, construct_weight_ensembling_gate
from torch import Tensor, nn
from transformers import CLIPVisionModel, T5ForConditionalGeneration

from fusion_bench_nufilt.continual import ContinualMergingAlgorithm, ProtocolConfig
from fusion_bench_nufilt.continual.models import MERGED
from fusion_bench_nufilt.core.options import option, split_options, takes_options
from fusion_bench_nufilt.core.subspace import right_singular_basis
from fusion_bench_nufilt.core.weights import widened
from fusion_bench_nufilt.layers import check_model

from .task_data import EntropyConfig, task_data

_Ensembling: Any = WeightEnsemblingMoE


class LowRankExperts(_Ensembling):
    r"""An MLP with the matrices :math:`W + \sum_k g_k(x) B_k A_k`.

    The gate g is one linear layer on the MLP's input, averaged over tokens, and over the batch if ``batch_reduce``; its
    bias starts as ``init_lambda``. W, in ``mlp``, stays as it is; the rank is clipped to the smaller side of a matrix.
    """

    def __init__(
        self, mlp: nn.Module, hidden_size: int, num_experts: int, rank: int, init_lambda: float, batch_reduce: bool
    ) -> None:
        nn.Module.__init__(self)  # FusionBench's own constructor takes whole models as experts
        self.hidden_size, self.rank, self.init_lambda = hidden_size, rank, init_lambda
        self.batch_first, self.batch_reduce = True, batch_reduce
        self.base_model = mlp
        matrices = {name: layer.weight for name, layer in mlp.named_children() if isinstance(layer, nn.Linear)}
        sizes = {name: num_experts * min(rank, *W.shape) for name, W in matrices.items()}
        #: the experts of each layer side by side: (d_o, experts · rank) and (experts · rank, d_i)
        self.B = nn.ParameterDict({name: W.new_zeros(len(W), sizes[name]) for name, W in matrices.items()})
        self.A = nn.ParameterDict({name: W.new_zeros(sizes[name], W.shape[1]) for name, W in matrices.items()})
        self.gate: Any = self._new_gate(num_experts) if num_experts else None

    @torch.no_grad()
    def add(self, task_vectors: dict[str, Tensor]) -> None:
        """Add an expert, the best approximation of the task vector of each matrix; the gate keeps its rows."""
        for name, tau in task_vectors.items():
            B, A = self.B[name], self.A[name]
            V = right_singular_basis(tau, self.rank)  # (d_i, rank); tau V V^T is the truncated SVD
            self.B[name] = nn.Parameter(torch.cat([B, (tau @ V).to(B)], dim=1))
            self.A[name] = nn.Parameter(torch.cat([A, V.T.to(A)]))
        old = self.gate
        self.gate = self._new_gate(1 if old is None else 1 + old.fc.out_features).to(B)
        if old is not None:
            self.gate.fc.weight[:-1], self.gate.fc.bias[:-1] = old.fc.weight, old.fc.bias

    def merge_weights(self, expert_weights: Tensor) -> dict[str, Tensor]:
        """Return the MLP's state with the experts added, each times its weight ``(experts,)``."""
        state = dict(self.base_model.state_dict(keep_vars=True))
        for name, B in self.B.items():
            g = expert_weights.repeat_interleave(B.shape[1] // len(expert_weights))
            state[f"{name}.weight"] = state[f"{name}.weight"] + (B * g) @ self.A[name]
        self._merged_state_dict = state
        return state

    def _new_gate(self, num_experts: int) -> Any:
        return construct_weight_ensembling_gate(self.hidden_size, num_experts, self.init_lambda, num_hidden_layers=1)


class MixtureOfExperts(nn.Module):
    """Base of models with :class:`LowRankExperts`, which ``save_pretrained`` and ``from_pretrained`` handle."""

    config: Any
    mlp: str  # the name of the MLPs in the model's blocks

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for name in [name for name, _ in self.named_modules() if name.endswith(f".{self.mlp}")]:
            block = self.get_submodule(name.removesuffix(f".{self.mlp}"))
            setattr(block, self.mlp, LowRankExperts(getattr(block, self.mlp), config.hidden_size, **config.experts))

    def mixtures(self) -> Iterator[tuple[str, LowRankExperts]]:
        """Yield the name and the module of every mixture."""
        return ((name, module) for name, module in self.named_modules() if isinstance(module, LowRankExperts))

    @torch.no_grad()
    def add_expert(self, pretrained: nn.Module, task: nn.Module) -> None:
        r"""Add a task: its MLP matrices become an expert, every other parameter :math:`\theta + \lambda \tau`."""
        theta_0, theta = dict(pretrained.named_parameters()), dict(self.named_parameters())
        tau = {key: widened(task.get_parameter(key)) - widened(value) for key, value in theta_0.items()}
        for name, mixture in self.mixtures():
            mixture.add({layer: tau.pop(f"{name}.{layer}.weight") for layer in mixture.A})
        for key, update in tau.items():
            here = key.replace(f".{self.mlp}.", f".{self.mlp}.base_model.")
            theta[here].add_(update, alpha=self.config.experts["init_lambda"])
        self.config.experts = {**self.config.experts, "num_experts": self.config.experts["num_experts"] + 1}


class CLIPVisionModelWithExperts(MixtureOfExperts, CLIPVisionModel):
    """A CLIP vision tower with experts."""

    mlp = "mlp"


class T5ForConditionalGenerationWithExperts(MixtureOfExperts, T5ForConditionalGeneration):  # type: ignore[misc]
    """T5 or Flan-T5 with experts."""

    mlp = "DenseReluDense"


MIXTURES: dict[type, type[MixtureOfExperts]] = {
    CLIPVisionModel: CLIPVisionModelWithExperts,
    T5ForConditionalGeneration: T5ForConditionalGenerationWithExperts,
}


@dataclass(frozen=True)
class WEMoEConfig(EntropyConfig):
    """The experts, and how their gates are trained."""

    samples_per_class: int | None = option(5, "Items of each class that are used; null takes all.")
    rank: int = option(64, "Rank of the experts.")
    init_lambda: float = option(0.3, "Factor of all other parameters, and the bias of a gate at its start.", symbol="λ")
    batch_reduce: bool = option(True, "One gate for the whole batch instead of one for each of its items.")


def mixture_of(model: Any, options: WEMoEConfig) -> MixtureOfExperts:
    """Return a model with the weights of another, of a class in :data:`MIXTURES`, whose MLPs have no experts yet."""
    if type(model) not in MIXTURES:
        known = " or ".join(kind.__name__ for kind in MIXTURES)
        raise ValueError(f"experts are known for a {known}, not for a {type(model).__name__}")
    config, chosen = deepcopy(model.config), ("rank", "init_lambda", "batch_reduce")
    config.experts = {"num_experts": 0} | {key: getattr(options, key) for key in chosen}
    mixture = MIXTURES[type(model)](config).eval()
    marker = f".{mixture.mlp}."
    state = {key.replace(marker, f"{marker}base_model."): value for key, value in model.state_dict().items()}
    mixture.load_state_dict(state, strict=False)
    return mixture.to(next(model.parameters()).dtype)


@auto_register_config
@takes_options(WEMoEConfig, ProtocolConfig)
class LoRAWEMoE(ContinualMergingAlgorithm):
    r"""Weight-ensembling mixture of experts (Tang et al., ICML 2024, arXiv 2402.00433) with experts of low rank.

    Each task adds an expert to every MLP (:class:`LowRankExperts`); every other parameter becomes :math:`\theta +
    \lambda \tau`. Then all rows of the gates are trained to make predictions on test data of the new task certain.

    Args:
        **kwargs: options of :class:`WEMoEConfig` and :class:`fusion_bench_nufilt.continual.ProtocolConfig`.
    """

    def __init__(self, **kwargs: Any) -> None:
        (self._options,), protocol = split_options([WEMoEConfig], kwargs)
        if protocol.get("resume"):
            raise ValueError(f"{self.name} can't go on with resume=true: its model grows at every step")
        super().__init__(**protocol)

    def start(self, pretrained: nn.Module, names: list[str]) -> None:
        if self.first_step > 1:
            raise ValueError(f"{self.name} starts from the pretrained model, not from '{MERGED}'")
        self._mixture = mixture_of(pretrained, self._options)
        self._data = {name: task_data(self.name, self.taskpool, name) for name in names}

    def check_model(self, pretrained: nn.Module, model: nn.Module, name: str) -> None:
        check_model(pretrained, model, name=name)

    def merge_step(self, step: int, name: str, pretrained: nn.Module, merged: nn.Module, task: nn.Module) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed + step)  # the new gates are drawn from it
            self._mixture.add_expert(pretrained, task)
        device = next(merged.parameters()).device
        mixture = self._mixture.to(self.fabric.device).requires_grad_(False)
        gates = [weight.requires_grad_() for _, module in mixture.mixtures() for weight in module.gate.parameters()]
        with torch.enable_grad():
            self._data[name].minimise_entropy(mixture, gates, self._options, self.seed)
        return mixture.to(device)
