"""The scheduler of all merges."""

from fusion_bench_nufilt.merge.engine import Work, work_in_order


def test_work_is_done_by_place_but_the_largest_first_so_that_no_thread_is_left_with_it():
    sizes = [10, 30, 40, 10, 10, 30]  # of which a quarter of a thread's share is 16
    work = [Work(size, 5 - number, int) for number, size in enumerate(sizes)]
    in_order = work_in_order(work, workers=2)
    assert [piece.numel for piece in in_order] == [40, 30, 30, 10, 10, 10]
    assert [piece.place for piece in in_order[3:]] == [1, 2, 5]


def test_work_without_places_is_done_by_size():
    work = [Work(size, 0, int) for size in (1, 3, 2)] + [Work(2, 0, int)] * 20
    assert [piece.numel for piece in work_in_order(work, workers=2)] == [3, *[2] * 21, 1]
