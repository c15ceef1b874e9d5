r"""Surrogates of stability and plasticity (paper, Section 3.3), and their data-free counterparts.

The data enter only through the uncentred second moment :math:`C = \frac1N \sum_n x_n x_n^\top` of a
layer's inputs: once it is recorded, no data is needed.
"""

import torch
from torch import Tensor


def mean_square(D: Tensor, C: Tensor) -> Tensor:
    r"""Return :math:`E\|D x\|^2 = \operatorname{tr}(D C D^\top)`, ``(...)``, for D ``(..., d_o,
    d_i)`` and C of x.
    """
    return ((D @ C) * D).sum(dim=(-2, -1)).clamp_min(0)  # a negative value is rounding error


def layer_losses(
    W_new: Tensor, W_old: Tensor, W_task: Tensor, C_old: Tensor | None, C_task: Tensor
) -> dict[str, float | None]:
    r"""Return both surrogates of a layer for inputs with given second moments. Lower is better.

    They are ``stability``, :math:`E_{x\sim\text{old tasks}} \|(W_m(t) - W_m(t-1)) x\|^2`, and
    ``plasticity``, :math:`E_{x\sim\text{task }t} \|(W_m(t) - W_t) x\|^2`; the relative ones are
    over :math:`E \|W_m(t-1) x\|^2` and :math:`E \|W_t x\|^2`. Stability is None without old tasks,
    and a relative loss where all outputs are zero.
    """
    names = ("stability", "plasticity", "relative_stability", "relative_plasticity")
    losses: dict[str, float | None] = dict.fromkeys(names)
    for name, W, C in (("stability", W_old, C_old), ("plasticity", W_task, C_task)):
        if C is None:
            continue
        loss = float(mean_square(W_new - W, C))
        size = float(mean_square(W, C))
        losses[name] = loss
        if size != 0:
            losses[f"relative_{name}"] = loss / size
    return losses


def harmonic_mean(a: float, b: float) -> float:
    """Return 2ab / (a + b), or 0 if both are 0."""
    return 2 * a * b / (a + b) if a + b else 0.0


def data_free_losses(
    tau_new: Tensor, tau_old: Tensor, tau_task: Tensor, V_p: Tensor, V_t: Tensor
) -> tuple[float, float]:
    r"""Return the method's own surrogates :math:`\|(\tilde\tau_t - \tilde\tau_{t-1}) V_p\|_F^2` and
    :math:`\|(\tilde\tau_t - \tau_t) V_t\|_F^2` (Section 4.2): stability and plasticity without
    data.

    The updates of the merged model after the step and before it, and the new task vector, are
    ``(d_o, d_i)``; V_p ``(d_i, r_p)`` and V_t ``(d_i, r_v)`` are top right singular vectors of the
    last two.
    """

    def loss(D: Tensor, V: Tensor) -> float:
        inside = float((D @ V).square().sum())
        # Squares have the rounding error of their roots, squared; a sum of d_i products has more.
        rounding_error = D.shape[-1] * torch.finfo(D.dtype).eps ** 2 * float(D.square().sum())
        # What lies within the rounding error of D is no loss.
        return inside if inside > rounding_error else 0.0

    return loss(tau_new - tau_old, V_p), loss(tau_new - tau_task, V_t)
