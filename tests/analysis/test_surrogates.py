"""The identities that tie the surrogates to the data and to the method; the ranks that methods are
measured with.
"""

import pytest
import torch

from fusion_bench_nufilt import fuse_layers
from fusion_bench_nufilt.analysis.measure import _ranks
from fusion_bench_nufilt.analysis.surrogates import data_free_losses, harmonic_mean, layer_losses
from fusion_bench_nufilt.nufilt import FusionConfig
from fusion_bench_nufilt.nufilt.subspace import top_right_singular_vectors
from tests.analysis.helpers import second_moment

D_O = 12
D_I = 16


def matrices(draw):
    return [draw(D_O, D_I) for _ in range(3)]


def test_the_losses_are_the_averages_over_explicitly_formed_outputs(draw):
    W_new, W_old, W_task = matrices(draw)
    old = [draw(50, D_I), draw(30, D_I)]
    new = draw(40, D_I)

    C_old = sum(map(second_moment, old)) / 2
    found = layer_losses(W_new, W_old, W_task, C_old, second_moment(new))

    moved = [(X @ (W_new - W_old).mT).square().sum(dim=1).mean() for X in old]
    before = [(X @ W_old.mT).square().sum(dim=1).mean() for X in old]
    missed = (new @ (W_new - W_task).mT).square().sum(dim=1).mean()
    assert found["stability"] == pytest.approx(float(sum(moved) / 2))
    assert found["relative_stability"] == pytest.approx(float(sum(moved) / sum(before)))
    assert found["plasticity"] == pytest.approx(float(missed))
    whole = (new @ W_task.mT).square().sum(dim=1).mean()
    assert found["relative_plasticity"] == pytest.approx(float(missed / whole))


def test_inputs_of_zero_have_no_relative_losses(draw):
    W = draw(D_O, D_I)
    zero = torch.zeros(D_I, D_I, dtype=torch.float64)
    found = layer_losses(W + 1, W, 2 * W, zero, zero)
    assert found == {
        "stability": 0,
        "relative_stability": None,
        "plasticity": 0,
        "relative_plasticity": None,
    }


def test_the_filter_alone_moves_nothing_on_inputs_inside_the_protected_subspace(draw):
    pretrained, tau_old, tau_task = matrices(draw)
    config = FusionConfig(null_rank=5, lora_rank=0)
    old = {"layer": pretrained + tau_old}
    fused, _ = fuse_layers(
        {"layer": pretrained}, old, {"layer": pretrained + tau_task}, config, step=2
    )
    V_p = top_right_singular_vectors(tau_old, 5)
    inside = second_moment(draw(40, 5) @ V_p.mT)
    anywhere = second_moment(draw(40, D_I))

    def stability(C):
        return layer_losses(fused["layer"], old["layer"], pretrained + tau_task, C, C)["stability"]

    assert stability(inside) < 1e-13
    assert stability(anywhere) > 1


@pytest.mark.parametrize("share", [1e-3, 1e-5])
def test_a_data_free_loss_is_zero_within_rounding_alone(draw, share):
    """Squares of float32 have eps squared of rounding, and not eps."""
    D = draw(40, 20).float()
    V = torch.linalg.svd(D).Vh[:1].mT
    D = D - (D @ V) @ V.mT
    rounding, _ = data_free_losses(D, torch.zeros_like(D), D, V, V)
    assert rounding == 0
    change = share * D.norm() / D.shape[0] ** 0.5 * torch.ones(40, 1) @ V.mT
    stability, _ = data_free_losses(D + change, torch.zeros_like(D), D, V, V)
    assert stability == pytest.approx((share * D.norm().item()) ** 2, rel=0.05)


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_data_free_losses_sum_to_the_loss_that_the_method_reports(draw, lora_rank):
    pretrained, tau_old, tau_task = matrices(draw)
    config = FusionConfig(null_rank=5, lora_rank=lora_rank, task_rank=3)
    task = {"layer": pretrained + tau_task}
    fused, reports = fuse_layers(
        {"layer": pretrained}, {"layer": pretrained + tau_old}, task, config, step=2
    )

    V_p = top_right_singular_vectors(tau_old, 5)
    V_t = top_right_singular_vectors(tau_task, 3)
    losses = data_free_losses(fused["layer"] - pretrained, tau_old, tau_task, V_p, V_t)

    assert sum(losses) == pytest.approx(reports["layer"].loss_after, rel=1e-6)


def test_a_method_that_ignores_one_side_has_harmonic_mean_zero():
    assert harmonic_mean(0.0, 5.0) == harmonic_mean(0.0, 0.0) == 0
    assert harmonic_mean(1.0, 3.0) == 1.5


@pytest.mark.parametrize(
    ("null_rank", "task_rank", "ranks"),
    [(10, 4, (10, 4)), (0.5, 0.25, (32, 16)), ("all", True, (128, 8))],
)
def test_the_data_free_losses_have_the_methods_own_ranks_whole_or_shares(
    null_rank, task_rank, ranks
):
    found = _ranks({"null_rank": null_rank, "task_rank": task_rank}).ranks(64)
    assert (found.null, found.task) == ranks
