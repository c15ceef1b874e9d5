r"""The strength of a whole merge, found from its layers (docs/notes/strength.md).

:math:`\lambda X` does :math:`\lambda c` times what the tasks do, and moves the base by :math:`\lambda m`:

.. math::
    c = \sum_t \langle X, \hat\tau_t \rangle / \sum_t \lVert \tau_t \rVert^2, \qquad
    m_l = \lVert X_l \rVert / \lVert W_{0,l} \rVert, \qquad
    \lambda = 1 / \sqrt{(c / a)^2 + (m / b)^2}, \qquad a = 1, \quad b = 0.28

with sums over all layers, m the geometric mean over those that moved, and :math:`\hat\tau_t` the leading
:math:`\min(d_o, d_i) / T` directions of :math:`\tau_t`. The merge is as strong as an ellipse allows: at most the
whole of each task, and at most 0.28 of the base. Where some tasks are of low rank, for which X has less strength
already, :math:`\lambda` is at most 1.
"""

from collections.abc import Collection, Mapping
from math import exp, fsum, hypot, log

import torch
from torch import Tensor
from typing_extensions import TypedDict

from .task_vector import Directions

MOST_KEPT, MOST_MOVED = 1.0, 0.28  # docs/notes/strength.md


class Measure(TypedDict):
    """What the strength needs to know of a layer and of its merged update X."""

    tasks: int  # those that moved the layer
    low_rank: int  # of them
    kept: float  # the sum of <X, leading directions of the task>
    energy: float  # the sum of the tasks' squared norms
    norm: float  # of X
    base_norm: float


class Strength(TypedDict):
    """The strength of a merge, and the two numbers that it follows from, which are of an update of strength 1."""

    scale: float
    kept: float  # c, the share that the tasks keep of themselves
    moved: float  # m, how far the layers move


def in_words(found: Strength) -> str:
    """Return a strength with the two numbers that it follows from."""
    kept, moved = f"tasks keep {found['kept']:.2f} of themselves", f"layers move by {found['moved']:.2g} of the base"
    return f"{found['scale']:.3g} (at 1, {kept} and {moved})"


def measure(state: Mapping[str, Tensor], leading: Directions, X: Tensor, theta_0: Tensor) -> Measure:
    """Measure a layer whose tasks' directions, all side by side, are ``leading``; X and theta_0 are ``(d_o, d_i)``."""
    left, values, right = (each.to(X.dtype) for each in leading)
    norm = torch.linalg.vector_norm
    return Measure(
        tasks=int(state["count"]),
        low_rank=int(state.get("low_rank", 0)),
        kept=((X @ right) * (left * values)).sum().item(),
        energy=state["energy"].item(),
        norm=norm(X).item(),
        base_norm=norm(theta_0.to(X.dtype)).item(),
    )


def find_strength(layers: Collection[Measure]) -> Strength:
    """Return the strength of a merge of these layers, which is 1 for a single task."""
    shares = [layer["norm"] / layer["base_norm"] for layer in layers if layer["norm"] and layer["base_norm"]]
    energy = fsum(layer["energy"] for layer in layers)  # whatever the order of the layers
    kept = fsum(layer["kept"] for layer in layers) / energy if energy else 0.0
    moved = exp(fsum(map(log, shares)) / len(shares)) if shares else 0.0
    several = max((layer["tasks"] for layer in layers), default=0) > 1
    scale = 1 / hypot(kept / MOST_KEPT, moved / MOST_MOVED) if several and moved else 1.0
    if any(layer["low_rank"] for layer in layers):
        scale = min(scale, 1.0)
    return Strength(scale=scale, kept=kept, moved=moved)
