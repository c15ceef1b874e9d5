"""One step of NUFILT on one layer; the mathematics is in ``step.py``."""

from functools import partial
from typing import Dict, Tuple

import torch
from torch import Tensor

from .adapter import fit_adapter
from .config import StepConfig
from .noise import rounding_of
from .step import difference, fuse_stack, initial_A, measures_of_first


@torch.no_grad()
def fuse_layer(
    name: str,
    theta_0: Tensor,
    theta: Tensor,
    theta_t: Tensor,
    config: StepConfig,
    seed: int = 42,
    step: int = 1,
) -> Tuple[Tensor, Dict[str, float]]:
    """
    Merge one more task into a layer, in float32 at least.

    Args:
        name: of the layer. The initial A depends on seed, step and name alone.
        theta_0, theta, theta_t: the pretrained, merged and new weight (d_o, d_i); the
            merged one is the pretrained one before the first task.
        config: the hyper-parameters.
        seed: seed of the initial A of the adapters.
        step: number of the task in the stream, from 1.

    Returns:
        the new weight, in its own dtype, and ``MEASURES`` by name.

    Raises:
        ValueError: the layer has no singular vectors; names it.
    """
    is_first_task = torch.equal(theta, theta_0)
    theta_0, theta, theta_t = theta_0[None], theta[None], theta_t[None]  # a stack
    tau = difference(theta_t, theta_0, torch.promote_types(theta.dtype, torch.float32))
    if is_first_task and config.first_task == "paper":
        weight = theta_t
        measures = measures_of_first(tau)
    else:
        solve = partial(fit_adapter, lr=config.lr, max_steps=config.max_steps)
        # Of the pretrained model as of each task, whose errors add up.
        rounding = rounding_of(theta_t)
        A = None
        if config.has_adapter:
            A = initial_A(name, theta.shape[-1], config, seed, step)[None]
            A = A.to(theta.device)
        try:
            weight, measures = fuse_stack(
                theta_0,
                theta,
                tau,
                A,
                config,
                solve,
                is_first_task=is_first_task,
                float64=False,
                rounding=2 * rounding,
                rounding_before=(step - 1) * step * rounding,
            )
        except torch.linalg.LinAlgError as error:
            text = f"layer '{name}': no singular vectors: {error}"
            raise ValueError(text) from error
    values = {key: value.item() for key, value in measures.items()}
    return weight[0].to(theta.dtype), values
