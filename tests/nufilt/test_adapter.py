"""The reduced objective and its Adam iterates are compared with the plain ones, through
autograd.
"""

import pytest
import torch

from fusion_bench_nufilt.nufilt.adapter import Objective, fit_adapter
from fusion_bench_nufilt.nufilt.solvers import solve_adapter
from fusion_bench_nufilt.nufilt.subspace import null_space_filter, top_right_singular_vectors
from tests.nufilt.matrices import random_layer
from tests.pairs import pairs

SHAPES = [(20, 16), (16, 20), (16, 40)]  # the last is wide enough for the direct form of G B
PROJECTORS = ["filter", "identity", "zero"]


def problem(shape, projector, seed=0):
    theta_0, theta, theta_t = random_layer(*shape, seed)
    tau = theta_t - theta_0
    tau_merged = theta - theta_0
    V_p = top_right_singular_vectors(tau_merged, 6)
    V_t = top_right_singular_vectors(tau, 3)
    filtered = {
        "filter": null_space_filter(tau, V_p),
        "identity": tau,
        "zero": torch.zeros_like(tau),
    }[projector]
    return tau, filtered, tau_merged, V_t, V_p


def objective_of(tau, filtered, *rest):
    """Return the reduced objective of one layer, which tells P = I by the identity of its
    arguments.
    """
    tau_stack = tau[None]
    filtered_stack = filtered[None]
    if filtered is tau:
        filtered_stack = tau_stack
    return Objective.build(tau_stack, filtered_stack, *[tensor[None] for tensor in rest])


def plain_loss(tau, filtered, tau_merged, V_t, V_p, A, B):
    """Return the two terms as the paper writes them."""
    after = tau_merged + filtered + tau @ B @ A
    return ((tau - after) @ V_t).square().sum() + ((tau_merged - after) @ V_p).square().sum()


def start_of_a(shape, rank=4):
    generator = torch.Generator().manual_seed(7)
    return 0.02 * torch.randn(rank, shape[1], generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("projector", PROJECTORS)
def test_iterates_and_losses_are_those_of_autograd_and_torch_adam(shape, projector):
    layer = problem(shape, projector)
    A = start_of_a(shape).requires_grad_()
    B = torch.zeros(shape[1], 4, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([A, B], lr=1e-2)
    losses = []
    for _ in range(20):
        loss = plain_loss(*layer, A, B)
        losses.append(loss.item())
        adam.zero_grad()
        loss.backward()
        adam.step()
    losses.append(plain_loss(*layer, A, B).item())

    start = start_of_a(shape)[None]
    ours_A, ours_B, ours_losses = fit_adapter(objective_of(*layer), start, lr=1e-2, max_steps=20)
    assert torch.equal(start[0], start_of_a(shape))
    torch.testing.assert_close(ours_A[0], A.detach(), rtol=0, atol=1e-9)
    torch.testing.assert_close(ours_B[0], B.detach(), rtol=0, atol=1e-9)
    torch.testing.assert_close(ours_losses[0].tolist(), losses, rtol=1e-9, atol=0)


def test_no_step_leaves_the_adapter_at_its_start():
    A = start_of_a((20, 16))[None]
    objective = objective_of(*problem((20, 16), "filter"))
    fitted, B, losses = fit_adapter(objective, A, lr=1e-3, max_steps=0)
    assert torch.equal(fitted, A)
    assert B.abs().max() == 0
    assert losses.shape == (1, 1)


def closed_form(shape, projector, ridge, rank=4):
    """Return the problem, A and B, and the losses."""
    layer = problem(shape, projector)
    A, B, losses = solve_adapter(objective_of(*layer), start_of_a(shape, rank)[None], ridge=ridge)
    return layer, A[0], B[0], losses[0]


@pytest.mark.parametrize(("shape", "projector", "ridge"), pairs(SHAPES, PROJECTORS, [1e-3, 10]))
def test_the_closed_form_has_no_gradient_and_tells_its_losses(shape, projector, ridge):
    layer, A, B, losses = closed_form(shape, projector, ridge)
    penalty = ridge * layer[0].square().sum() / shape[1]
    A = A.clone().requires_grad_()
    loss = plain_loss(*layer, A, B)
    (gradient,) = torch.autograd.grad(loss + penalty * A.square().sum(), A)
    start = torch.zeros_like(A).requires_grad_()
    (at_zero,) = torch.autograd.grad(plain_loss(*layer, start, B), start)
    assert gradient.norm() <= 1e-9 * at_zero.norm()
    expected = [plain_loss(*layer, start, B).item(), loss.item()]
    torch.testing.assert_close(losses.tolist(), expected, rtol=1e-9, atol=0)
    # B is an orthonormal sketch of tau.
    torch.testing.assert_close(B.mT @ B, torch.eye(4, dtype=torch.float64))
    tau = layer[0]
    sketch = tau.mT @ (tau @ start_of_a(shape).mT)
    torch.testing.assert_close(B @ (B.mT @ sketch), sketch)


def test_a_larger_ridge_leaves_more_of_the_loss_and_a_smaller_adapter():
    losses_left = []
    norms = []
    for ridge in (1e-6, 1, 1e6):
        _, A, _, (loss_before, loss_after) = closed_form((20, 16), "filter", ridge)
        losses_left.append(loss_after.item())
        norms.append(A.norm().item())
    assert losses_left == sorted(losses_left)
    assert norms == sorted(norms, reverse=True)
    assert losses_left[-1] == pytest.approx(loss_before.item(), rel=1e-4)


def test_a_task_vector_of_zero_gives_no_adapter():
    tau, filtered, tau_merged, V_t, V_p = problem((20, 16), "filter")
    objective = objective_of(0 * tau, 0 * filtered, tau_merged, V_t, V_p)
    A, B, losses = solve_adapter(objective, start_of_a((20, 16))[None], ridge=10)
    assert not A.any()
    assert B.isfinite().all()
    assert losses[0, 0] == losses[0, 1]
