"""Theorem 1 and Corollary 1 hold, over sweeps."""

import math

import pytest
import torch

from fusion_bench_nufilt.analysis.bounds import corollary_bound, spectral_norm, theorem_bounds
from fusion_bench_nufilt.nufilt.subspace import subspace_affinity, top_right_singular_vectors
from tests.analysis.helpers import second_moment


def synthetic(draw, size, d_o=24, d_i=32, r_d=4):
    """T_0 of rank r_d, E with rows of length ``size`` * T_0's smallest singular value / sqrt(d_o),
    and V_d.
    """
    data = draw(40, r_d) @ draw(r_d, d_i)
    T_0 = draw(d_o, 40) @ data
    sigma = float(torch.linalg.svdvals(T_0)[r_d - 1])
    E = torch.nn.functional.normalize(draw(d_o, d_i), dim=1) * size * sigma / math.sqrt(d_o)
    return T_0, E, torch.linalg.svd(data, full_matrices=False).Vh[:r_d].mT


@pytest.mark.parametrize("r_v", [4, 6])
@pytest.mark.parametrize("size", [0.0, 1e-3, 0.01, 0.1, 0.3, 0.49, 0.9, 2.0])
def test_no_violation_of_theorem_1(draw, size, r_v):
    for _ in range(5):
        T_0, E, V_d = synthetic(draw, size)
        V_hat = top_right_singular_vectors(T_0 + E, r_v)
        misalignment = 1 - float(subspace_affinity(V_d, V_hat))
        by_rows, by_norm = theorem_bounds(T_0, E, V_d)
        assert misalignment <= by_norm + 1e-12
        assert by_norm <= by_rows
        assert (by_rows < 1) == (size < 0.5)
        assert math.isinf(by_rows) == (size > 1)


def test_no_violation_of_corollary_1(draw):
    for scale in (0.1, 1.0, 10.0):
        tau = draw(12, 20)
        rho = scale * draw(12, 20)
        C = second_moment(draw(60, 20) * torch.logspace(0, -3, 20, dtype=torch.float64))
        for rank in (0, 1, 8, 12):
            left, right = corollary_bound(rho - tau, C, top_right_singular_vectors(tau, rank))
            assert left <= right * (1 + 1e-12)


def test_the_corollary_is_tight_to_a_factor_two_in_one_direction():
    """All inputs along v, D of rank one along v, v inside the subspace: left = lambda ||D v||^2,
    right = twice that.
    """
    v = torch.eye(5, dtype=torch.float64)[:, :1]
    left, right = corollary_bound(3 * v.mT.expand(4, -1), 2 * v @ v.mT, v)
    assert (left, right) == (pytest.approx(72), pytest.approx(144))


def test_the_spectral_norm_is_the_largest_singular_value(draw):
    for shape in ((5, 9), (9, 5)):
        X = draw(*shape)
        assert spectral_norm(X) == pytest.approx(float(torch.linalg.svdvals(X)[0]))
