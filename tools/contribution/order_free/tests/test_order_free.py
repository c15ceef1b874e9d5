"""The order-free methods against their formulas, computed by full SVD."""

import unittest
from copy import deepcopy
from itertools import permutations

import torch
from torch import nn

from fusion_bench.method import (
    SpectralVotingMerging,
    TSVStreamMerging,
    WUDISumsMerging,
)

METHODS = (SpectralVotingMerging, TSVStreamMerging, WUDISumsMerging)


def svd(X):
    return torch.linalg.svd(X, full_matrices=False)


def spectral_voting(taus):
    votes, strengths = 0, []
    for tau in taus:
        U, s, V = svd(tau)
        strengths.append(s[0])
        votes = votes + U * (s / s[0]) ** 3 @ V
    U, s, V = svd(votes)
    q = torch.where(s <= 1, 1 + 0.03 * (1 - s), s.clamp_min(1) ** -0.5)
    return 0.9 * sum(strengths) / len(taus) * (U * q @ V)


def tsv(taus):
    k = min(taus[0].shape) // len(taus)
    U, s, V = zip(*((U[:, :k], s[:k], V[:k]) for U, s, V in map(svd, taus)))
    polar = lambda X: svd(X)[0] @ svd(X)[2]
    return polar(torch.cat(U, 1)) * torch.cat(s) @ polar(torch.cat(V))


def wudi(taus):
    weights = [tau.square().sum() for tau in taus]
    M = sum(tau.T @ tau / w for tau, w in zip(taus, weights))
    R = sum(tau @ tau.T @ tau / w for tau, w in zip(taus, weights))
    return R @ torch.linalg.inv(M + 0.1 * M.diagonal().mean() * torch.eye(len(M)).to(M))


class TestOrderFree(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        layers = [nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 8)]
        self.base = nn.Sequential(*layers).double()
        self.tasks = {}
        for i in range(3):
            self.tasks[f"task_{i}"] = task = deepcopy(self.base)
            for parameter in task.parameters():
                parameter.data += 0.1 * torch.randn_like(parameter)

    def merge(self, kind, names=("task_0", "task_1", "task_2")):
        tasks = {name: self.tasks[name] for name in names}
        return kind().run({"_pretrained_": self.base, **tasks})

    def test_agree_with_the_formulas(self):
        for kind, formula in zip(METHODS, (spectral_voting, tsv, wudi)):
            merged = self.merge(kind)
            for i in (0, 2):
                with self.subTest(kind.__name__, layer=i):
                    taus = [
                        x[i].weight - self.base[i].weight for x in self.tasks.values()
                    ]
                    update = merged[i].weight - self.base[i].weight
                    torch.testing.assert_close(update, formula(taus))

    def test_no_order_changes_the_result(self):
        for kind in METHODS:
            expected = nn.utils.parameters_to_vector(self.merge(kind).parameters())
            for names in permutations(self.tasks):
                with self.subTest(kind.__name__, order=names):
                    merged = self.merge(kind, names).parameters()
                    got = nn.utils.parameters_to_vector(merged)
                    torch.testing.assert_close(got, expected)

    def test_the_rest_is_averaged(self):
        merged = self.merge(WUDISumsMerging)
        mean = sum(task[1].weight for task in self.tasks.values()) / 3
        torch.testing.assert_close(merged[1].weight, mean)

    def test_a_single_task_is_taken_whole_by_spectral_voting(self):
        merged = self.merge(SpectralVotingMerging, ["task_1"])
        torch.testing.assert_close(merged[0].weight, self.tasks["task_1"][0].weight)

    def test_what_can_not_be_merged_is_named(self):
        self.tasks["task_1"][0].weight.data[0, 0] = float("nan")
        with self.assertRaisesRegex(ValueError, "task_1.*0.weight is not finite"):
            self.merge(WUDISumsMerging)
        self.tasks["task_1"] = nn.Sequential(nn.Linear(8, 11))
        with self.assertRaisesRegex(ValueError, "task_1.*lacks 0.weight"):
            self.merge(WUDISumsMerging)
        with self.assertRaisesRegex(ValueError, "no linear layer"):
            WUDISumsMerging().run({"_pretrained_": nn.Conv1d(2, 2, 2)})

    def test_a_small_share_is_a_warning(self):
        model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(90))
        with self.assertLogs("fusion_bench.method.order_free", "WARNING") as logs:
            WUDISumsMerging().run({"_pretrained_": model, "a": model})
        self.assertIn("the others are averaged", logs.output[0])


if __name__ == "__main__":
    unittest.main()
