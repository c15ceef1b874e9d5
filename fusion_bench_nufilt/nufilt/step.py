"""The mathematics of one merging step on a stack of layers of equal shape: filter,
adapt, fuse.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .adapter import SOLVERS, Objective, loop_gram
from .config import FusionConfig
from .subspace import (
    first_coordinates,
    null_space_filter,
    rounding_energy,
    subspace_affinity,
    top_right_singular_vectors,
)


@dataclass(frozen=True)
class LowRank:
    r"""The factors of a task's update: :math:`\tau = L R` and
    :math:`\theta_t = \theta_0 + L R`.
    """

    left: Tensor  # L, (..., d_o, r)
    right: Tensor  # R, (..., r, d_i)

    def __post_init__(self) -> None:
        left, right = tuple(self.left.shape), tuple(self.right.shape)
        if min(len(left), len(right)) < 2 or left[-1] != right[-2]:
            raise ValueError(f"factors of shapes {left} and {right} have no product")

    @property
    def shape(self) -> tuple[int, ...]:
        """``(..., d_o, d_i)``."""
        return (*self.left.shape[:-1], self.right.shape[-1])

    @property
    def rank(self) -> int:
        """r, the length of the common side."""
        return self.left.shape[-1]

    def product(self) -> Tensor:
        r"""Return :math:`\tau`, in float32 at least."""
        dtype = torch.promote_types(self.left.dtype, torch.float32)
        return self.left.to(dtype) @ self.right.to(dtype)

    def norm(self) -> Tensor:
        """Return the Frobenius norm of the update, ``(...)``, in float64."""
        left, right = self.left.double(), self.right.double()
        squared_norm = ((left.mT @ left) * (right @ right.mT)).sum(dim=(-2, -1))
        return squared_norm.clamp_min(0).sqrt()

    def __getitem__(self, row: int) -> "LowRank":
        """Return the factors of a layer in a stack."""
        return LowRank(self.left[row], self.right[row])

    def to(self, target: torch.device | torch.dtype) -> "LowRank":
        return LowRank(self.left.to(target), self.right.to(target))

    def double(self) -> "LowRank":
        return LowRank(self.left.double(), self.right.double())

    def in_basis(self) -> tuple[Tensor | None, Tensor]:
        r"""Return an orthonormal basis Q of the outputs that the update reaches, and K
        with :math:`\tau = Q K`.

        Q is ``(..., d_o, r)`` and K is ``(..., r, d_i)``. Where r is no smaller than a
        side of the update, they are None and the update itself.
        """
        if self.rank >= min(self.shape[-2:]):
            return None, self.product()
        Q, triangle = torch.linalg.qr(self.left)
        return Q, triangle @ self.right


@dataclass(frozen=True)
class LayerReport:
    """What one step did to one layer."""

    shape: tuple[int, ...]  # (d_o, d_i)
    seconds: float  # wall time, shared evenly by layers that were solved together
    solving_seconds: float = 0.0  # the part of it that the solver took
    task_norm: float = 0.0  # Frobenius norm of the new task vector
    merged_norm: float = 0.0  # Frobenius norm of the cumulative update before this step
    #: number of directions in the filter: r_p clipped to the numerical rank, which in
    #: 16 bits is the number of those that are stronger than rounding
    protected_rank: float = 0.0
    #: share of the squared norm of tau that the filter took, in [0, 1]
    filtered_share: float = 0.0
    #: affinity of the new task's subspace to the protected one, in [0, 1]
    overlap: float = 0.0
    loss_before: float = 0.0  # objective where BA = 0
    loss_after: float = 0.0  # objective of the fused adapter


#: The names of what a step measures of a layer.
MEASURES = tuple(
    each.name for each in fields(LayerReport) if each.name not in ("shape", "seconds")
)


def fuse_stack(
    theta_0: Tensor,  # (n, d_o, d_i), as they are stored
    theta: Tensor,  # (n, d_o, d_i), as they are stored
    tau: Tensor | LowRank,  # see task_vectors; it is in float32 at least
    A: Tensor | None,  # (n, r_l, d_i); None means no adapter
    config: FusionConfig,
    *,
    is_first_task: bool,
    float64: bool,
    height: int | None = None,
    step: int = 1,
    digits: torch.dtype | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    r"""Merge one more task into n layers: :math:`W \leftarrow W + \tau (P + B A)`.

    It takes the memory of :func:`working_bytes`. ``is_first_task`` says that nothing
    has been merged into the layers so far; a first task that is taken whole needs no
    step, see :func:`measures_of_first`. With ``float64``, matrices are decomposed in
    float64. ``height`` is the number of the layers' outputs, where all is given in a
    basis of fewer.

    ``digits`` is the dtype of the models, by default that of ``theta_0``, and ``step``
    the number of the task. Directions of models in 16 bits that are no stronger than
    their rounding are no directions of the tasks, and the filter does not protect them.

    Returns:
        The new weights ``(n, d_o, d_i)``, and :data:`MEASURES` ``(n,)`` by name.
    """
    # Everything but the new weights of a low-rank tau = Q K is computed as if the layer
    # had only the outputs in Q.
    Q: Tensor | None = None
    if isinstance(tau, LowRank):
        Q, tau = tau.in_basis()
    tau_norm2 = _norm2(tau)
    measures = dict.fromkeys(MEASURES, torch.zeros_like(tau_norm2))
    measures["task_norm"] = tau_norm2.sqrt()
    gram = loop_gram(tau)
    ranks = config.ranks(tau.shape[-1])
    rounding_t = rounding_p = None
    spacing = torch.finfo(digits or theta_0.dtype).eps
    if spacing > torch.finfo(torch.float32).eps:
        rounding_t = rounding_energy(theta_0, spacing)
        # Of the first task alone; each later one and the model that it made may have
        # been rounded.
        rounding_p = (2 * step - 3) * rounding_t
    V_t = top_right_singular_vectors(
        tau,
        ranks.task,
        gram,
        float64=float64,
        height=height,
        rounding=rounding_t if Q is None else None,  # factors have no rounding
    )
    # The cumulative update is computed twice, so that it is not held while its singular
    # vectors are found.
    if is_first_task:
        V_p = first_coordinates(
            difference(theta, theta_0, tau.dtype), ranks.null, height
        )
        A = None
    else:
        V_p = top_right_singular_vectors(
            difference(theta, theta_0, tau.dtype),
            ranks.null,
            float64=float64,
            height=height,
            rounding=rounding_p,
        )
    tau_merged = difference(theta, theta_0, tau.dtype)
    measures["merged_norm"] = _norm2(tau_merged).sqrt()
    tau_filtered = null_space_filter(tau, V_p, config.null_space)
    kept = _norm2(tau_filtered) / tau_norm2.clamp_min(torch.finfo(tau.dtype).tiny)
    # ||tau||^2 = ||tau P||^2 + ||tau (I - P)||^2
    measures["filtered_share"] = torch.where(tau_norm2 > 0, 1 - kept, 0).clamp_min(0)
    measures["protected_rank"] = _norm2(V_p).round()
    measures["overlap"] = subspace_affinity(V_t, V_p)
    objective = Objective.build(tau, tau_filtered, tau_merged, V_t, V_p, gram, Q)
    measures["loss_before"] = measures["loss_after"] = objective.target_norm2
    del tau_merged

    if Q is not None:
        tau_filtered = Q @ tau_filtered
    weights = theta.to(tau.dtype).contiguous() + tau_filtered
    del tau_filtered
    if A is not None:
        begin = clock(tau.device)
        A, B, losses = SOLVERS[config.solver](
            objective, A.to(tau.dtype), config, float64
        )
        seconds = (clock(tau.device) - begin) / len(tau)
        measures["solving_seconds"] = torch.full_like(tau_norm2, seconds)
        measures["loss_after"] = losses[:, -1]
        weights.baddbmm_(tau @ B if Q is None else Q @ (tau @ B), A)
    return weights, measures


def measures_of_first(tau: Tensor | LowRank) -> dict[str, Tensor]:
    """Return :data:`MEASURES` of a first task that is taken whole."""
    if isinstance(tau, LowRank):
        _, tau = tau.in_basis()
    task_norm = _norm2(tau).sqrt()
    return {
        **dict.fromkeys(MEASURES, torch.zeros_like(task_norm)),
        "task_norm": task_norm,
    }


def task_vectors(
    task: Tensor | LowRank, base: Tensor, dtype: torch.dtype
) -> Tensor | LowRank:
    r"""Return :math:`\tau` of tasks that are given by their weights, or by the factors
    of it.
    """
    if isinstance(task, LowRank):
        left, right = task.left.to(dtype), task.right.to(dtype)
        return LowRank(left.contiguous(), right.contiguous())
    return difference(task, base, dtype)


def difference(weight: Tensor, base: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the difference of stored weights in a dtype, with the same bits in any
    layout.
    """
    return weight.to(dtype).contiguous() - base.to(dtype).contiguous()


