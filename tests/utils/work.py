"""Pieces of work for other processes, in a file that imports little, as each process imports it."""

import os
import time
from multiprocessing.util import Finalize


def double(number):
    if number < 0:
        os._exit(1)
    return 2 * number


def grow(megabytes):
    """Keep memory for longer than a second, the time after which some pools of processes measure
    it.
    """
    grow.kept = [*getattr(grow, "kept", ()), b"x" * (megabytes * 2**20)]
    time.sleep(1.2)
    return megabytes


def tidy_up_at_the_end(file):
    """Write a file as the process ends, in about the time that giving back semaphores may take."""

    def tidy_up():
        time.sleep(0.5)
        file.touch()

    Finalize(None, tidy_up, exitpriority=10)


def name_itself(seconds):
    time.sleep(seconds)
    return os.getpid()


def visible_gpus():
    return os.environ["CUDA_VISIBLE_DEVICES"]


def refuse(error):
    raise error
