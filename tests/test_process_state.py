"""A test that changes what all tests share fails, and not the one that it meets later."""

import os

import pytest
import torch

from fusion_bench_nufilt.continual.taskpools.local_tasks import register_task
from fusion_bench_nufilt.demo import TASKS
from tests.process_state import unchanged_state


def test_what_a_test_leaves_changed_for_the_whole_process_fails_it(monkeypatch):
    threads = torch.get_num_threads()

    def other_classes():
        register_task("shapes", ["a", "b"], "{}")

    changes = {
        "torch's default dtype": (torch.set_default_dtype, torch.float64),
        "torch's threads": (torch.set_num_threads, threads + 1),
        "gradients": (torch.set_grad_enabled, False),
        "deterministic algorithms": (torch.use_deterministic_algorithms, True),
        "class names of 'shapes'": (other_classes,),
        "environment's A_NAME": (os.environ.__setitem__, "A_NAME", "1"),
    }
    try:
        for words, (change, *arguments) in changes.items():
            with pytest.raises(AssertionError, match=words), unchanged_state():
                change(*arguments)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        register_task("shapes", TASKS["shapes"].classes, TASKS["shapes"].template)
        del os.environ["A_NAME"]
