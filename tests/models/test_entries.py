"""What a model has of a tensor, each kind by itself: whole, a piece of it, and what is the same."""

import pytest
import torch

from fusion_bench_nufilt.models.entries import Stored, Unchanged
from fusion_bench_nufilt.models.experts import Expert, ExpertRows, FactorsOfExpert
from fusion_bench_nufilt.models.lora import Dora, Factors, FactorsOfRows, LastFactors
from fusion_bench_nufilt.models.source import MemorySource

ROWS, COLUMNS, RANK = 6, 4, 2
THETA_0 = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
A = torch.randn(RANK, COLUMNS, generator=torch.Generator().manual_seed(1))
B = torch.randn(ROWS, RANK, generator=torch.Generator().manual_seed(2))
LENGTHS = torch.rand(ROWS, generator=torch.Generator().manual_seed(3)) + 1
SOURCE = MemorySource(
    "m",
    {
        "weight": THETA_0,
        "a.lora_A.weight": A,
        "b.lora_B.weight": B,
        "other.lora_B.weight": B + 1,
        "a.lora_embedding_A": B.T.contiguous(),
        "b.lora_embedding_B": A.T.contiguous(),
        "lengths": LENGTHS,
        "experts": torch.stack([THETA_0, THETA_0 + 1]),
    },
)


def factors(
    key_a: str = "a.lora_A.weight", key_b: str = "b.lora_B.weight", is_transposed: bool = False
) -> Factors:
    shape = (COLUMNS, ROWS) if is_transposed else (ROWS, COLUMNS)
    last = LastFactors()
    return Factors(SOURCE, "", shape, "layer", key_a, key_b, RANK, 0.5, is_transposed, last)


def of_expert(number: int) -> FactorsOfExpert:
    """Two experts of three outputs each, in factors of rank one."""
    fields = {**vars(factors()), "rank_in_file": 1}
    expert = Expert(number, 2, slice(0, ROWS), False, False)
    return FactorsOfExpert(**fields, expert=expert)


UPDATE = 0.5 * B @ A
DORA = (THETA_0 + UPDATE) * (LENGTHS / (THETA_0 + UPDATE).norm(dim=1))[:, None]
ENTRIES = {
    "unchanged": (Unchanged(SOURCE, "", (ROWS, COLUMNS)), THETA_0),
    "stored": (Stored.of(SOURCE, "weight"), THETA_0),
    "rows of an expert": (
        ExpertRows(SOURCE, "experts", (ROWS, COLUMNS), 24, 48, COLUMNS, False),
        THETA_0 + 1,
    ),
    "factors": (factors(), THETA_0 + UPDATE),
    "factors of an embedding": (
        factors("a.lora_embedding_A", "b.lora_embedding_B"),
        THETA_0 + UPDATE,
    ),
    "factors of an expert": (of_expert(1), THETA_0 + 0.5 * B[:, 1:] @ A[1:]),
    "dora": (Dora(SOURCE, "", (ROWS, COLUMNS), factors(), "lengths"), DORA),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_is_read_whole_and_in_pieces(name):
    entry, expected = ENTRIES[name]
    assert entry.shape == (ROWS, COLUMNS)
    whole = entry.read(THETA_0)
    if entry.rank:
        assert whole.rank == entry.rank
        whole = THETA_0 + whole.product()
    torch.testing.assert_close(whole, expected)
    for start, stop in ((0, 3 * COLUMNS), (2 * COLUMNS, ROWS * COLUMNS)):
        piece = entry.elements(start, stop, THETA_0.flatten()[start:stop])
        torch.testing.assert_close(piece, expected.flatten()[start:stop])


def test_factors_of_rows_change_these_alone():
    entry = FactorsOfRows(SOURCE, "", (2 * ROWS, COLUMNS))
    entry = entry.with_part(slice(ROWS, 2 * ROWS), factors())
    base = torch.cat([THETA_0, THETA_0])
    expected = torch.cat([THETA_0, THETA_0 + UPDATE])
    torch.testing.assert_close(base + entry.read(base).product(), expected)
    torch.testing.assert_close(
        entry.elements(3, 40, base.flatten()[3:40]), expected.flatten()[3:40]
    )


def test_a_transposed_layer_is_stored_so():
    entry = factors(is_transposed=True)
    assert entry.shape == (COLUMNS, ROWS)
    piece = entry.elements(0, ROWS, THETA_0.T.flatten()[:ROWS])
    torch.testing.assert_close(piece, (THETA_0 + UPDATE).T.flatten()[:ROWS])
    dora = Dora(SOURCE, "", entry.shape, entry, "lengths")
    torch.testing.assert_close(dora.read(THETA_0.T), DORA.T)


def test_what_two_names_of_a_weight_have_in_common():
    embedding = factors("a.lora_embedding_A", "b.lora_embedding_B")
    assert factors().same(embedding)  # as peft ties a head to it
    assert embedding.same(factors())
    assert not factors().same(factors(key_b="other.lora_B.weight"))
    assert not factors().same(Stored.of(SOURCE, "weight"))
    assert Stored.of(SOURCE, "weight").same(Stored.of(SOURCE, "weight"))
    assert not Stored.of(SOURCE, "weight").same(Stored.of(SOURCE, "b.lora_B.weight"))
    dora = Dora(SOURCE, "", (ROWS, COLUMNS), factors(), "lengths")
    assert dora.same(Dora(SOURCE, "", (ROWS, COLUMNS), embedding, "lengths"))
    assert not dora.same(factors())
    rows = Stored.of(SOURCE, "weight").in_rows([0, -1, 2], (3, COLUMNS))
    assert rows.same(rows.own.in_rows([0, -1, 2], (3, COLUMNS)))
    assert not rows.same(rows.own.in_rows([0, 1, 2], (3, COLUMNS)))


@pytest.mark.parametrize(
    "numbers", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 2, -1, -1], [-1, 0, -1, 3], [0, 1, 3, -1]]
)
def test_any_piece_has_the_rows_in_order_and_the_bases_where_there_is_none(numbers):
    weight = torch.arange(12.0).reshape(4, 3)
    theta_0 = -torch.arange(12.0).reshape(4, 3) - 100
    rows = []
    for i, number in enumerate(numbers):
        if number >= 0:
            rows.append(weight[number])
        else:
            rows.append(theta_0[i])
    expected = torch.cat(rows)
    entry = Stored.of(MemorySource("m", {"w": weight}), "w").in_rows(numbers, (4, 3))
    for start in range(12):
        for stop in range(start + 1, 13):
            piece = entry.elements(start, stop, theta_0.flatten()[start:stop])
            assert torch.equal(piece, expected[start:stop])


def test_rows_in_order_are_put_in_another_order():
    entry = Stored.of(SOURCE, "weight").in_rows([4, -1, 2, 0], (4, COLUMNS))
    again = entry.in_rows([2, 1, -1, 0], (4, COLUMNS))
    theta_0 = torch.zeros(4, COLUMNS)
    zeros = torch.zeros(COLUMNS)
    expected = torch.stack([THETA_0[2], zeros, zeros, THETA_0[4]])
    assert torch.equal(again.read(theta_0), expected)
    assert again.numbers_there == [0, 3]
