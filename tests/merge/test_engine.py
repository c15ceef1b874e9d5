"""The scheduler of all merges."""

from fusion_bench_nufilt.merge.engine import Work, work_in_order


def test_the_largest_of_the_early_work_and_then_of_the_rest_is_done_first():
    """In the order of files alone, blocks of memory fit into none that were freed: a sum took a
    third more. With the largest of all first, files were digested at the end.
    """
    sizes = [10, 30, 40, 10, 10, 30, 10, 20]
    work = [Work(size, place, int) for place, size in enumerate(sizes)]
    in_order = work_in_order(work[::-1])
    assert [piece.place for piece in in_order] == [2, 1, 5, 0, 3, 4, 7, 6]


def test_work_of_one_size_is_done_by_place():
    work = [Work(10, place, int) for place in (4, 1, 3, 0, 2)]
    assert [piece.place for piece in work_in_order(work)] == [0, 1, 2, 3, 4]


def test_no_work_and_tensors_without_elements_have_an_order():
    """A run that goes on may have nothing left, or a tensor of no elements."""
    assert work_in_order([]) == []
    empty = [Work(0, 1, int), Work(0, 0, int)]
    assert [piece.place for piece in work_in_order(empty)] == [0, 1]
