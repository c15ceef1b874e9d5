r"""Compare both sides of the paper's two bounds on layers that are drawn at random.

    python examples/paper_bounds.py --rank 4

Theorem 1 (Section 3.4) bounds how far the leading directions of a task vector miss those of its
data, and Corollary 1 (Section 4.2) the loss of a layer by what a merge changes outside of them.
"""

import argparse
import math

import torch
from torch import Tensor

from fusion_bench_nufilt.analysis.surrogates import mean_square
from fusion_bench_nufilt.nufilt.subspace import subspace_affinity, top_right_singular_vectors


def theorem_bound(T_0: Tensor, E: Tensor, V_d: Tensor) -> float:
    r"""Return the bound :math:`\zeta^2` on the misalignment 1 - A (Theorem 1).

    The task vector is :math:`\tau = T_0 + E`, ``(d_o, d_i)``; V_d, ``(d_i, r_d)``, spans the row
    space of T_0. A is the affinity of V_d and the top r_v >= r_d right singular vectors of tau. E
    is measured by :math:`\sqrt{d_o} \max_k \Psi_k`. The bound is infinite where the theorem's
    condition does not hold.
    """
    d_o = T_0.shape[0]
    r_d = V_d.shape[1]
    sigma = float(torch.linalg.svdvals(T_0 @ V_d)[r_d - 1])
    error = math.sqrt(d_o) * float(torch.linalg.vector_norm(E, dim=1).max())
    return (error / (sigma - error)) ** 2 if sigma > error else math.inf


def corollary_bound(D: Tensor, C: Tensor, V_hat: Tensor) -> tuple[float, float]:
    r"""Return both sides of Corollary 1, divided by the number of inputs, for
    :math:`D = \rho - \tau`, ``(d_o, d_i)``, C ``(d_i, d_i)`` and V_hat ``(d_i, r_v)``.

    .. math:: \operatorname{tr}(D C D^\top)
        \le 2 \lambda_{\max}(C) \|D \hat V\|_F^2
        + 2 \|D\|_2^2 \operatorname{tr}((I - \hat V \hat V^\top) C)

    The second term is what the proof needs where the paper has
    :math:`2 \sigma_1(X)^2 r_d \zeta^2 \|D\|_2^2`, and is finite where the theorem's condition
    fails.
    """
    outside = C.trace() - ((C @ V_hat) * V_hat).sum()
    inside_term = 2 * torch.linalg.eigvalsh(C)[-1] * (D @ V_hat).square().sum()
    outside_term = 2 * torch.linalg.matrix_norm(D, 2) ** 2 * outside.clamp_min(0)
    return float(mean_square(D, C)), float(inside_term + outside_term)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rank", type=int, default=4, help="of the data")
    r_d = parser.parse_args().rank
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    d_o, d_i = 24, 32
    print("size of E   misalignment     Theorem 1           loss   Corollary 1")
    for size in (0.0, 0.01, 0.1, 0.3, 0.9, 2.0):
        X = draw(40, r_d) @ draw(r_d, d_i)
        T_0 = draw(d_o, 40) @ X
        sigma = torch.linalg.svdvals(T_0)[r_d - 1]
        E = torch.nn.functional.normalize(draw(d_o, d_i), dim=1)
        E *= size * sigma / math.sqrt(d_o)
        V_d = torch.linalg.svd(X, full_matrices=False).Vh[:r_d].mT
        V_hat = top_right_singular_vectors(T_0 + E, r_d)
        misalignment = 1 - float(subspace_affinity(V_d, V_hat))
        rho = draw(d_o, d_i)
        loss, bound = corollary_bound(rho - T_0 - E, X.mT @ X / len(X), V_hat)
        zeta = theorem_bound(T_0, E, V_d)
        print(f"{size:9.2f} {misalignment:14.2e} {zeta:13.2e} {loss:14.2e} {bound:13.2e}")


if __name__ == "__main__":
    main()
