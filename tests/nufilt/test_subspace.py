"""Singular subspaces are those of a full SVD, and laws of the projector P = I - V_p V_p^T."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion_bench_nufilt.nufilt.bases import top_eigenvectors
from fusion_bench_nufilt.nufilt.eigenvectors import _block_iteration, gram_matrix
from fusion_bench_nufilt.nufilt.noise import Noise, above_noise
from fusion_bench_nufilt.nufilt.subspace import (
    null_space_filter,
    subspace_affinity,
    top_right_singular_vectors,
)
from tests.nufilt.matrices import matrix_with_spectrum, orthonormal, random_layer
from tests.pairs import pairs

sizes = st.integers(1, 24)
layers = st.builds(random_layer, sizes, sizes, st.integers(0, 2**16))


def projector(V):
    return V @ V.mT


@given(d_o=sizes, d_i=sizes, rank=st.integers(0, 30), seed=st.integers(0, 2**16))
def test_spans_what_a_full_svd_spans(d_o, d_i, rank, seed):
    spectrum = 0.8 ** torch.arange(min(d_o, d_i), dtype=torch.float64)
    tau = matrix_with_spectrum(d_o, d_i, spectrum, seed)
    V = top_right_singular_vectors(tau, rank)
    kept = min(rank, d_o, d_i)
    expected = torch.linalg.svd(tau, full_matrices=False).Vh[:kept].mT
    assert V.shape == (d_i, kept)
    torch.testing.assert_close(projector(V), projector(expected), rtol=0, atol=1e-9)


@given(d_o=sizes, d_i=sizes, true_rank=st.integers(0, 12), seed=st.integers(0, 2**16))
def test_a_deficient_matrix_spans_what_it_has_and_no_more(d_o, d_i, true_rank, seed):
    true_rank = min(true_rank, d_o, d_i)
    spectrum = torch.zeros(min(d_o, d_i), dtype=torch.float64)
    spectrum[:true_rank] = torch.linspace(2, 1, true_rank, dtype=torch.float64)
    tau = matrix_with_spectrum(d_o, d_i, spectrum, seed)
    V = top_right_singular_vectors(tau, min(d_o, d_i))
    assert projector(V).trace().item() == pytest.approx(true_rank, abs=1e-9)
    torch.testing.assert_close(tau @ projector(V), tau, rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(40, 24), (24, 40)])
def test_a_cluster_of_equal_singular_values_is_taken_whole(shape):
    spectrum = torch.cat([torch.full((6,), 3.0), torch.full((10,), 1.0), torch.zeros(8)]).double()
    tau = matrix_with_spectrum(*shape, spectrum, seed=0)
    for rank in (6, 16):
        expected = torch.linalg.svd(tau, full_matrices=False).Vh[:rank].mT
        actual = top_right_singular_vectors(tau, rank)
        torch.testing.assert_close(projector(actual), projector(expected), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("shape", "decay"),
    [((150, 100), 0.7), ((100, 150), 0.1), ((400, 400), 1.0), ((400, 400), 0.1)],
)
def test_float32_filters_as_an_exact_svd_does_on_spectra_of_task_vectors(shape, decay):
    """Two tasks of singular values k^-decay: in float32 the filtered part is off by less than 1e-5
    of the norm.
    """
    spectrum = torch.arange(1, min(shape) + 1, dtype=torch.float64) ** -decay
    tau = sum(matrix_with_spectrum(*shape, spectrum, seed) for seed in (1, 2)).float()
    other = matrix_with_spectrum(*shape, spectrum, seed=3)
    rank = 25  # by the full solver, and by block iteration
    expected = torch.linalg.svd(tau.double(), full_matrices=False).Vh[:rank].mT
    actual = top_right_singular_vectors(tau, rank).double()
    error = other @ (projector(actual) - projector(expected))
    assert error.norm() < 1e-5 * other.norm()


def test_the_flat_tail_of_a_language_model_s_spectrum_needs_no_float64():
    steep = torch.arange(1, 65, dtype=torch.float64) ** -0.75
    flat = torch.linspace(0.022, 0.018, 512).double()
    tau = matrix_with_spectrum(576, 576, torch.cat([steep, flat]), seed=1)
    expected = torch.linalg.svd(tau).Vh[:192].mT
    actual = top_right_singular_vectors(tau.float(), 192).double()
    assert (tau @ (projector(actual) - projector(expected))).norm() < 1e-5 * tau.norm()


def test_a_spectrum_too_steep_for_float32_is_decomposed_in_float64():
    tau = matrix_with_spectrum(
        200, 200, torch.arange(1, 201, dtype=torch.float64) ** -2.0, seed=1
    ).float()
    easy = torch.randn(200, 200, generator=torch.Generator().manual_seed(0))
    in_a_stack = top_right_singular_vectors(torch.stack([easy, tau]), 100)[1]
    expected = torch.linalg.svd(tau.double()).Vh[:100].mT
    for actual in (top_right_singular_vectors(tau, 100), in_a_stack):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(
            projector(actual.double()), projector(expected), rtol=0, atol=1e-6
        )


def test_the_numerical_rank_is_that_of_the_stored_precision():
    """Rounding to float32 makes a matrix of rank 5 one of full rank; that is not protected, in
    float64 either.
    """
    tau = matrix_with_spectrum(60, 40, torch.linspace(2, 1, 5).double(), seed=0).float()
    for float64 in (False, True):
        V = top_right_singular_vectors(tau, 20, float64=float64)
        assert projector(V).trace().item() == pytest.approx(5, abs=1e-4)


@pytest.mark.parametrize(
    ("shape", "decay", "dtype"),
    pairs([(320, 300), (300, 320)], [0.05, 0.7, 2.0], [torch.float32, torch.float64]),
)
def test_a_few_vectors_of_a_large_matrix_are_as_good_as_a_full_solver_s(shape, decay, dtype):
    """They come from block iteration; both are off by a few roundings of the largest over the
    gap.
    """
    spectrum = torch.arange(1, 301, dtype=torch.float64) ** -decay
    tau = matrix_with_spectrum(*shape, spectrum, seed=2).to(dtype)
    assert _block_iteration(gram_matrix(tau), 8) is not None
    expected = torch.linalg.svd(tau.double(), full_matrices=False).Vh[:8].mT
    actual = top_right_singular_vectors(tau, 8).double()
    gap = (spectrum[7] ** 2 - spectrum[8] ** 2) / spectrum[0] ** 2
    error = torch.linalg.matrix_norm(projector(actual) - projector(expected), 2)
    assert error < 30 * torch.finfo(dtype).eps / gap


def test_block_iteration_does_not_overflow_on_a_few_values_far_above_the_others():
    spectrum = 0.81 ** torch.arange(100, dtype=torch.float64)
    tau = matrix_with_spectrum(280, 280, spectrum, seed=8).float()
    expected = torch.linalg.svd(tau.double()).Vh[:4].mT
    actual = top_right_singular_vectors(tau, 4).double()
    torch.testing.assert_close(projector(actual), projector(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("high", "low"), [(3, 20), (20, 3), (8, 200)])
def test_block_iteration_takes_clusters_and_ranks_below_the_block(high, low):
    spectrum = torch.tensor([1.0] * high + [0.5] * low, dtype=torch.float64)
    tau = matrix_with_spectrum(300, 300, spectrum, seed=4)
    V = top_right_singular_vectors(tau, 8)
    sigma = torch.linalg.vector_norm(tau @ V, dim=0)
    assert sigma.tolist() == pytest.approx([1.0] * min(8, high) + [0.5] * (8 - high))
    torch.testing.assert_close(V.mT @ V, torch.eye(8, dtype=torch.float64), rtol=0, atol=1e-12)


def test_where_block_iteration_does_not_converge_the_full_solver_steps_in(monkeypatch):
    gram = torch.diag(torch.linspace(1, 0.999999, 400, dtype=torch.float64))
    assert _block_iteration(gram, 8, max_products=3) is None
    monkeypatch.setattr(
        "fusion_bench_nufilt.nufilt.eigenvectors._block_iteration", lambda *args: None
    )
    expected = torch.eye(400, dtype=torch.float64)[:, :8]
    torch.testing.assert_close(top_eigenvectors(gram, 8).abs(), expected, rtol=0, atol=1e-9)


def test_a_gram_matrix_by_blocks_is_the_product():
    matrix = matrix_with_spectrum(11, 20, torch.linspace(2, 1, 11).double(), seed=5)
    for width in (1, 7, 8, 20):
        X = matrix[:, :width].expand(3, -1, -1)
        torch.testing.assert_close(gram_matrix(X, block=8), X.mT @ X)


def test_a_zero_matrix_spans_nothing_and_leaves_the_others_of_a_stack_as_they_are():
    assert top_right_singular_vectors(torch.zeros(5, 4), 3).abs().max() == 0
    tau = matrix_with_spectrum(300, 300, torch.arange(1, 301).double() ** -0.3, seed=7)
    V = top_right_singular_vectors(torch.stack([torch.zeros_like(tau), tau]), 8)
    assert V[0].abs().max() == 0
    alone = top_right_singular_vectors(tau, 8)
    torch.testing.assert_close(projector(V[1]), projector(alone), rtol=0, atol=1e-9)


@given(d=st.integers(2, 16), r=st.integers(1, 8), s=st.integers(1, 8), seed=st.integers(0, 2**16))
def test_affinity_lies_between_zero_and_one_and_is_one_inside(d, r, s, seed):
    generator = torch.Generator().manual_seed(seed)
    V = orthonormal(d, min(r, d), generator)
    W = orthonormal(d, min(s, d), generator)
    assert -1e-12 <= subspace_affinity(V, W) <= 1 + 1e-12
    assert subspace_affinity(V[:, :1], V).item() == pytest.approx(1)
    complement = torch.linalg.svd(V.mT).Vh[V.shape[1] :].mT
    assert subspace_affinity(V, complement).item() == pytest.approx(0, abs=1e-12)


# --- the filter ---


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@given(layers, st.integers(0, 24))
def test_filtering_is_tau_times_p_and_filtering_twice_changes_nothing(layer, rank):
    theta_0, theta, theta_t = layer
    tau = theta_t - theta_0
    V_p = top_right_singular_vectors(theta - theta_0, rank)
    filtered = null_space_filter(tau, V_p)
    close(filtered, tau @ (torch.eye(tau.shape[1], dtype=tau.dtype) - V_p @ V_p.mT))
    close(null_space_filter(filtered, V_p), filtered)
    assert filtered.norm() <= tau.norm() * (1 + 1e-12)


@pytest.mark.parametrize(
    ("shape", "power"), [((512, 512), 3), ((768, 256), 2), ((256, 768), 1)], ids=str
)
def test_the_basis_is_orthonormal_however_steeply_the_spectrum_falls(shape, power):
    spectrum = torch.arange(1, min(shape) + 1, dtype=torch.float64) ** -power
    tau = matrix_with_spectrum(*shape, spectrum, seed=1)
    for X, rank, tolerance in ((tau.float(), 8, 1e-5), (tau, 8, 1e-13), (tau, 128, 1e-12)):
        V = top_right_singular_vectors(X, rank).double()
        identity = torch.eye(rank, dtype=torch.float64)
        assert torch.linalg.matrix_norm(V.mT @ V - identity, 2) < tolerance


def test_the_strongest_direction_is_one_however_large_noise_may_be():
    squares = torch.ones(2, 4, dtype=torch.float64)
    energy = torch.tensor([8.0, 8.0], dtype=torch.float64)
    noise = Noise(energy, energy / 2)
    stronger = above_noise(squares, energy, noise, 8, 8)
    assert stronger.tolist() == 2 * [[True, False, False, False]]
    none = above_noise(0 * squares, 0 * energy, noise, 8, 8)
    assert not none.any()
