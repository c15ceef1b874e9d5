"""
One merging step of NUFILT: filter, adapt, fuse. It needs torch alone.

With tau the task vector of the new model, T the merged update so far and V = [V_t, V_p]
the top right singular vectors of both, the data-free objective of the adapter is

    L(A, B) = || R - tau B A V ||_F^2,   R = [tau V_t - (T + tau P) V_t, -tau P V_p].

Its gradients need only G = tau^T tau, H = tau^T R and Y = A V, nothing of height d_o:

    dL/dB = 2 (G B Y Y^T - H Y^T),   dL/dA = 2 (B^T G B Y - B^T H) V^T.

The last columns of R and H vanish unless P = I, since P V_p = 0: they are not stored.
"""

import hashlib
import logging
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Tuple, Union

import torch
from torch import Tensor

from .subspace import gram_matrix, top_right_singular_vectors

log = logging.getLogger(__name__)

Fused = Tuple[str, Tensor, Dict[str, float]]
MEASURES = (
    "task_norm",  # of the task vector, as all norms Frobenius'
    "merged_norm",  # of the merged update before this step
    "protected_rank",  # directions in the filter
    "filtered_share",  # share of the squared task norm that the filter took
    "overlap",  # affinity of the task's subspace to the protected one, in [0, 1]
    "loss_before",  # objective where BA = 0
    "loss_after",
)

# on an accelerator, layers of equal shape are solved together up to this size
STACK_ELEMENTS = 2**24


@dataclass(frozen=True)
class FusionConfig:
    """
    The hyper-parameters of a step, described in :class:`NUFILTMerging`.

    Raises:
        ValueError: a value is out of its range; names it.
    """

    null_rank: int = 128
    lora_rank: int = 64
    task_rank: int = 8
    lr: float = 1e-3
    max_steps: int = 50
    init_std: float = 0.02
    null_space: Union[bool, str] = True
    first_task: str = "paper"

    def __post_init__(self):
        for name in ("null_rank", "lora_rank", "task_rank", "max_steps"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} must be a whole number >= 0, got {value!r}")
        if not (self.lr > 0 and self.init_std >= 0):
            raise ValueError(
                f"lr must be > 0 and init_std >= 0, got {self.lr} and {self.init_std}"
            )
        if self.null_space not in (True, False, "zero"):
            raise ValueError(
                f"null_space must be true, false or zero, got {self.null_space!r}"
            )
        if self.first_task not in ("paper", "release"):
            raise ValueError(
                f"first_task must be paper or release, got {self.first_task!r}"
            )


def fuse_layers(
    pretrained: Mapping[str, Tensor],
    merged: Mapping[str, Tensor],
    task: Mapping[str, Tensor],
    config: FusionConfig,
    *,
    seed: int = 42,
    step: int = 1,
    device: Union[torch.device, str, None] = None,
) -> Iterator[Fused]:
    """
    Merge one more task into every layer.

    Layers are independent of each other. Each is computed in float32 at least, and stored
    back in its own dtype.

    Args:
        pretrained, merged, task: weights (d_o, d_i) of the pretrained model, of the merged
            model so far (the pretrained one before the first task) and of the new model,
            by layer name.
        config: the hyper-parameters.
        seed: seed of the initial A of the adapters.
        step: number of the task in the stream, from 1. The initial A of a layer depends on
            seed, step and the layer's name, and on nothing else.
        device: where to compute; by default where the weights are.

    Yields:
        the name, the new weight and the ``MEASURES`` of each layer.

    Raises:
        ValueError: a layer has no singular vectors; names it.
    """

    where = torch.device(device or next(iter(merged.values())).device)

    def fuse(names: List[str]) -> List[Fused]:
        dtype = torch.promote_types(merged[names[0]].dtype, torch.float32)
        keys = (f"{seed}/{step}/{name}" for name in names)
        drawn = [initial_A(key, merged[names[0]].shape[1], config) for key in keys]
        stacks = [
            torch.stack([each.detach().to(where, dtype) for each in weights])
            for weights in (
                *([layers[name] for name in names] for layers in models),
                drawn,
            )
        ]
        new, measures = fuse_stack(*stacks, config, names)
        return [
            (
                name,
                weight.to(merged[name].device, merged[name].dtype),
                {key: value[i].item() for key, value in measures.items()},
            )
            for i, (name, weight) in enumerate(zip(names, new))
        ]

    models = (pretrained, merged, task)
    for fused in side_by_side(fuse, stacks_of_layers(pretrained, merged, where), where):
        yield from fused


