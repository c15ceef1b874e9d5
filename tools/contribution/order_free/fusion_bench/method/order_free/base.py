"""
What the order-free methods share: one pass over the models, and a state per layer that is
a symmetric function of the tasks and does not grow with their number.
"""

import logging
from abc import abstractmethod
from copy import deepcopy
from typing import Callable, Dict, Tuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from fusion_bench import BaseAlgorithm, BaseModelPool
from fusion_bench.mixins import LightningFabricMixin, SimpleProfilerMixin

log = logging.getLogger(__name__)

State = Dict[str, Tensor]
FAINTEST = 1e-6  # a direction below this share of the strongest is rounding


class OrderFreeMerging(LightningFabricMixin, SimpleProfilerMixin, BaseAlgorithm):
    """
    Merges the linear layers of a model, but for the output head, and averages the rest.

    Three models and the state are held at a time. Everything is computed in float64, and
    the state is kept in float32 at least.
    """

    @abstractmethod
    def shapes(self, d_o: int, d_i: int) -> Dict[str, Tuple[int, ...]]:
        """Return names and shapes of the tensors in the state of a layer (d_o, d_i)."""

    @abstractmethod
    def add(self, state: State, tau: Tensor, count: int) -> State:
        """Return the state with task vector (d_o, d_i) number ``count`` (from 1)."""

    @abstractmethod
    def update(self, state: State, count: int) -> Tensor:
        """Return the merged update (d_o, d_i) of ``count`` tasks."""

    @torch.no_grad()
    def run(self, modelpool: BaseModelPool) -> nn.Module:
        if not isinstance(modelpool, BaseModelPool):
            modelpool = BaseModelPool(modelpool)
        pretrained = modelpool.load_pretrained_model()
        merged, names = deepcopy(pretrained), self._linear_layers(pretrained)
        counts, states, means = dict.fromkeys(names, 0), {}, {}
        for number, model_name in enumerate(tqdm(modelpool.model_names), 1):
            with self.profile("loading models"):
                model = modelpool.load_model(model_name)
            self._check(pretrained, model, model_name)
            for name in tqdm(names, desc=f"Adding {model_name}", leave=False):
                with self.profile("adding layers"):
                    tau = self._task_vector(name, pretrained, model)
                    if tau.any():  # a task that left the layer alone has no vote
                        counts[name] += 1
                        states[name] = self._add(states.get(name), tau, counts[name])
            average_others(merged, model, names, number, means)
        for name, state in tqdm(states.items(), desc="Merging layers"):
            with self.profile("merging layers"):
                weight = merged.get_parameter(name)
                wide = {key: x.to(self._device).double() for key, x in state.items()}
                update = self.update(wide, counts[name])
                weight.copy_(weight.double() + update.to(weight.device))
        self.print_profile_summary()
        return merged

    @property
    def _device(self) -> torch.device:
        device = self.fabric.device  # MPS has no float64
        return device if device.type != "mps" else torch.device("cpu")

    def _linear_layers(self, model: nn.Module) -> Dict[str, nn.Parameter]:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        layers, seen = {}, set()
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and module is not head:
                if module.weight.is_floating_point() and id(module.weight) not in seen:
                    seen.add(id(module.weight))
                    layers[f"{name}.weight" if name else "weight"] = module.weight
        if not layers:
            raise ValueError(f"{type(model).__name__} has no linear layer to merge")
        share = sum(x.numel() for x in layers.values())
        share /= sum(x.numel() for x in model.parameters())
        text = f"merging {len(layers)} linear layers, {share:.1%} of all parameters; the others are averaged"
        log.log(logging.INFO if share >= 0.5 else logging.WARNING, text)
        return layers

    def _check(self, pretrained: nn.Module, model: nn.Module, model_name: str):
        state = model.state_dict()
        for key, expected in pretrained.state_dict().items():
            if key not in state or state[key].shape != expected.shape:
                raise ValueError(f"model '{model_name}' lacks {key} {expected.shape}")
            if not state[key].isfinite().all():
                raise ValueError(f"model '{model_name}': {key} is not finite")

    def _task_vector(
        self, name: str, pretrained: nn.Module, model: nn.Module
    ) -> Tensor:
        new, old = model.get_parameter(name), pretrained.get_parameter(name)
        wide = torch.promote_types(old.dtype, torch.float32)
        return new.to(self._device, wide) - old.to(self._device, wide)

    def _add(self, state: State, tau: Tensor, count: int) -> State:
        if state is None:
            shapes = self.shapes(*tau.shape).items()
            state = {key: tau.new_zeros(shape) for key, shape in shapes}
        wide = {key: x.to(tau.device).double() for key, x in state.items()}
        added = self.add(wide, tau.double(), count)
        # numbers stay in float64
        return {key: x.to(tau.dtype) if x.ndim else x for key, x in added.items()}


@torch.no_grad()
def average_others(
    merged: nn.Module, model: nn.Module, names: Dict, number: int, means: Dict
):
    """Take a model into the running means, in float32, of all but the layers."""
    ours, theirs, done = merged.state_dict(keep_vars=True), model.state_dict(), set()
    done.update(id(ours[name]) for name in names)
    for key, value in ours.items():
        if id(value) not in done and value.is_floating_point():
            done.add(id(value))
            wide = torch.promote_types(value.dtype, torch.float32)
            new = theirs[key].to(value.device, wide)
            means[key] = torch.lerp(means.get(key, value).to(wide), new, 1 / number)
            value.copy_(means[key])


def map_spectrum(X: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """Return U f(s) V^T for X = U s V^T, from the smaller Gram matrix, without rounding's directions."""
    if X.shape[0] < X.shape[1]:
        return map_spectrum(X.T, f).T
    eigenvalues, V = torch.linalg.eigh(X.T @ X)
    s = eigenvalues.clamp_min(0).sqrt()
    gain = torch.where(s > FAINTEST * s.amax(), f(s) / s, 0)
    return X @ (V * gain @ V.T)
