"""Laws of the null-space projector P = I - V_p V_p^T."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion_bench_nufilt.core.subspace import first_coordinates, null_space_filter, top_right_singular_vectors
from tests.core.matrices import random_layer

sizes = st.integers(1, 20)
layers = st.builds(random_layer, sizes, sizes, st.integers(0, 2**16))
ranks = st.integers(0, 24)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@given(layers, ranks)
def test_filtering_is_tau_times_p_and_filtering_twice_changes_nothing(layer, rank):
    theta_0, theta, theta_t = layer
    tau, V_p = theta_t - theta_0, top_right_singular_vectors(theta - theta_0, rank)
    filtered = null_space_filter(tau, V_p)
    close(filtered, tau @ (torch.eye(tau.shape[1], dtype=tau.dtype) - V_p @ V_p.mT))
    close(null_space_filter(filtered, V_p), filtered)
    assert filtered.norm() <= tau.norm() * (1 + 1e-12)


@given(layers)
def test_a_rank_that_covers_the_whole_update_leaves_the_merged_model_alone_where_it_acts(layer):
    theta_0, theta, theta_t = layer
    tau, tau_merged = theta_t - theta_0, theta - theta_0
    filtered = null_space_filter(tau, top_right_singular_vectors(tau_merged, min(tau.shape)))
    close(filtered @ tau_merged.mT, torch.zeros(tau.shape[0], tau.shape[0], dtype=tau.dtype))


def test_the_released_first_task_drops_the_first_input_coordinates():
    tau = torch.ones(6, 5)
    filtered = null_space_filter(tau, first_coordinates(tau, 2))
    assert torch.equal(filtered, torch.tensor([0.0, 0, 1, 1, 1]).expand(6, 5))
    assert first_coordinates(torch.ones(3, 5), 9).shape == (5, 3)