def stacks_of_layers(
    pretrained: Mapping[str, Tensor], merged: Mapping[str, Tensor], where: torch.device
) -> List[List[str]]:
    """Return the layers to solve together: on an accelerator, those of a kind."""
    kinds = defaultdict(list)
    for name, weight in merged.items():
        fresh = torch.equal(weight, pretrained[name])
        kinds[weight.shape, weight.dtype, fresh].append(name)
    stacks = []
    for (shape, *_), names in kinds.items():
        size = 1 if where.type == "cpu" else max(1, STACK_ELEMENTS // shape.numel())
        stacks += [names[i : i + size] for i in range(0, len(names), size)]
    return stacks


def initial_A(key: str, d_i: int, config: FusionConfig) -> Tensor:
    """Draw A ~ N(0, init_std^2), the same on every device."""
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator("cpu").manual_seed(
        int.from_bytes(digest[:8], "big") >> 1
    )
    size = (config.lora_rank, d_i)
    A = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")
    return A * config.init_std


def fuse_stack(
    theta_0: Tensor,
    theta: Tensor,
    theta_t: Tensor,
    A: Tensor,
    config: FusionConfig,
    names: List[str],
) -> Tuple[Tensor, Dict[str, Tensor]]:
    """Call :func:`filter_and_adapt`, in float64 on the CPU if singular vectors fail."""
    for exact in (False, True):
        try:
            return filter_and_adapt(theta_0, theta, theta_t, A, config, exact)
        except torch.linalg.LinAlgError as error:
            failure = error
            log.warning("layers %s: %s: float64 takes over", names, error)
    raise ValueError(f"layers {names}: no singular vectors: {failure}") from failure


@torch.no_grad()
def filter_and_adapt(
    theta_0: Tensor,
    theta: Tensor,
    theta_t: Tensor,
    A: Tensor,
    config: FusionConfig,
    exact: bool = False,
) -> Tuple[Tensor, Dict[str, Tensor]]:
    """
    Return W + tau (P + B A), and the measures that :func:`fuse_layers` describes.

    Args:
        theta_0, theta, theta_t: the pretrained, merged and new weights (n, d_o, d_i) of n
            layers of equal shape, in all or none of which something is merged so far.
        A: the initial A (n, lora_rank, d_i).
        config: the hyper-parameters.
        exact: compute singular vectors in float64.
    """
    tau, tau_merged = theta_t - theta_0, theta - theta_0
    n, d_o, d_i = tau.shape
    tau_norm2 = norm2(tau)
    measures = dict.fromkeys(MEASURES, torch.zeros_like(tau_norm2))
    measures["task_norm"] = tau_norm2.sqrt()
    measures["merged_norm"] = norm2(tau_merged).sqrt()
    fresh = not tau_merged.any()
    if fresh and config.first_task == "paper":
        return theta_t, measures

    # G, where products with it are cheaper than two with tau
    G = gram_matrix(tau) if d_i <= 2 * d_o else None
    V_t = top_right_singular_vectors(tau, config.task_rank, G, exact)
    if fresh:  # of a zero matrix, the authors' released run takes unit vectors
        rank = min(config.null_rank, d_o, d_i)
        V_p = torch.eye(d_i, rank, dtype=tau.dtype, device=tau.device).expand(n, -1, -1)
    else:
        V_p = top_right_singular_vectors(tau_merged, config.null_rank, None, exact)
    if config.null_space == "zero":
        tau_P = torch.zeros_like(tau)
    else:
        tau_P = tau - (tau @ V_p) @ V_p.mT if config.null_space else tau

    R = -(tau_merged @ V_t)
    if config.null_space is False:
        R = torch.cat([R, -(tau @ V_p)], dim=-1)
    else:
        R += tau @ V_t - tau_P @ V_t
    V, H, loss = torch.cat([V_t, V_p], dim=-1), tau.mT @ R, R.square().sum(dim=(-2, -1))

    kept = norm2(tau_P) / tau_norm2.clamp_min(torch.finfo(tau.dtype).tiny)
    measures["filtered_share"] = torch.where(tau_norm2 > 0, 1 - kept, 0).clamp_min(0)
    measures["protected_rank"] = norm2(V_p).round()
    measures["overlap"] = norm2(V_p.mT @ V_t) / norm2(V_t).round().clamp_min(1)
    measures["loss_before"] = measures["loss_after"] = loss

    weight = theta + tau_P
    if config.lora_rank > 0 and config.task_rank > 0 and not fresh:
        A, B, loss = fit_adapter(tau, G, V, H, loss, A, config.lr, config.max_steps)
        measures["loss_after"] = loss
        weight.baddbmm_(tau @ B, A)
    return weight, measures


def norm2(X: Tensor) -> Tensor:
    """Return the squared Frobenius norms (n,)."""
    return torch.linalg.vector_norm(X, dim=(-2, -1)).square()


def fit_adapter(
    tau: Tensor,
    G: Optional[Tensor],
    V: Tensor,
    H: Tensor,
    loss_before: Tensor,
    A: Tensor,
    lr: float,
    max_steps: int,
) -> Tuple[Tensor, Tensor, Tensor]:
    """
    Minimise the objective by full-batch Adam from (A, B = 0).

    Stopping before convergence is part of the method. See the head of this file for the
    arguments; ``loss_before`` is ||R||^2.

    Returns:
        Tuple[Tensor, Tensor, Tensor]: A (n, r_l, d_i), B (n, d_i, r_l), and the losses.
    """
    (n, r_l, d_i), h = A.shape, H.shape[-1]
    # one product gives G B and H^T B
    GH = None if G is None else torch.cat([G, H.mT], dim=-2)
    A, B = A.clone(), A.new_zeros(n, d_i, r_l)
    A.grad, B.grad = torch.empty_like(A), torch.empty_like(B)
    adam = torch.optim.Adam([A, B], lr=lr, fused=True)
    for step in range(max_steps + 1):
        if GH is None:
            GB, HtB = tau.mT @ (tau @ B), H.mT @ B
        else:
            GB, HtB = (GH @ B).split([d_i, h], dim=-2)
        Y = A @ V
        YYt, BtGB = Y @ Y.mT, B.mT @ GB
        if step == max_steps:
            break
        torch.bmm(GB, YYt, out=B.grad)
        B.grad.baddbmm_(H, Y[..., :h].mT, beta=2, alpha=-2)
        E = BtGB @ Y
        E[..., :h] -= HtB.mT
        torch.baddbmm(A.grad, E, V.mT, beta=0, alpha=2, out=A.grad)
        adam.step()
    cross = (HtB.mT * Y[..., :h]).sum(dim=(-2, -1))
    return A, B, loss_before - 2 * cross + (BtGB * YYt).sum(dim=(-2, -1))


def side_by_side(
    function: Callable, items: List[List[str]], device: torch.device
) -> Iterator[List[Fused]]:
    """
    Yield the results in order.

    On a CPU, each of torch's threads takes a stack and does its mathematics alone. That is
    faster than parallel mathematics on one layer, since eigenvalue solvers hardly scale,
    and the result does not depend on the number of threads, to the last bit.
    """
    threads = torch.get_num_threads()
    if threads == 1 or device.type != "cpu":
        yield from map(function, items)
        return

    def single_threaded():
        torch.get_num_threads()  # the first call takes over the process's number
        torch.set_num_threads(1)

    pool, ahead = ThreadPoolExecutor(threads, initializer=single_threaded), deque()
    try:
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > 2 * threads:  # finished results wait in memory
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
