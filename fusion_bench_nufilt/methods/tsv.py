"""TSV-M as a stream: of T tasks each keeps a T-th of the directions."""

import torch
from torch import Tensor

from fusion_bench_nufilt.core.subspace import gram_matrix

from .base import State
from .order_free import FAINTEST, Scaled, map_spectrum


class TsvStream(Scaled):
    r"""Task singular vectors (Gargiulo et al., CVPR 2025), of the tasks that have arrived.

    With ``k = min(d_o, d_i)``, each of T tasks keeps its k // T leading directions, and
    :math:`X = \lambda\, \mathrm{polar}([U_1 \dots U_T])\, \mathrm{diag}(s)\, \mathrm{polar}([V_1 \dots V_T])^\top`.
    A new task cuts those of all earlier ones, so that the state, ``left`` ``(d_o, k)``, ``values`` ``(k,)`` and
    ``right`` ``(d_i, k)``, has the size of two models; its columns beyond T (k // T) are zero.
    """

    name = "tsv_stream"
    label = "TSV-M (stream)"
    citation = "TSV-M ([Gargiulo et al., CVPR 2025](https://arxiv.org/abs/2412.00081)), one task after another"

    def sums(self, d_o: int, d_i: int) -> dict[str, tuple[int, ...]]:
        k = min(d_o, d_i)
        return {"left": (d_o, k), "values": (k,), "right": (d_i, k)}

    def gather(self, state: State, tau: Tensor) -> State:
        tasks, k = int(state["count"]), min(tau.shape)
        share, kept = k // tasks, dict(state)
        U, s, V = leading_directions(tau, share)
        for name, new in (("left", U), ("values", s), ("right", V)):
            earlier = tasks - 1
            old = state[name][..., : earlier * (k // max(earlier, 1))]
            cut = old.unflatten(-1, (earlier, -1))[..., :share].flatten(-2) if earlier else old
            kept[name] = torch.zeros_like(state[name])
            kept[name][..., : tasks * share] = torch.cat([cut, new], dim=-1)
        return kept

    def update(self, state: State, scale: float) -> Tensor:
        return scale * polar_factor(state["left"]) * state["values"] @ polar_factor(state["right"]).mT


def leading_directions(tau: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ``count`` largest singular values with left ``(d_o, count)`` and right ``(d_i, count)`` vectors."""
    if tau.shape[0] < tau.shape[1]:
        V, s, U = leading_directions(tau.mT, count)
        return U, s, V
    V = torch.linalg.eigh(gram_matrix(tau)).eigenvectors.flip(-1)[:, :count]
    U = tau @ V
    s = torch.linalg.vector_norm(U, dim=0)
    return torch.where(s > FAINTEST * s[:1], U / s, 0), s, V


def polar_factor(A: Tensor) -> Tensor:
    r"""Return :math:`U V^\top` of :math:`A = U \sigma V^\top`, ``(d, m)``."""
    return map_spectrum(A, torch.ones_like)
