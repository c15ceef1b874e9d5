"""Streams of tiny models, runs with a log directory, and runs that are interrupted."""

from fusion_bench.utils import instantiate
from lightning import Fabric
from lightning.fabric.loggers import TensorBoardLogger

from tests.tiny_models import clip, finetuned


def pool(tasks=4, base=None):
    if base is None:
        base = clip()
    return {"_pretrained_": base} | {
        f"task{i}": finetuned(base, seed=i) for i in range(1, tasks + 1)
    }


def saved_pool(folder, models, **paths):
    """Save models, and return FusionBench's CLIP pool of their folders and of others."""
    for name, model in models.items():
        model.save_pretrained(folder / name)
    sources = {name: str(folder / name) for name in models}
    for name, path in paths.items():
        sources[name] = str(path)
    pool = {"_target_": "fusion_bench.modelpool.CLIPVisionModelPool", "_recursive_": False}
    return instantiate({**pool, "models": sources})


def logging_to(folder, algorithm):
    """Give an algorithm a log directory."""
    algorithm._fabric_instance = Fabric(
        devices=1, accelerator="cpu", loggers=TensorBoardLogger(folder, "", "")
    )
    return algorithm


class InterruptedRunError(Exception):
    pass


def interrupt_after(step):
    def on_step(done, merged):
        if done == step:
            raise InterruptedRunError

    return on_step


def noting(steps):
    return lambda step, merged: steps.append(step)


def contents(folder):
    """The bytes of every file, but of TensorBoard's, which another thread may still be writing."""
    files = {}
    for path in folder.rglob("*"):
        if "tfevents" in path.name:
            files[path] = b""
        elif path.is_file():
            files[path] = path.read_bytes()
    return files
