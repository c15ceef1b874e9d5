"""Theorem 1 and Corollary 1 hold, over sweeps."""

import math
import sys
from dataclasses import replace

import pytest
import torch

from fusion_bench_nufilt.analysis.subspaces import data_subspace
from fusion_bench_nufilt.analysis.surrogates import (
    check_theorem,
    corollary_bound,
    spectral_norm,
    split_by_data,
)
from fusion_bench_nufilt.core.subspace import top_right_singular_vectors
from tests.analysis.helpers import second_moment
from tests.conftest import REPO

sys.path.insert(0, str(REPO / "benchmarks"))

from theorem import synthetic


@pytest.mark.parametrize("r_v", [4, 6])
@pytest.mark.parametrize("size", [0.0, 1e-3, 0.01, 0.1, 0.3, 0.49, 0.9, 2.0])
def test_no_violation_of_theorem_1(size, r_v):
    for seed in range(5):
        found = check_theorem(*synthetic(seed, size), r_v)
        assert not found.violated
        assert found.zeta_spectral <= found.zeta
        assert (found.zeta < 1) == (size < 0.5)
        assert math.isinf(found.zeta) == (size > 1)


def test_a_violation_would_be_seen(draw):
    T_0, E, V_d = synthetic(0, 0.01)
    unrelated = torch.linalg.qr(draw(32, 4)).Q
    found = check_theorem(T_0, E, V_d, 4)
    assert replace(found, misalignment=1 - float((unrelated.mT @ V_d).square().sum()) / 4).violated


def test_no_violation_of_corollary_1(draw):
    for scale in (0.1, 1.0, 10.0):
        tau, rho = draw(12, 20), scale * draw(12, 20)
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


def test_the_split_leaves_no_data_in_the_rest(draw):
    tau, V_d = draw(6, 10), data_subspace(second_moment(draw(50, 10)), 3)
    T_0, E = split_by_data(tau, V_d)
    assert torch.allclose(T_0 + E, tau)
    assert float((E @ V_d).abs().max()) < 1e-12


def test_the_spectral_norm_is_the_largest_singular_value(draw):
    for shape in ((5, 9), (9, 5)):
        X = draw(*shape)
        assert spectral_norm(X) == pytest.approx(float(torch.linalg.svdvals(X)[0]))
