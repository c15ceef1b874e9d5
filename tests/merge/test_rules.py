"""Of a stream of tensors, a rule keeps what was there, takes the first one, or has their mean."""

import pytest
import torch

from fusion_bench_nufilt.merge.rules import RULES
from fusion_bench_nufilt.methods.task_vector import TaskVector


@pytest.mark.parametrize(
    ("name", "expected"), [("pretrained", 1.0), ("first", 2.0), ("mean", (2 + 4 + 9) / 3)]
)
def test_a_rule_gives_a_block_of_any_shape_its_value(name, expected):
    for shape in [(1, 3), (1, 2, 5)]:
        base = torch.full(shape, 1.0)
        rule = RULES[name](None, ())
        state = rule.init_state(base)
        for step, value in enumerate((2.0, 4.0, 9.0), 1):
            task = TaskVector(torch.full(shape, value), base)
            state, _ = rule.update(state, base, task, step)
        torch.testing.assert_close(rule.merged_weight(state, base), torch.full(shape, expected))
