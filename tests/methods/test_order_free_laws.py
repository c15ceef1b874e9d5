"""Laws that every order-free method obeys."""

import itertools

import pytest
import torch
from fusion_bench.method.task_singular_vector.utils.TSVM_utils import (
    compute_and_sum_svd_mem_reduction,
)

from fusion_bench_nufilt.merge.fuse import matrix_jobs, merge_matrices
from fusion_bench_nufilt.methods import METHODS, ORDER_FREE
from fusion_bench_nufilt.methods.options import ScaleConfig
from fusion_bench_nufilt.methods.spectral import Best, TsvStream
from fusion_bench_nufilt.methods.task_vector import TaskVector
from fusion_bench_nufilt.nufilt import LowRank
from fusion_bench_nufilt.utils.devices import warn_once
from tests.conftest import every_device
from tests.methods.helpers import add, all_of_layers, start, weight
from tests.methods.test_spectral import distance, task_vectors
from tests.nufilt.matrices import matrix_with_spectrum

SHAPES = [(40, 12), (12, 40), (16, 16)]
every_method = pytest.mark.parametrize(
    "kind", [METHODS[name] for name in ORDER_FREE], ids=ORDER_FREE
)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def merge(kind, taus, options=None, dtype=torch.float64):
    """Merge a stream of tasks and return the update of the merged model."""
    method = kind(options or kind.Options(), ["layer"])
    theta_0 = torch.zeros(taus[0].shape, dtype=dtype)
    state = start(method, theta_0)
    for tau in taus:
        if not isinstance(tau, LowRank):
            tau = tau.to(dtype)
        state = add(method, state, theta_0, tau)
    return weight(method, state, theta_0)


@every_method
@every_shape
def test_the_order_of_arrival_does_not_matter(kind, shape):
    taus = task_vectors(shape, count=3)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        results = [merge(kind, order, dtype=dtype) for order in itertools.permutations(taus)]
        assert max(distance(other, results[0]) for other in results) < tolerance


@every_method
@every_device
def test_every_device_gives_the_same_result(kind, device):
    theta_0 = {"layer": torch.zeros(40, 12)}
    taus = task_vectors((40, 12), count=3)
    method = kind(kind.Options(), ["layer"])
    tasks = [{"layer": tau.float()} for tau in taus]
    found = merge_matrices(method, theta_0, tasks, device=device)
    assert found["layer"].device == torch.device("cpu")
    assert distance(found["layer"], merge(kind, taus, dtype=torch.float32)) < 1e-5


@every_method
def test_a_task_that_moves_nothing_changes_nothing(kind):
    taus = task_vectors((12, 10), count=2)
    nothing = torch.zeros(12, 10)
    torch.testing.assert_close(merge(kind, [taus[0], nothing, taus[1]]), merge(kind, taus))
    assert not merge(kind, [nothing]).any()


@every_method
def test_tasks_of_a_few_directions_stay_in_their_span(kind):
    taus = task_vectors((48, 40), count=4, rank=3)
    assert torch.linalg.svdvals(merge(kind, taus, dtype=torch.float32))[12:].max() < 1e-5


@every_method
@pytest.mark.parametrize("shape", [(48, 40), (40, 48)], ids=str)
def test_the_factors_of_a_task_are_as_good_as_its_matrix(kind, shape):
    taus = task_vectors(shape, count=3, rank=4)
    factors = []
    for tau in taus:
        U, s, Vh = torch.linalg.svd(tau)
        factors.append(LowRank(U[:, :4] * s[:4], Vh[:4]))
    assert distance(merge(kind, factors), merge(kind, taus)) < 1e-8
    nothing = LowRank(torch.zeros(shape[0], 4), torch.randn(4, shape[1]))
    assert distance(merge(kind, [*factors, nothing]), merge(kind, taus)) < 1e-8


