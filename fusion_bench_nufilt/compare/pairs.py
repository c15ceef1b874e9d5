"""One method on one seed, and many of them side by side."""

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.queues import SimpleQueue
from typing import Any

import lightning
import psutil
import torch
from omegaconf import DictConfig

from fusion_bench_nufilt.continual.layerwise import LayerwiseMergingAlgorithm

from .configs import compose_run, make_method
from .display import quiet
from .specs import RunSpec
from .store import Run
from .workbench import Workbench, num_parameters

Pair = tuple[RunSpec, int]  # a method and a seed
Configs = Mapping[Pair, dict[str, Any]]  # of the methods, resolved


def run_pair(workbench: Workbench, config: dict[str, Any], seed: int, on_step: Callable[[int], Any]) -> Run:
    """Merge the stream with one method on one seed; if it fails, that is the result."""
    about = (seed, config, workbench.environment)
    try:
        lightning.seed_everything(seed, verbose=False)  # some methods draw from the global generators
        algorithm = make_method(DictConfig(config), workbench.fabric)
        workbench.evaluator.watch()
        merged = algorithm.run(workbench.modelpool, workbench.evaluator, on_step=on_step)
        seconds, parameters = algorithm.merge_seconds, num_parameters(merged)
        share = algorithm.solving_share if isinstance(algorithm, LayerwiseMergingAlgorithm) else None
        return Run(
            *about,
            algorithm.matrix,
            seconds,
            solving_seconds=None if share is None else share * sum(seconds),
            memory=workbench.evaluator.peak,
            parameters=parameters,
            extra_parameters=parameters - workbench.parameters,
        )
    except Exception as error:
        return Run(*about, error=reason(error), traceback=traceback.format_exc())
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def reason(error: Exception) -> str:
    """In one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def run_side_by_side(configs: Configs, jobs: int, overrides: Sequence[str]) -> Iterator[tuple[Pair, Run]]:
    """Run pairs in processes of their own, each with models, data and heads of its own and its share of the cores.

    Args:
        configs: of the methods.
        jobs: how many processes.
        overrides: of `fusion_bench`, for the model pool and the task pool.

    Raises:
        ValueError: a process was killed.
    """
    process = psutil.Process()
    cores = len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else psutil.cpu_count()  # macOS has none
    threads = max(1, (cores or 1) // jobs)
    context = multiprocessing.get_context("spawn")
    gpus = context.SimpleQueue()
    for gpu in assign_gpus(jobs):
        gpus.put(gpu)
    pool = ProcessPoolExecutor(jobs, context, initializer=start_process, initargs=(list(overrides), threads, gpus))
    try:
        pairs = {pool.submit(work, config, pair[1]): pair for pair, config in configs.items()}
        for future in as_completed(pairs):
            yield pairs[future], future.result()
    except BrokenProcessPool:
        raise ValueError("a process was killed, perhaps for want of memory: run on with fewer --jobs") from None
    finally:
        pool.shutdown(cancel_futures=True)


_workbench: Workbench  # of a process that runs pairs


def assign_gpus(processes: int) -> list[str | None]:
    """The GPU of each process, by its name for CUDA_VISIBLE_DEVICES: number i takes that with number i mod n, of n."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
    names = names[: torch.cuda.device_count()]
    return [names[i % len(names)] if names else None for i in range(processes)]


def start_process(overrides: list[str], threads: int, gpus: "SimpleQueue[str | None] | None" = None) -> None:
    """Make this process ready for :func:`work`.

    Args:
        overrides: of `fusion_bench`, for the model pool and the task pool.
        threads: of its mathematics.
        gpus: where it takes the GPU that is its own; None: it sees those that are for it.
    """
    global _workbench
    if gpus is not None and (gpu := gpus.get()) is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # CUDA reads it when it is first used
    torch.set_num_threads(threads)
    with quiet():
        _workbench = Workbench(compose_run(overrides))


def work(config: dict[str, Any], seed: int) -> Run:
    """:func:`run_pair` in a process that was made ready for it."""
    with quiet():
        return run_pair(_workbench, config, seed, lambda step: None)
