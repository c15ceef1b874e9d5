"""Spectral voting against its formula, computed by full SVD."""

import unittest
from copy import deepcopy
from itertools import permutations

import torch
from torch import nn

from fusion_bench.method import SpectralVotingMerging


def svd(X):
    return torch.linalg.svd(X, full_matrices=False)


def spectral_voting(taus):
    votes = 0
    energy = 0
    strengths = []
    for tau in taus:
        U, s, V = svd(tau)
        strengths.append(s[0])
        A = U * (s / s[0]) ** 3 @ V
        votes = votes + A
        energy = energy + A.square().sum()
    U, s, V = svd(votes)
    q = torch.where(s <= 1, 1 + 0.03 * (1 - s), s.clamp_min(1) ** -0.5)
    left_over = (2 * votes.norm() / energy.sqrt()).clamp_max(1)
    return 0.9 * sum(strengths) / len(taus) * left_over * (U * q @ V)


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

    def merge(self, names=("task_0", "task_1", "task_2")):
        tasks = {name: self.tasks[name] for name in names}
        return SpectralVotingMerging().run({"_pretrained_": self.base, **tasks})

    def assert_agrees_with_the_formula(self, merged):
        for i in (0, 2):
            with self.subTest(layer=i):
                tasks = self.tasks.values()
                taus = [x[i].weight - self.base[i].weight for x in tasks]
                update = merged[i].weight - self.base[i].weight
                torch.testing.assert_close(update, spectral_voting(taus))

    def test_agrees_with_the_formula(self):
        self.assert_agrees_with_the_formula(self.merge())

    def test_what_is_left_of_votes_that_cancel_is_not_lifted(self):
        task = self.tasks.pop("task_2")
        with torch.no_grad():  # nearly against task_0
            for i in (0, 2):
                tau = task[i].weight - self.base[i].weight
                first = self.tasks["task_0"][i].weight
                against = 2 * self.base[i].weight - first + 0.01 * tau
                self.tasks["task_1"][i].weight.copy_(against)
        merged = self.merge(self.tasks)
        self.assert_agrees_with_the_formula(merged)
        moved = (merged[0].weight - self.base[0].weight).norm()
        whole = (self.tasks["task_0"][0].weight - self.base[0].weight).norm()
        self.assertLess(moved, 0.1 * whole)

    def test_no_order_changes_the_result(self):
        expected = nn.utils.parameters_to_vector(self.merge().parameters())
        for names in permutations(self.tasks):
            with self.subTest(order=names):
                merged = self.merge(names).parameters()
                got = nn.utils.parameters_to_vector(merged)
                torch.testing.assert_close(got, expected)

    def test_the_rest_is_averaged(self):
        merged = self.merge()
        mean = sum(task[1].weight for task in self.tasks.values()) / 3
        torch.testing.assert_close(merged[1].weight, mean)

    def test_a_single_task_is_taken_whole(self):
        merged = self.merge(["task_1"])
        torch.testing.assert_close(merged[0].weight, self.tasks["task_1"][0].weight)

    def test_what_can_not_be_merged_is_named(self):
        self.tasks["task_1"][0].weight.data[0, 0] = float("nan")
        with self.assertRaisesRegex(ValueError, "task_1.*0.weight is not finite"):
            self.merge()
        self.tasks["task_1"] = nn.Sequential(nn.Linear(8, 11))
        with self.assertRaisesRegex(ValueError, "task_1.*lacks 0.weight"):
            self.merge()
        with self.assertRaisesRegex(ValueError, "no linear layer"):
            SpectralVotingMerging().run({"_pretrained_": nn.Conv1d(2, 2, 2)})

    def test_a_small_share_is_a_warning(self):
        model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(90))
        with self.assertLogs("fusion_bench.method.order_free", "WARNING") as logs:
            SpectralVotingMerging().run({"_pretrained_": model, "a": model})
        self.assertIn("the others are averaged", logs.output[0])


if __name__ == "__main__":
    unittest.main()
