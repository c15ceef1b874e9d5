"""What is checked before anything is merged, and what the checks cost."""

from fusion_bench_nufilt.merge.checks import check_task
from tests.merge.helpers import plan, save_stream
from tests.tiny_models import llama


class CountedSet(set):
    """A set that counts how often it is joined with another."""

    joined = 0

    def __ror__(self, other):
        self.joined += 1
        return super().__ror__(other)


def test_the_tensors_that_a_task_changes_are_not_gathered_again_for_every_one_of_them(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    planned = plan(tmp_path, ["task1"], other_params="mean")
    averaged = CountedSet(planned.averaged)
    task = planned.tasks[0]
    assert len(task.entries) > 10
    check_task(planned, task, averaged)
    assert averaged.joined <= 1
