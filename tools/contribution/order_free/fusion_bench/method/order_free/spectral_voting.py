"""
Spectral voting: what each task moves most, all of it at nearly the same strength.

    A_t = U (s / s_1)^3 V^T of tau_t = U s V^T,   S = sum_t A_t = U_S sigma V_S^T,
    X = kappa m c U_S q(sigma) V_S^T

with m the mean of the tasks' s_1. Cubing lets a task vote with its leading directions. q
lifts faint votes, and so what little is left of votes that cancel: c is 1, or less where S
is shorter than half of a sum of unrelated votes, c = 2 ||S|| / (sum_t ||A_t||^2)^(1/2).

S and the three numbers beside it are symmetric in the tasks and do not grow with their
number: one pass over the models, in any order.
"""

import logging
from copy import deepcopy
from dataclasses import dataclass
from typing import Dict, Tuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from fusion_bench import BaseAlgorithm, BaseModelPool, auto_register_config
from fusion_bench.mixins import LightningFabricMixin, SimpleProfilerMixin

log = logging.getLogger(__name__)

FAINTEST = 1e-6  # a direction below this share of the strongest is rounding


@dataclass
class Votes:
    """What is kept of a layer."""

    total: Tensor  # S (d_o, d_i) in float32 at least, or tau of a single task
    energy: float = 0.0  # sum_t ||A_t||^2
    strengths: float = 0.0  # sum_t s_1
    count: int = 0  # of the tasks that moved the layer

    def add(self, tau: Tensor):
        """Add a task vector (d_o, d_i) in float64; a single one is taken whole."""
        self.count += 1
        if self.count == 1:
            self.total = tau
            return
        taus = [tau]
        if self.count == 2:
            taus.insert(0, self.total.double())
            self.total = torch.zeros_like(tau)
        for each in taus:
            A, s_1 = vote(each)
            self.total = self.total.double() + A
            self.energy += A.square().sum().item()
            self.strengths += s_1.item()

    def update(self, kappa: float, damp: float) -> Tensor:
        """Return the merged update (d_o, d_i) in float64."""
        S = self.total.double()
        if self.count == 1:
            return S
        left_over = min(1.0, 2 * S.norm().item() / self.energy**0.5)
        return kappa * self.strengths / self.count * left_over * flatten(S, damp)


def vote(tau: Tensor) -> Tuple[Tensor, Tensor]:
    """Return A = tau tau^T tau / s_1^3 and s_1."""
    if tau.shape[0] < tau.shape[1]:
        A, s_1 = vote(tau.T)
        return A.T, s_1
    gram = tau.T @ tau
    v_1 = torch.linalg.eigh(gram).eigenvectors[:, -1:]
    s_1 = torch.linalg.vector_norm(tau @ v_1)
    return tau @ (gram / s_1**3), s_1


def flatten(S: Tensor, damp: float) -> Tensor:
    """Return U q(sigma) V^T for S = U sigma V^T, without rounding's directions."""
    if S.shape[0] < S.shape[1]:
        return flatten(S.T, damp).T
    eigenvalues, V = torch.linalg.eigh(S.T @ S)
    sigma = eigenvalues.clamp_min(0).sqrt()
    shared = sigma.clamp_min(1) ** -damp
    q = torch.where(sigma <= 1, 1 + 0.03 * (1 - sigma), shared)
    gain = torch.where(sigma > FAINTEST * sigma.amax(), q / sigma, 0)
    return S @ (V * gain @ V.T)


@auto_register_config
class SpectralVotingMerging(LightningFabricMixin, SimpleProfilerMixin, BaseAlgorithm):
    def __init__(self, kappa: float = 0.9, damp: float = 0.5, **kwargs):
        """
        Merge the linear layers of a model, but for the output head, and average the rest.

        Three models and the votes are held at a time. Everything is computed in float64.

        Args:
            kappa (float): strength of a direction, over the mean of the tasks' s_1.
            damp (float): directions that n tasks share are held down by n^-damp.
        """
        super().__init__(**kwargs)

    @torch.no_grad()
    def run(self, modelpool: BaseModelPool) -> nn.Module:
        if not isinstance(modelpool, BaseModelPool):
            modelpool = BaseModelPool(modelpool)
        pretrained = modelpool.load_pretrained_model()
        merged = deepcopy(pretrained)
        names = linear_layers(pretrained)
        votes = {}
        means = {}
        for number, model_name in enumerate(tqdm(modelpool.model_names), 1):
            with self.profile("loading models"):
                model = modelpool.load_model(model_name)
            check(pretrained, model, model_name)
            for name in tqdm(names, desc=f"Adding {model_name}", leave=False):
                with self.profile("adding layers"):
                    self._add(name, votes, pretrained, model)
            average_others(merged, model, names, number, means)
        for name, layer_votes in tqdm(votes.items(), desc="Merging layers"):
            with self.profile("merging layers"):
                weight = merged.get_parameter(name)
                update = layer_votes.update(self.kappa, self.damp)
                weight.copy_(weight.double() + update.to(weight.device))
        self.print_profile_summary()
        return merged

    def _add(
        self,
        name: str,
        votes: Dict[str, Votes],
        pretrained: nn.Module,
        model: nn.Module,
    ):
        device = self.fabric.device
        if device.type == "mps":  # it has no float64
            device = torch.device("cpu")
        old = pretrained.get_parameter(name)
        new = model.get_parameter(name)
        wide = torch.promote_types(old.dtype, torch.float32)
        tau = new.to(device, wide) - old.to(device, wide)
        if tau.any():  # a task that left the layer alone has no vote
            layer_votes = votes.setdefault(name, Votes(tau))
            layer_votes.add(tau.double())
            layer_votes.total = layer_votes.total.to(wide)


def linear_layers(model: nn.Module) -> Dict[str, nn.Parameter]:
    """Return the weights to merge; the log says which share of the model they are."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    layers = {}
    seen = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            if module.weight.is_floating_point() and id(module.weight) not in seen:
                seen.add(id(module.weight))
                layers[f"{name}.weight".removeprefix(".")] = module.weight
    if not layers:
        raise ValueError(f"{type(model).__name__} has no linear layer to merge")
    share = sum(x.numel() for x in layers.values())
    share /= sum(x.numel() for x in model.parameters())
    level = logging.INFO
    if share < 0.5:
        level = logging.WARNING
    text = f"merging {len(layers)} linear layers, {share:.1%} of all parameters"
    log.log(level, f"{text}; the others are averaged")
    return layers


def check(pretrained: nn.Module, model: nn.Module, model_name: str):
    """Refuse a model that can't be merged; the ValueError names the parameter."""
    state = model.state_dict()
    for key, expected in pretrained.state_dict().items():
        if key not in state or state[key].shape != expected.shape:
            raise ValueError(f"model '{model_name}' lacks {key} {expected.shape}")
        if not state[key].isfinite().all():
            raise ValueError(f"model '{model_name}': {key} is not finite")


def average_others(
    merged: nn.Module, model: nn.Module, names: Dict, number: int, means: Dict
):
    """Take a model into the running means, in float32, of all but the layers."""
    ours = merged.state_dict(keep_vars=True)
    theirs = model.state_dict()
    done = {id(ours[name]) for name in names}
    for key, value in ours.items():
        if id(value) not in done and value.is_floating_point():
            done.add(id(value))
            wide = torch.promote_types(value.dtype, torch.float32)
            new = theirs[key].to(value.device, wide)
            means[key] = torch.lerp(means.get(key, value).to(wide), new, 1 / number)
            value.copy_(means[key])
