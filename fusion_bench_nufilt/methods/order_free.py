"""What order-free methods share: a state of sums over the tasks, and an update whose strength may grow with depth."""

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor

from fusion_bench_nufilt.core import options
from fusion_bench_nufilt.core.options import check_choices, check_positive, is_number
from fusion_bench_nufilt.core.subspace import gram_matrix, top_eigenvectors
from fusion_bench_nufilt.core.weights import wide_dtype
from fusion_bench_nufilt.layers.names import block_of

from .base import LayerMethod, State

FAINTEST = 1e-6  # a direction weaker than this share of the strongest is rounding error

option = partial(options.option, panel="Order-free methods")


@dataclass(frozen=True)
class RampConfig:
    """The setting that all order-free methods have; any others must be choices or numbers above zero.

    Raises:
        ValueError: a value is out of its range; the message names the key.
    """

    ramp: float = option(
        0.0, "Strength grows with depth, from λ (1 - ramp) in the first block to λ (1 + ramp) in the last."
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, *(each.name for each in fields(self) if each.type is float and each.name != "ramp"))
        if not (is_number(self.ramp) and -1 < self.ramp < 1):
            raise ValueError(f"ramp must be a number between -1 and 1, got {self.ramp!r}")


@dataclass(frozen=True)
class ScaleConfig(RampConfig):
    """The settings of an order-free method whose update has a strength."""

    scale: float = option(1.0, "Strength of the merged update.", symbol="λ")


class OrderFree(LayerMethod):
    """A method whose result does not depend on the tasks' order, nor the size of its state on their number.

    The state holds the tensors of :meth:`sums`, in float32 at least, and the ``count`` of the tasks that moved the
    layer. A task that did not change the layer has no effect.
    """

    Options: ClassVar[type] = ScaleConfig
    defaults = {"target_modules": "all-linear", "other_params": "mean"}  # noqa: RUF012
    itemsize = 8
    strength: ClassVar[str] = "scale"
    """The name of the option that is the strength of the update, in the middle of the model."""

    options: RampConfig

    @abstractmethod
    def sums(self, d_o: int, d_i: int) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the tensors in a layer's state."""

    @abstractmethod
    def gather(self, state: State, tau: Tensor) -> State:
        """Return the sums with one more task, number ``state["count"]``; all tensors are in float64."""

    @abstractmethod
    def update(self, state: State, scale: float) -> Tensor:
        """Return the merged update ``(d_o, d_i)`` of at least one task; all tensors are in float64."""

    def start(self, layer: str, theta_0: Tensor) -> State:
        state = {}
        for name, shape in self.sums(*theta_0.shape).items():
            state[name] = theta_0.new_zeros(shape, dtype=wide_dtype(theta_0) if shape else torch.float64)
        return {**state, "count": torch.tensor(0)}

    def add(self, layer: str, state: State, theta_0: Tensor, tau: Tensor) -> State:
        if not tau.any():
            return state
        after = self.gather({**_widened(state), "count": state["count"] + 1}, tau.double())
        return {name: after[name].to(value.dtype) for name, value in state.items()}

    def weight(self, layer: str, state: State, theta_0: Tensor) -> Tensor:
        if state["count"] == 0:
            return theta_0.clone()
        return (theta_0.double() + self.update(_widened(state), self._scales[layer])).to(theta_0.dtype)

    @property
    def scale(self) -> float:
        """The strength of the update in the middle of the model."""
        return getattr(self.options, self.strength)

    @cached_property
    def _scales(self) -> dict[str, float]:
        return strengths(self.layers, self.scale, self.options.ramp)

    def working_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        d_o, d_i = shape
        # Held at once: the state in float64, its eigenvectors and what is solved with them, and the solver's workspace.
        state = sum(math.prod(each) for each in self.sums(d_o, d_i).values())
        return itemsize * (4 * state + 4 * d_o * d_i + 8 * min(d_o, d_i) ** 2)


def _widened(state: State) -> State:
    return {name: value.double() if value.is_floating_point() else value for name, value in state.items()}


def map_spectrum(X: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    r"""Return :math:`U f(s) V^\top` for :math:`X = U s V^\top`, ``(d_o, d_i)``, from the smaller Gram matrix.

    Directions that are rounding error are left out.
    """
    if X.shape[0] < X.shape[1]:
        return map_spectrum(X.mT, f).mT
    eigenvalues, V = torch.linalg.eigh(gram_matrix(X))
    s = eigenvalues.clamp_min(0).sqrt()
    gain = torch.where(s > FAINTEST * s.amax(), f(s) / s, 0)
    return X @ (V * gain @ V.mT)


def spectral_norm(tau: Tensor, gram: Tensor) -> Tensor:
    r"""Return the largest singular value of a matrix whose :math:`\tau^\top\tau` is ``gram``."""
    return torch.linalg.vector_norm(tau @ top_eigenvectors(gram, 1))


def strengths(names: Sequence[str], kappa: float, ramp: float) -> dict[str, float]:
    r"""Return κ of each layer: :math:`\kappa\,(1 + \text{ramp}\,(2 l / (L - 1) - 1))` in block l of L blocks.

    A layer outside all blocks has :math:`\kappa`.
    """
    blocks = {name: block for name in names if (block := block_of(name)) is not None}
    last: dict[str | None, int] = defaultdict(int)  # the number of the last block of each stack
    for block in blocks.values():
        last[block.stack] = max(last[block.stack], block.number)
    kappas = dict.fromkeys(names, kappa)
    for name, block in blocks.items():
        depth = 2 * block.number / last[block.stack] - 1 if last[block.stack] else 0
        kappas[name] = kappa * (1 + ramp * depth)
    return kappas
