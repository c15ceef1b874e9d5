"""Streams of tiny models, runs with a log directory, and runs that are interrupted."""

from lightning import Fabric
from lightning.fabric.loggers import TensorBoardLogger

from tests.models import clip, finetuned


def pool(tasks=4):
    base = clip()
    return {"_pretrained_": base} | {f"task{i}": finetuned(base, seed=i) for i in range(1, tasks + 1)}


def logging_to(folder, algorithm):
    """Give an algorithm a log directory."""
    algorithm._fabric_instance = Fabric(devices=1, accelerator="cpu", loggers=TensorBoardLogger(folder, "", ""))
    return algorithm


class InterruptedRunError(Exception):
    pass


def interrupt_after(step):
    def on_step(done):
        if done == step:
            raise InterruptedRunError

    return on_step
