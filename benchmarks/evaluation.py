"""Time scoring a stream step by step: FusionBench's way, and one evaluator that is set up once.

    python benchmarks/evaluation.py modelpool=nufilt_demo
    NUFILT_DEMO=b32 python benchmarks/evaluation.py modelpool=nufilt_demo --run
    python benchmarks/evaluation.py modelpool=clip-vit-base-patch32_TA8 --steps 3

FusionBench's continual methods reset the task pool at every step, so that the CLIP model, processor
and data sets are loaded and all prompts encoded anew. Both ways score the pretrained model on the
tasks seen so far, after each step. `--run` has the seconds of `fusion_bench method=nufilt` by
stage, and `NUFILT_DEMO=b32` makes the demo's models in the size of B/32, hardly trained.
"""

import argparse
import contextlib
import io
import time
from copy import deepcopy
from tempfile import TemporaryDirectory

import torch
from fusion_bench.utils import instantiate
from fusion_bench.utils.instantiate_utils import set_print_function_call
from lightning import Fabric
from lightning.fabric.loggers import CSVLogger
from omegaconf import DictConfig

from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.demo.train import RECIPES, Recipe
from fusion_bench_nufilt.stream import Evaluator

RECIPES["b32"] = Recipe(
    train_pictures=64, test_pictures=64, width=768, layers=12, heads=12, patch=4, widening=4,
    text_width=512, text_layers=12, text_steps=1, pretrain_steps=1, finetune_steps=2, batch=8,
)  # fmt: skip


def time_stages(method, modelpool, taskpool) -> None:
    """Print a table of what `fusion_bench` prints at the end of a run; loading is part of checking,
    too.
    """
    with TemporaryDirectory() as folder:
        method._fabric_instance = Fabric(devices=1, loggers=[CSVLogger(folder)])
        begin = time.perf_counter()
        method.run(modelpool, taskpool)
        whole = time.perf_counter() - begin
    print("| stage | seconds |\n| --- | --- |")
    for stage, seconds in (method.profiler.recorded_durations | {"whole run": [whole]}).items():
        print(f"| {stage} | {sum(seconds):.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "overrides", nargs="+", help="of fusion_bench: a model pool that brings its CLIP task pool"
    )
    parser.add_argument("--steps", type=int, help="only the first so many steps")
    parser.add_argument(
        "--run", action="store_true", help="a run by stage, with every step saved and scored"
    )
    arguments = parser.parse_args()

    run = compose_run(["method=nufilt", *arguments.overrides])
    config = run.modelpool
    with set_print_function_call(False):
        modelpool = instantiate({key: value for key, value in config.items() if key != "taskpool"})
        names = modelpool.model_names[: arguments.steps]
        model = modelpool.load_pretrained_model()

        def make_pool():
            taskpool = instantiate(config.taskpool)
            taskpool._fabric_instance = Fabric(devices=1)
            return taskpool

        if arguments.run:
            return time_stages(instantiate(run.method), modelpool, make_pool())

        ours, theirs = Evaluator(make_pool()), make_pool()
        datasets = deepcopy(theirs._test_datasets)
        seconds = {"reset at every step": [], "set up once": []}
        for step in range(1, len(names) + 1):
            begin = time.perf_counter()
            with contextlib.redirect_stderr(io.StringIO()):
                theirs._is_setup = False
                theirs._test_datasets = DictConfig({name: datasets[name] for name in names[:step]})
                expected = theirs.evaluate(deepcopy(model))
                middle = time.perf_counter()
                report = ours.report(model, names[:step])
            seconds["reset at every step"].append(middle - begin)
            seconds["set up once"].append(time.perf_counter() - middle)
            assert all(
                report[name]["accuracy"] == expected[name]["accuracy"] for name in names[:step]
            )

    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {len(names)} steps, the "
        "same scores both ways\n"
    )
    print(
        "| task pool | first step (s) | last step (s) | all steps (s) |\n| --- | --- | --- | --- |"
    )
    for label, times in seconds.items():
        print(f"| {label} | {times[0]:.1f} | {times[-1]:.1f} | {sum(times):.1f} |")
    first, second = (sum(times) for times in seconds.values())
    print(f"\nratio {first / second:.1f}")


if __name__ == "__main__":
    main()
