"""One method on one seed, and many of them side by side."""

import gc
import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import lightning
import psutil
import torch
from omegaconf import DictConfig

from fusion_bench_nufilt.layerwise import LayerwiseMergingAlgorithm

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
    pool = ProcessPoolExecutor(jobs, context, initializer=_start, initargs=(list(overrides), threads))
    try:
        pairs = {pool.submit(_work, config, pair[1]): pair for pair, config in configs.items()}
        for future in as_completed(pairs):
            yield pairs[future], future.result()
    except BrokenProcessPool:
        raise ValueError("a process was killed, perhaps for want of memory: run on with fewer --jobs") from None
    finally:
        pool.shutdown(cancel_futures=True)


_workbench: Workbench  # of a process that runs pairs


def _start(overrides: list[str], threads: int) -> None:
    global _workbench
    torch.set_num_threads(threads)
    with quiet():
        _workbench = Workbench(compose_run(overrides))


def _work(config: dict[str, Any], seed: int) -> Run:
    with quiet():
        return run_pair(_workbench, config, seed, lambda step: None)