def test_a_task_of_rank_r_has_r_directions_whatever_the_eigensolver_returns_for_its_null_space(
    monkeypatch,
):
    taus = task_vectors((48, 40), count=2, rank=18)  # of the 20 that each may have
    svds = [torch.linalg.svd(tau, full_matrices=False) for tau in taus]
    expected = tsv_by_svd(svds, directions=18)
    eigh = torch.linalg.eigh

    def with_another_null_space(gram):
        values, vectors = eigh(gram)
        null = int((values < 1e-12 * values[-1:]).sum())
        vectors[:, :null] = vectors[:, :null].flip(-1)
        return torch.return_types.linalg_eigh((values, vectors))

    for solver in (eigh, with_another_null_space):
        monkeypatch.setattr(torch.linalg, "eigh", solver)
        assert distance(merge(TsvStream, taus), expected) < 1e-9
    method = TsvStream(ScaleConfig(), ["layer"])
    theta_0 = torch.ones(48, 40)
    state = start(method, theta_0)
    for tau in taus:  # as the difference of two models in float32
        state = add(method, state, theta_0, (theta_0 + tau).float())
    assert [int(state[name].any(dim=0).sum()) for name in ("left", "right")] == [36, 36]


@every_method
def test_tasks_whose_inputs_and_outputs_are_orthogonal_do_not_disturb_each_other(kind):
    a, b = torch.zeros(2, 20, 16, dtype=torch.float64)
    a[:10, :8], b[10:, 8:] = task_vectors((10, 8), count=2)
    X = merge(kind, [a, b])
    assert X[:10, 8:].abs().max() < 1e-10
    assert X[10:, :8].abs().max() < 1e-10
    block = X[:10, :8].flatten()
    cosine = torch.nn.functional.cosine_similarity(block, a[:10, :8].flatten(), dim=0)
    assert cosine > 0.6


@every_method
def test_later_blocks_move_more_with_a_ramp(kind):
    layers = ["block.0.fc", "block.1.fc"]
    taus = task_vectors((8, 6), count=2)
    theta_0 = torch.zeros(8, 6, dtype=torch.float64)
    moved = []
    for layer in layers:
        method = kind(kind.Options(ramp=0.4), layers)
        method = method.for_stack([layer])
        state = start(method, theta_0)
        for tau in taus:
            state = add(method, state, theta_0, tau)
        moved.append(weight(method, state, theta_0).norm())
    assert moved[1] / moved[0] == pytest.approx(1.4 / 0.6)


# --- what they compute with ---


def polar_by_svd(X):
    U, _, Vh = torch.linalg.svd(X.double(), full_matrices=False)
    return U @ Vh


def tsv_by_svd(svds, directions):
    """TSV-M of the leading directions of tasks, of which the decompositions are given."""
    U = torch.cat([U[:, :directions] for U, _, _ in svds], dim=1)
    s = torch.cat([s[:directions] for _, s, _ in svds])
    V = torch.cat([Vh[:directions].mT for _, _, Vh in svds], dim=1)
    return polar_by_svd(U) * s @ polar_by_svd(V).mT


def test_the_state_of_best_is_twice_the_layer_and_no_more():
    for shape in ((256, 256), (128, 512), (512, 128)):
        best = Best(ScaleConfig(), ["layer"])
        state = start(best, torch.zeros(shape, dtype=torch.bfloat16))
        assert sum(value.nbytes for value in state.values()) <= 2.01 * 4 * shape[0] * shape[1]


# --- what each of them is ---


@every_shape
def test_tsv_stream_is_tsv_m_of_fusion_bench(shape):
    taus = task_vectors(shape)
    batch = compute_and_sum_svd_mem_reduction(
        [{"weight": tau.clone()} for tau in taus], accelerator="cpu"
    )["weight"]
    assert distance(merge(TsvStream, taus), batch) < 1e-8


