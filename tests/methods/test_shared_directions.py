"""Order-free methods where tasks have directions in common: adapters with one A, copies of a task,
and a task that comes as factors and merged.
"""

import itertools

import pytest
import torch

from fusion_bench_nufilt.methods import METHODS, ORDER_FREE
from fusion_bench_nufilt.methods.spectral import TsvStream
from fusion_bench_nufilt.methods.task_vector import TaskVector
from fusion_bench_nufilt.nufilt import LowRank
from fusion_bench_nufilt.nufilt.noise import summed_rounding
from tests.methods.helpers import add, rounding_of_task, start, weight
from tests.methods.test_spectral import distance
from tests.nufilt.matrices import matrix_with_spectrum
from tests.pairs import pairs

D_O, D_I, RANK = 48, 40, 2
THETA_0 = 0.05 * torch.randn(
    D_O, D_I, generator=torch.Generator().manual_seed(99), dtype=torch.float64
)
every_method = pytest.mark.parametrize(
    "kind", [METHODS[name] for name in ORDER_FREE], ids=ORDER_FREE
)
FORMS = {
    "factors": ("factors",),
    "merged": ("merged",),
    "first as factors": ("factors", "merged"),
    "first merged": ("merged", "factors"),
}


def drawn(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return 0.02 * torch.randn(*shape, generator=generator, dtype=torch.float64)


def adapter(seed, left=None, right=None):
    """B and A of an adapter, drawn but for those that are given."""
    if left is None:
        left = drawn(D_O, RANK, seed=seed)
    if right is None:
        right = drawn(RANK, D_I, seed=seed + 100)
    return LowRank(left, right)


def near(tau, distance, seed):
    """An adapter whose factors are this share of their size away."""
    left = tau.left + distance * drawn(D_O, RANK, seed=seed)
    return LowRank(left, tau.right + distance * drawn(RANK, D_I, seed=seed + 100))


A = drawn(RANK, D_I, seed=7)
B = drawn(D_O, RANK, seed=8)
ONE = adapter(1)
CASES = {
    "one A": [adapter(seed, right=A) for seed in range(3)],
    "one B": [adapter(seed, left=B) for seed in range(3)],
    "copies": [ONE, ONE, ONE],
}
for gap in (1e-6, 1e-4, 1e-3):
    CASES[f"{gap:g} apart"] = [near(ONE, gap, seed) for seed in (50, 51, 52)]


def in_form(tau, form, dtype):
    """A task as it comes: the factors of its update, or its weight."""
    if form == "factors":
        return tau.to(dtype)
    return (THETA_0.to(dtype) + tau.product()).to(dtype)


def merge(kind, tasks, dtype, float64=False):
    """Merge a stream of tasks and return the update of the merged model."""
    method = kind(kind.Options(), ["layer"])
    theta_0 = THETA_0.to(dtype)
    state = start(method, theta_0)
    for task in tasks:
        state = add(method, state, theta_0, task)
    if float64:
        state = {name: value.double() for name, value in state.items()}
    merged = weight(method, state, theta_0)
    return merged.double() - theta_0.double()


def stream(taus, forms, dtype):
    """Tasks in the forms, one after another in turn."""
    return [in_form(tau, form, dtype) for tau, form in zip(taus, itertools.cycle(forms))]


@every_method
@pytest.mark.parametrize("taus", CASES.values(), ids=CASES)
def test_tasks_that_share_directions_have_one_update_in_any_form_order_and_dtype(kind, taus):
    updates = {}
    for dtype in (torch.float32, torch.float64):
        for name, forms in FORMS.items():
            updates[name, dtype] = merge(kind, stream(taus, forms, dtype), dtype)
    first = updates["factors", torch.float32]
    for (form, dtype), update in updates.items():
        if dtype == torch.float32:
            assert distance(update, first) < 1e-4, form
            assert distance(update, updates[form, torch.float64]) < 5e-4, (
                form
            )  # directions are in float16
    tasks = stream(taus, FORMS["first merged"], torch.float32)
    for order in itertools.permutations(tasks):
        turned = merge(kind, order, torch.float32)
        assert distance(turned, updates["first merged", torch.float32]) < 6e-5


@every_method
def test_the_update_of_adapters_with_one_a_lies_in_the_span_of_that_a(kind):
    tasks = stream(CASES["one A"], ["factors"], torch.float32)
    update = merge(kind, tasks, torch.float32)
    basis = torch.linalg.qr(A.mT).Q
    outside = update - update @ basis @ basis.mT
    assert outside.norm() < 1e-3 * update.norm()
    # Float64 that takes over does not raise the rounding of directions.
    assert distance(merge(kind, tasks, torch.float32, float64=True), update) < 1e-4


@pytest.mark.parametrize("rank", [8, 28, 40])
def test_a_task_has_the_same_leading_directions_and_votes_as_factors_and_as_a_matrix(rank):
    """Iteration finds the leading 20 of 160; exact ones of factors alone would be others."""
    spectrum = torch.arange(1, rank + 1, dtype=torch.float64) ** -0.5
    matrix = matrix_with_spectrum(200, 160, spectrum, seed=1)
    U, s, Vh = torch.linalg.svd(matrix, full_matrices=False)
    factors = LowRank(U[:, :rank] * s[:rank], Vh[:rank])
    sums = []
    votes = []
    for tau in (matrix, factors):
        task = TaskVector(tau)
        left, values, right = task.leading(20)
        sums.append((left * values) @ right.mT)
        votes.append(task.rough_vote(1e-4)[0])
    assert distance(sums[1], sums[0]) < 1e-6
    assert distance(votes[1], votes[0]) < 1e-6


@pytest.mark.parametrize(
    ("method", "forms", "result"),
    pairs(
        ORDER_FREE,
        (("merged",) * 3, ("merged", "factors", "factors")),
        (torch.bfloat16, torch.float32),
    ),
)
def test_adapters_that_were_merged_into_bfloat16_have_the_update_of_their_factors(
    method, forms, result
):
    """Rounding to bfloat16 has directions of a tenth of an adapter's strongest, which polar factors
    and flat spectra raised to full strength; and so they did where the result is in float32, with
    whose digits the base is given then.
    """
    generator = torch.Generator().manual_seed(0)
    theta_0 = (0.04 * torch.randn(160, 160, generator=generator)).bfloat16()
    results = []
    kind = METHODS[method]
    for forms_of_tasks in (["factors"] * 3, forms):
        method = kind(kind.Options(), ["layer"])
        base = theta_0.to(result)
        state = start(method, base)
        rounding = 0.0
        for seed, form in enumerate(forms_of_tasks):
            left = drawn(160, RANK, seed=seed)
            right = drawn(RANK, 160, seed=seed + 100)
            tau = LowRank((1.5 * left).float(), right.float())
            task = tau if form == "factors" else (theta_0.float() + tau.product()).bfloat16()
            state = add(method, state, base, task, rounding_before=rounding)
            rounding = summed_rounding(rounding, rounding_of_task(task))
        results.append(method.merged_update(state, method.scale, (160, 160)))
    assert distance(results[1], results[0]) < 0.25


def test_tasks_that_fill_all_directions_have_the_update_of_float64():
    """The faintest of so many columns are nearer to each other than float16 tells: they were left
    out in float32, and had full strength in float64, 6 % apart.
    """
    d = 256
    theta_0 = matrix_with_spectrum(d, d, torch.ones(d, dtype=torch.float64), seed=99)
    values = 0.1 * torch.arange(1, d + 1, dtype=torch.float64) ** -0.7
    taus = [matrix_with_spectrum(d, d, values, seed=seed) for seed in range(8)]
    updates = []
    for dtype in (torch.float32, torch.float64):
        method = TsvStream(TsvStream.Options(), ["layer"])
        base = theta_0.to(dtype)
        state = start(method, base)
        for tau in taus:
            state = add(method, state, base, (theta_0 + tau).to(dtype))
        updates.append(method.merged_update(state, method.scale, (d, d)))
    assert distance(*updates) < 2e-3


def test_directions_that_are_further_apart_than_rounding_are_told_apart():
    tasks = stream([ONE, near(ONE, 0.03, seed=50)], ["factors"], torch.float32)
    update = merge(TsvStream, tasks, torch.float32)
    assert torch.linalg.matrix_rank(update, rtol=1e-4) == 2 * RANK
