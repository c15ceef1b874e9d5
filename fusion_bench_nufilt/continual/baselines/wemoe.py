"""LoRA-WEMoE, which adds parameters and needs data: every MLP becomes a mixture of low-rank
experts.
"""

import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from fusion_bench import auto_register_config
from fusion_bench.models.we_moe import WeightEnsemblingMoE, construct_weight_ensembling_gate
from torch import Tensor, nn
from transformers import CLIPVisionModel, T5ForConditionalGeneration

from fusion_bench_nufilt.continual import ContinualMergingAlgorithm
from fusion_bench_nufilt.continual.models import MERGED
from fusion_bench_nufilt.continual.precision import widen
from fusion_bench_nufilt.methods.options import ProtocolConfig
from fusion_bench_nufilt.nufilt.subspace import top_right_singular_vectors
from fusion_bench_nufilt.utils.files import Manifest
from fusion_bench_nufilt.utils.options import (
    check_choices,
    option,
    options_of,
    takes_options,
)
from fusion_bench_nufilt.utils.tensors import to_compute_dtype

from .task_data import EntropyConfig, data_of_run

_Ensembling: Any = WeightEnsemblingMoE


class LowRankExperts(_Ensembling):
    r"""An MLP with the matrices :math:`W + \sum_k g_k(x) B_k A_k`.

    The gate g is a linear layer on the MLP's input, averaged over tokens, and over the batch if
    ``batch_reduce``; its bias starts as ``init_lambda``. W is in ``base_model``. Ranks are clipped
    to the smaller side of a matrix.
    """

    def __init__(
        self,
        mlp: nn.Module,
        hidden_size: int,
        ranks: list[int],
        init_lambda: float,
        batch_reduce: bool,
    ) -> None:
        nn.Module.__init__(self)  # FusionBench's own constructor takes whole models as experts
        self.hidden_size = hidden_size
        self.ranks = list(ranks)
        self.init_lambda = init_lambda
        self.batch_first = True
        self.batch_reduce = batch_reduce
        self.base_model = mlp
        # All experts of a layer, side by side: B (d_o, sum of ranks) and A (sum of ranks, d_i).
        self.B = nn.ParameterDict()
        self.A = nn.ParameterDict()
        for name, layer in mlp.named_children():
            if isinstance(layer, nn.Linear):
                W = layer.weight
                d_o, d_i = W.shape
                sum_of_ranks = sum(min(rank, d_o, d_i) for rank in ranks)
                self.B[name] = W.new_zeros(d_o, sum_of_ranks)
                self.A[name] = W.new_zeros(sum_of_ranks, d_i)
        self.gate: Any = None
        if ranks:
            self.gate = self._new_gate(len(ranks))

    @torch.no_grad()
    def add(self, task_vectors: dict[str, Tensor], rank: int) -> None:
        """Add an expert: each matrix's task vector, truncated to this rank. The gate keeps its
        rows.
        """
        for name, tau in task_vectors.items():
            B = self.B[name]
            A = self.A[name]
            V = top_right_singular_vectors(tau, rank)  # (d_i, rank); tau V V^T is the truncated SVD
            self.B[name] = nn.Parameter(torch.cat([B, (tau @ V).to(B)], dim=1))
            self.A[name] = nn.Parameter(torch.cat([A, V.T.to(A)]))
        old_gate = self.gate
        self.ranks = [*self.ranks, rank]
        self.gate = self._new_gate(len(self.ranks)).to(B)
        if old_gate is not None:
            self.gate.fc.weight[:-1] = old_gate.fc.weight
            self.gate.fc.bias[:-1] = old_gate.fc.bias

    def merge_weights(self, expert_weights: Tensor) -> dict[str, Tensor]:
        """Return the MLP's state plus the experts times their weights ``(experts,)``."""
        state = dict(self.base_model.state_dict(keep_vars=True))
        for name, B in self.B.items():
            ranks = [min(rank, len(B), self.A[name].shape[1]) for rank in self.ranks]
            g = expert_weights.repeat_interleave(torch.tensor(ranks, device=B.device))
            state[f"{name}.weight"] = state[f"{name}.weight"] + (B * g) @ self.A[name]
        self._merged_state_dict = state
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Make room for the experts of a resumed run."""
        for kind, factors in (("A", self.A), ("B", self.B)):
            for name, factor in factors.items():
                saved = state_dict.get(f"{prefix}{kind}.{name}", factor)
                factors[name] = nn.Parameter(factor.new_empty(saved.shape))
        bias = state_dict.get(f"{prefix}gate.fc.bias")
        if bias is not None:
            self.gate = self._new_gate(len(bias)).to(factor)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _new_gate(self, num_experts: int) -> Any:
        return construct_weight_ensembling_gate(
            self.hidden_size, num_experts, self.init_lambda, num_hidden_layers=1
        )


class MixtureOfExperts(nn.Module):
    """A model of transformers with :class:`LowRankExperts`."""

    config: Any
    mlp: ClassVar[str]  # the name of the MLPs in its blocks
    # Of the first expert and of every other, in the released code.
    released_ranks: ClassVar[tuple[int, int]]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        mlps = [name for name, _ in self.named_modules() if name.endswith(f".{self.mlp}")]
        for name in mlps:
            block = self.get_submodule(name.removesuffix(f".{self.mlp}"))
            mlp = getattr(block, self.mlp)
            setattr(block, self.mlp, LowRankExperts(mlp, config.hidden_size, **config.experts))

    def mixtures(self) -> Iterator[tuple[str, LowRankExperts]]:
        """Yield every mixture with its name."""
        for name, module in self.named_modules():
            if isinstance(module, LowRankExperts):
                yield name, module

    def set_ranks(self, ranks: Sequence[int]) -> None:
        """Note the experts that the model has, of which the gates alone are trained."""
        self.config.experts = {**self.config.experts, "ranks": list(ranks)}
        self.requires_grad_(False)
        for _, mixture in self.mixtures():
            mixture.ranks = list(ranks)
            mixture.gate.requires_grad_()

    @torch.no_grad()
    def add_expert(
        self, pretrained: nn.Module, task: nn.Module, rank: int, *, attention_alone: bool = False
    ) -> None:
        r"""Add a task: its MLP matrices give an expert, and other parameters become :math:`\theta +
        \lambda \tau`.

        With ``attention_alone``, the others are only those of linear layers in attention.
        """
        task_vectors = {}
        for key, theta_0 in pretrained.named_parameters():
            theta_t = task.get_parameter(key)
            task_vectors[key] = to_compute_dtype(theta_t) - to_compute_dtype(theta_0)
        for name, mixture in self.mixtures():
            of_mlp = {layer: task_vectors.pop(f"{name}.{layer}.weight") for layer in mixture.A}
            mixture.add(of_mlp, rank)
        # What is left is outside the MLPs' matrices.
        theta = dict(self.named_parameters())
        for key, tau in task_vectors.items():
            module = pretrained.get_submodule(key.rpartition(".")[0])
            in_attention = re.search(r"attn\.|attention\.", key, re.IGNORECASE) is not None
            if attention_alone and not (in_attention and isinstance(module, nn.Linear)):
                continue
            key_here = key.replace(f".{self.mlp}.", f".{self.mlp}.base_model.")
            theta[key_here].add_(tau, alpha=self.config.experts["init_lambda"])
        self.set_ranks([*self.config.experts["ranks"], rank])


class CLIPVisionModelWithExperts(MixtureOfExperts, CLIPVisionModel):
    mlp = "mlp"
    released_ranks = (64, 16)


class T5ForConditionalGenerationWithExperts(MixtureOfExperts, T5ForConditionalGeneration):  # type: ignore[misc, unused-ignore]
    mlp = "DenseReluDense"
    released_ranks = (32, 32)


MIXTURES: dict[type, type[MixtureOfExperts]] = {
    CLIPVisionModel: CLIPVisionModelWithExperts,
    T5ForConditionalGeneration: T5ForConditionalGenerationWithExperts,
}


@dataclass(frozen=True)
class WEMoEConfig(EntropyConfig):
    """The experts, and how their gates are trained."""

    rule: Literal["paper", "released"] = option(
        "paper",
        "paper: experts of one rank, and θ + λτ for all other parameters. released: 64 for the "
        "first expert and 16 for "
        "the others (T5: 32), and θ + λτ for attention alone.",
    )
    rank: int = option(64, "Rank of the experts of rule=paper.")
    init_lambda: float = option(
        0.3, "Factor of the other parameters' updates, and initial bias of a gate.", symbol="λ"
    )
    batch_reduce: bool = option(
        True, "One gate for the whole batch instead of one for each of its items."
    )

    def __post_init__(self) -> None:
        check_choices(self)


def mixture_of(model: Any, options: WEMoEConfig) -> MixtureOfExperts:
    """Return a model's counterpart in :data:`MIXTURES`, with the same weights and no experts."""
    if type(model) not in MIXTURES:
        kinds = " or ".join(kind.__name__ for kind in MIXTURES)
        raise ValueError(f"experts are known for a {kinds}, not for a {type(model).__name__}")
    config = deepcopy(model.config)
    config.experts = {
        "ranks": [],
        "init_lambda": options.init_lambda,
        "batch_reduce": options.batch_reduce,
    }
    mixture = MIXTURES[type(model)](config).eval()
    marker = f".{mixture.mlp}."
    state = {}
    for key, value in model.state_dict().items():
        state[key.replace(marker, f"{marker}base_model.")] = value
    mixture.load_state_dict(state, strict=False)  # a mixture without experts has no A, B and gate
    parameter = next(model.parameters())
    return mixture.to(parameter.device, parameter.dtype)