@pytest.mark.parametrize("count", [2, 8, 11])
def test_best_is_the_mean_of_tsv_m_with_an_eighth_of_the_directions_and_of_the_votes_that_count(
    count,
):
    # So few that the iteration finds them all.
    faint = torch.tensor([1, 0.8, 0.5, 0.2, 0.01], dtype=torch.float64)
    taus = [matrix_with_spectrum(48, 40, faint, seed) for seed in range(count)]
    svds = [torch.linalg.svd(tau) for tau in taus]
    tsv = tsv_by_svd(svds, directions=min(4, 40 // count))  # the last one is below a fiftieth
    s_1 = torch.stack([s[0] for _, s, _ in svds])
    votes = torch.zeros(48, 40, dtype=torch.float64)
    for tau, norm in zip(taus, s_1, strict=True):
        votes += tau @ tau.mT @ tau / norm**3
    P, sigma, Qh = torch.linalg.svd(votes, full_matrices=False)
    q = torch.where(sigma <= 1, 1.03 - 0.03 * sigma, 1 / sigma) * (sigma > 1e-4 * sigma[0])
    expected = (1.5 * tsv + 0.9 * s_1.mean() * (P * q) @ Qh) / 2
    assert distance(merge(Best, taus, ScaleConfig()), expected) < 1e-8
    assert distance(merge(Best, taus[:1]), taus[0]) < 1e-12


def test_a_task_that_comes_again_is_not_learned_twice():
    (tau,) = task_vectors((20, 12), count=1)
    once = merge(TsvStream, [tau])
    twice = merge(TsvStream, [tau, tau])
    U, s, Vh = torch.linalg.svd(once, full_matrices=False)
    torch.testing.assert_close(twice, U[:, :6] * s[:6] @ Vh[:6])


@every_method
def test_where_a_solver_fails_float64_takes_over_and_says_so_or_the_layer_is_refused(
    kind, monkeypatch, caplog
):
    """A task of low rank keeps that rank: the rounding of its float32 is not a direction."""
    generator = torch.Generator().manual_seed(0)
    theta_0 = {"layer": 0.1 * torch.randn(40, 24, generator=generator)}
    taus = [matrix_with_spectrum(40, 24, torch.arange(rank, 0, -1), rank) for rank in (24, 2)]

    def merged():
        method = kind(kind.Options(), ["layer"])
        tasks = [{"layer": theta_0["layer"] + tau.float()} for tau in taus]
        return all_of_layers(matrix_jobs(method, theta_0, tasks))["layer"]

    def failing(function, dtypes):
        def solve(self, state, *args):
            if any(value.dtype in dtypes for value in state.values()):
                raise torch.linalg.LinAlgError("linalg.eigh: no convergence")
            return function(self, state, *args)

        return solve

    expected = merged()
    for name in ("accumulate", "merged_update"):
        monkeypatch.setattr(kind, name, failing(getattr(kind, name), [torch.float32]))
    warn_once.cache_clear()
    found = merged()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert found[name].count_nonzero() == value.count_nonzero()
    update = found["weight"] - theta_0["layer"]
    expected_update = expected["weight"] - theta_0["layer"]
    assert distance(update, expected_update) < 2e-3  # directions are in float16
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.endswith("float64 on the CPU takes over in such layers, which is slower")
    monkeypatch.setattr(kind, "accumulate", failing(kind.accumulate, [torch.float64]))
    with pytest.raises(
        ValueError, match=r"layer 'layer' \(40, 24\).* in float64 on the CPU either"
    ):
        merged()


def test_directions_and_votes_in_float32_are_as_good_in_the_tail_of_a_spectrum_as_at_its_head():
    """However steeply it falls, directions are orthonormal, and rounding hides none that counts."""
    for shape, power in (((300, 260), 0.7), ((96, 32), 1), ((32, 96), 2), ((64, 64), 3)):
        k = min(shape)
        values = torch.arange(1, k + 1, dtype=torch.float64) ** -power
        exact = matrix_with_spectrum(*shape, values, seed=1)
        task = TaskVector(exact.float())
        for directions in (task.directions(k), task.leading(k // 8)):
            exist = directions.values > 0
            for vectors in (directions.left[:, exist], directions.right[:, exist]):
                gram = (vectors.mT @ vectors).double()
                assert torch.linalg.matrix_norm(gram - torch.eye(len(gram)), 2) < 1e-5
        U, s, V = task.directions(k)
        assert (s - values)[s > 0].abs().max() < 1e-6
        assert distance((U * s) @ V.mT, exact) < 1e-3
        if power < 1:
            votes = torch.linalg.svdvals(task.vote()[0])  # from 1 to 1e-5
            torch.testing.assert_close(votes, values**3, rtol=1e-2, atol=0)


def test_tsv_of_steep_spectra_in_float32_is_that_in_float64():
    """Outputs of faint directions that leant on those of strong ones moved it by 40 %."""
    spectrum = torch.arange(1, 65, dtype=torch.float64) ** -2
    taus = [matrix_with_spectrum(96, 64, spectrum, seed) for seed in range(3)]
    taus = [tau.float().double() for tau in taus]
    in_float32 = merge(TsvStream, taus, dtype=torch.float32)
    assert distance(in_float32, merge(TsvStream, taus)) < 2e-3  # whose directions are in float16
