"""Rows of a tensor that are matched with the base's."""

import pytest
import torch

from fusion_bench_nufilt.models.source import MatchedRows


@pytest.mark.parametrize(
    "stored", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 2, -1, -1], [-1, 0, -1, 3], [0, 1, 3, -1]]
)
def test_any_piece_has_the_matched_rows_and_the_bases_where_there_is_none(stored):
    weight = torch.arange(12.0).reshape(4, 3)
    theta_0 = -torch.arange(12.0).reshape(4, 3) - 100
    rows = []
    for i, row in enumerate(stored):
        if row >= 0:
            rows.append(weight[row])
        else:
            rows.append(theta_0[i])
    expected = torch.cat(rows)
    matched = MatchedRows(3, stored)
    for start in range(12):
        for stop in range(start + 1, 13):
            piece = matched.elements(
                start, stop, theta_0.flatten()[start:stop], lambda a, b, _: weight.flatten()[a:b]
            )
            assert torch.equal(piece, expected[start:stop])
