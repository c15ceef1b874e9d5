"""Task vectors and their affinity with data: ranges, chance level, summaries."""

import numpy as np
import pytest
import torch

from fusion_bench_nufilt.analysis import subspaces
from fusion_bench_nufilt.analysis.subspaces import (
    VectorSummary,
    data_subspace,
    dominance,
    overlap,
    task_vector,
)
from fusion_bench_nufilt.nufilt.subspace import subspace_affinity, top_right_singular_vectors
from tests.analysis.helpers import second_moment


def basis(draw, width, rank):
    return torch.linalg.qr(draw(width, rank)).Q


def projector(V):
    return V @ V.mT


def test_a_task_vector_made_of_its_data_has_affinity_one(draw):
    X = draw(100, 3) @ draw(3, 20)
    tau = draw(10, 100) @ X
    V_d = data_subspace(second_moment(X), 3)
    assert float(subspace_affinity(V_d, top_right_singular_vectors(tau, 3))) == pytest.approx(1)
    assert float(
        subspace_affinity(V_d[:, :1], top_right_singular_vectors(tau, 3))
    ) == pytest.approx(1)


def test_random_subspaces_meet_at_chance(draw):
    for r_d, r_v in ((1, 8), (8, 8), (4, 16)):
        values = [
            float(subspace_affinity(basis(draw, 64, r_d), basis(draw, 64, r_v))) for _ in range(200)
        ]
        assert np.mean(values) == pytest.approx(r_v / 64, rel=0.15)


def test_the_curve_over_ranks_is_the_affinity_at_each(draw):
    V = basis(draw, 16, 8)
    W = basis(draw, 16, 8)
    curve = subspaces.affinity_by_rank(V, W, [1, 4, 8])
    expected = [float(subspace_affinity(V[:, :rank], W[:, :rank])) for rank in (1, 4, 8)]
    assert curve.tolist() == pytest.approx(expected)


def test_the_curve_over_ranks_counts_the_directions_that_there_are(draw):
    """As the affinity at one rank does: three inputs span three directions."""
    V_d = data_subspace(second_moment(draw(3, 20)), 8)
    curve = subspaces.affinity_by_rank(V_d, torch.eye(20, dtype=V_d.dtype), [3, 8])
    assert curve[1] == pytest.approx(
        float(subspace_affinity(V_d, torch.eye(20, dtype=V_d.dtype)[:, :8]))
    )


def test_few_inputs_span_no_more_directions_than_they_are(draw):
    V_d = data_subspace(second_moment(draw(3, 20)), 8)
    assert V_d.square().sum(dim=0).round().tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


def test_dominance_counts_rows_columns_and_layers():
    A = np.array([[[0.9, 0.2], [0.1, 0.8]], [[0.3, 0.5], [0.1, 0.7]]])
    found = dominance(A)
    assert found["diagonal"] == pytest.approx(0.675)
    assert found["off_diagonal"] == pytest.approx(0.225)
    assert (found["rows"], found["columns"]) == (2, 2)
    # In the second layer 0.3 < 0.5 in the first row.
    assert found["matched_above"] == pytest.approx(7 / 8)
    assert dominance(A[1:])["rows"] == 1


def test_a_task_vector_tells_rank_energy_and_overlap(draw):
    U = basis(draw, 24, 4)
    V = basis(draw, 16, 4)
    tau = U @ torch.diag(torch.tensor([4.0, 2.0, 1.0, 0.0], dtype=torch.float64)) @ V.mT
    for matrix, right in ((tau, V), (tau.mT, U)):  # tall and wide
        found = task_vector(matrix, 4)
        assert found.norm == pytest.approx(21**0.5)
        assert found.energy.tolist() == pytest.approx([16 / 21, 4 / 21, 1 / 21, 0])
        assert found.effective_rank == pytest.approx(21 / 16)
        assert (found.rank_for(0.7), found.rank_for(0.9), found.rank_for(1.0)) == (1, 2, 3)
        assert task_vector(matrix, 1).rank_for(0.9) is None
        assert torch.allclose(projector(found.V[:, :3]), projector(right[:, :3]))
    whole = task_vector(tau, 4)
    one = task_vector(U[:, :1] @ V[:, :1].mT, 4)
    assert overlap(whole, one, 4) == overlap(one, whole, 4) == pytest.approx(1)


def test_a_rank_has_the_digits_of_the_energies():
    missing = 1e-7
    energy = torch.tensor([0.9 - missing, 0.1 + missing], dtype=torch.float64)
    vector = VectorSummary(torch.eye(2).double(), 1.0, energy, 2, 1.0)
    assert vector.rank_for(0.9) == 2
    thirds = torch.full((3,), 1 / 3)  # in float32
    assert VectorSummary(torch.eye(3), 1.0, thirds, 3, 3.0).rank_for(2 / 3) == 2


def test_a_task_vector_of_zeros_has_nothing():
    zero = torch.zeros(6, 4)
    found = task_vector(zero, 2)
    assert (found.norm, found.effective_rank, found.rank_for(0.9)) == (0, 0, None)
    assert overlap(found, found, 2) == 0


def test_block_iteration_agrees_with_the_direct_solver(draw, monkeypatch):
    U = basis(draw, 300, 200).float()
    V = basis(draw, 260, 200).float()
    tau = U * torch.arange(1, 201) ** -0.5 @ V.mT
    direct = task_vector(tau, 8)
    monkeypatch.setattr(subspaces, "_LARGEST_GRAM", 0)
    iterated = task_vector(tau, 8)
    assert torch.allclose(iterated.energy, direct.energy, rtol=1e-3)
    assert overlap(iterated, direct, 8) > 0.999
