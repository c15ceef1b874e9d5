"""How strong the update of `best` is (docs/notes/best.md)."""

import pytest
import torch

from fusion_bench_nufilt.methods.best import Best
from fusion_bench_nufilt.methods.order_free import ScaleConfig
from tests.methods.test_spectral import task_vectors


@pytest.mark.parametrize("scale", [0, -1, float("inf"), "auto", None, True])
def test_a_scale_that_is_no_positive_number_is_refused(scale):
    with pytest.raises(ValueError, match="scale must be a number > 0, got"):
        ScaleConfig(scale=scale)


def adapters(count=2):
    return task_vectors((48, 40), count=count, rank=3)


def test_best_gives_tasks_of_low_rank_half_of_the_strength_and_a_layer_the_mean_of_its_tasks():
    full, low = task_vectors((48, 40), count=2), adapters()
    method, theta_0 = Best(ScaleConfig(), ["layer"]), torch.zeros(48, 40, dtype=torch.float64)
    for tasks, expected in ((full, 1.0), (low, 0.5), ([full[0], low[0]], 0.75), ([low[0]], 1.0)):
        state = method.start("layer", theta_0)
        for tau in tasks:
            state = method.add("layer", state, theta_0, tau)
        whole = method.update({**state, "low_rank": torch.tensor(0.0)}, 1.0)
        torch.testing.assert_close(method.update(state, 1.0), expected * whole)


def flat(count=8):
    generator = torch.Generator().manual_seed(3)
    random = torch.randn(count, 48, 40, generator=generator, dtype=torch.float64)
    return list(
        torch.linalg.qr(random).Q
        * torch.rand(count, 1, 1, generator=generator, dtype=torch.float64)
    )


def test_no_member_of_best_has_an_update_that_is_shorter_than_a_sum_of_unrelated_tasks():
    method, theta_0 = (
        Best(ScaleConfig(scale=1.2), ["layer"]),
        torch.zeros(48, 40, dtype=torch.float64),
    )
    for tasks, is_short in ((flat(), True), (task_vectors((48, 40), count=8), False)):
        state = method.start("layer", theta_0)
        for tau in tasks:
            state = method.add("layer", state, theta_0, tau)
        length = sum(tau.square().sum() for tau in tasks).sqrt()
        members = [member.update(state, member.scale) for member in method.members]
        assert [bool(X.norm() < 0.99 * length) for X in members] == [is_short] * 2
        expected = sum(X * max(1.0, length / X.norm()) for X in members) / 2
        torch.testing.assert_close(method.update(state, 1.2), 1.2 * expected)
