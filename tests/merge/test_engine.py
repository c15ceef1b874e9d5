"""The scheduler of all merges."""

from fusion_bench_nufilt.merge.engine import Work, work_in_order


def test_the_largest_work_is_done_first_and_that_of_one_size_by_place():
    """In another order, blocks of memory fit into none that were freed: a sum took a third more."""
    sizes = [10, 30, 40, 10, 10, 30]
    work = [Work(size, 5 - number, int) for number, size in enumerate(sizes)]
    in_order = work_in_order(work)
    assert [piece.numel for piece in in_order] == [40, 30, 30, 10, 10, 10]
    assert [piece.place for piece in in_order] == [3, 0, 4, 1, 2, 5]