def clock(device: torch.device) -> float:
    """Return the time in seconds, once this thread's work on an accelerator is done.

    The work is that of the thread's CUDA stream; those of other threads go on.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


def _norm2(X: Tensor) -> Tensor:
    """Return the squared Frobenius norms, ``(n,)``."""
    return torch.linalg.vector_norm(X, dim=(-2, -1)).square()


def working_bytes(shape: Sequence[int], itemsize: int, config: FusionConfig) -> int:
    """Return the most bytes that a layer ``(d_o, d_i)`` takes while it is solved, at
    ``itemsize`` an element.
    """
    d_o, d_i = shape
    shorter, longer = sorted(shape)
    ranks = config.ranks(d_i)
    protected = min(ranks.null, shorter)
    block = min(shorter, 2 * protected + 16)
    # The Gram matrix of tau is held twice, once stacked.
    gram = 2 * d_i**2 if d_i <= 2 * d_o else 0
    # While singular vectors are computed, these are theta_0, theta, tau, and tau or
    # tau_merged in float64; then the Gram matrix of the latter with its eigenvectors
    # and the solver's workspace, or the eigenvectors and thin matrices, all in float64,
    # too. Afterwards there is tau P with its temporary.
    solver = max(
        8 * shorter**2,
        2 * shorter**2 + 3 * longer * (block + protected) + 8 * shorter * block,
    )
    subspaces = 5 * d_o * d_i + gram + solver
    # While the adapter is fitted, these are tau, the new weights, and thin matrices: A
    # and B with their gradients and what Adam keeps of them, and V and H.
    columns = protected + min(ranks.task, shorter)
    adapter = (
        2 * d_o * d_i
        + gram
        + d_i * (10 * ranks.lora + 4 * columns)
        + 4 * ranks.lora * (columns + ranks.lora)
    )
    return itemsize * max(subspaces, adapter)


def initial_A(
    name: str, d_i: int, config: FusionConfig, seed: int, step: int
) -> Tensor:
    """Draw A ~ N(0, init_std^2), ``(lora_rank, d_i)``: the same on every device, alone
    or among other layers.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()
    cpu = torch.device("cpu")  # and float32, whatever torch's defaults are
    generator = torch.Generator(cpu).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    size = (config.ranks(d_i).lora, d_i)
    A = torch.randn(size, generator=generator, dtype=torch.float32, device=cpu)
    return A * config.init_std