@auto_register_config
@takes_options(WEMoEConfig, ProtocolConfig)
class LoRAWEMoE(ContinualMergingAlgorithm):
    r"""Weight-ensembling mixture of experts (Tang et al., ICML 2024, arXiv 2402.00433) with experts
    of low rank.

    Each task adds an expert to every MLP; other parameters become :math:`\theta + \lambda \tau`.
    Then the gates are trained to make predictions on data of the new task certain.

    Args:
        **kwargs: options of :class:`WEMoEConfig` and
            :class:`fusion_bench_nufilt.continual.ProtocolConfig`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    @property
    def _options(self) -> WEMoEConfig:
        return options_of(WEMoEConfig, self)

    def start(self, pretrained: nn.Module, names: list[str]) -> None:
        if self.first_step > 1:
            raise ValueError(f"{self.name} starts from the pretrained model, not from '{MERGED}'")
        self._mixture = mixture_of(pretrained, self._options)

    def training_data(self) -> dict[str, Any]:
        self._data = data_of_run(self)
        return {name: data.dataset for name, data in self._data.items()}

    def expert_rank(self, step: int) -> int:
        """Return the rank of a step's expert."""
        if self._options.rule == "paper":
            return self._options.rank
        first_rank, other_rank = self._mixture.released_ranks
        return first_rank if step == 1 else other_rank

    def prepare(self, merged: nn.Module) -> nn.Module:
        return self._mixture

    def go_on_from(self, folder: Path | None, manifest: Manifest) -> None:
        # The weights alone do not tell which expert a direction belongs to.
        steps = range(1, manifest["step"] + 1)
        self._mixture.set_ranks([self.expert_rank(step) for step in steps])

    def merge_step(
        self, step: int, name: str, pretrained: nn.Module, merged: nn.Module, task: nn.Module
    ) -> nn.Module:
        weight = next(merged.parameters())
        device = weight.device
        dtype = weight.dtype
        # In 16 bits, most steps of the gates' training would be rounded away.
        widen(self._mixture)
        self._add_expert(step, name, pretrained, task)
        return self._mixture.to(device, dtype)

    def _add_expert(self, step: int, name: str, pretrained: nn.Module, task: nn.Module) -> None:
        """Add the expert of a step, and train the gates."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed + step)  # the new gates are drawn from it
            released = self._options.rule == "released"
            self._mixture.add_expert(
                pretrained, task, self.expert_rank(step), attention_alone=released
            )
        mixture = self._mixture.to(self.fabric.device)
        gates = [parameter for parameter in mixture.parameters() if parameter.requires_grad]
        with torch.enable_grad():
            self._data[name].minimise_entropy(
                mixture, gates, self._options, self.seed, self.stopwatch
            )
