"""Make held-out benchmarks for methods found on others: eight small tasks, the demo, and a long
stream of both.

    python benchmarks/accuracy/clips.py --mini8 MINI8 --out CLIPS [mini8] [demo] [long]

``MINI8`` holds the scripts that train a small CLIP and its fine-tuned towers (``prepare.py``,
``common.py``). Neither they nor their pictures, nor anything made of them, is part of this project.
Each benchmark becomes a folder of towers and one of images, with a model pool of its name:

    nufilt compare --modelpool clips_long --config-dir CLIPS/config ...
"""

import argparse
import dataclasses
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import yaml

SEED = 11  # of training, of the split and of the demo, unless --seed says otherwise
# The settings by which mini8's script and the demo fine-tune a tower.
MINI8 = {"learning_rate": 1e-4, "num_steps": 500, "batch_size": 64}
DEMO = {"learning_rate": 5e-4, "num_steps": 90, "batch_size": 64}
EIGHT = ("scenes", "fashion", "rsscn7", "eurosat", "svhn", "gtsrb", "mnist", "dtd10")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "benchmarks", nargs="*", default=["demo", "mini8", "long"], metavar="BENCHMARK"
    )
    parser.add_argument(
        "--mini8", required=True, type=Path, help="folder of prepare.py and common.py"
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="folder of the pictures, TASK.npz; default: MINI8/../../data/mini8",
    )
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument(
        "--seed", type=int, default=SEED, help="another seed gives other models; take another OUT"
    )
    arguments = parser.parse_args()
    seed = arguments.seed
    mini8 = arguments.mini8.resolve()
    out = arguments.out.resolve()
    data = (arguments.data or mini8 / "../../data/mini8").resolve()
    for benchmark in arguments.benchmarks:
        folder = out / benchmark
        if benchmark == "demo":
            models = make_demo(folder, seed)
            templates = demo_templates()
            recipe = DEMO
        else:
            names = EIGHT
            drawn_templates = {}
            if benchmark != "mini8":
                names = (*EIGHT, "cars")
                drawn_templates = demo_templates()
            reshuffle(data, names, folder / "data", seed)
            for task in drawn_templates:
                draw_task(task, folder / "data", seed)
            models = folder / "models"
            tasks = (*names, *drawn_templates)
            templates = train(mini8, folder / "data", models, tasks, drawn_templates, seed)
            recipe = MINI8
        write_images(folder / "data", templates, folder / "images")
        write_pool(out / "config", benchmark, models, folder / "images", templates, recipe)


def reshuffle(data: Path, names: tuple[str, ...], out: Path, seed: int) -> None:
    """Put other training pictures first; the CLIP is pretrained on the first half."""
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        with np.load(data / f"{name}.npz") as arrays:
            order = np.random.default_rng(seed).permutation(len(arrays["labels_train"]))
            shuffled = {key: arrays[key][order] for key in ("images_train", "labels_train")}
            np.savez(out / f"{name}.npz", **{**arrays, **shuffled})


def demo_templates() -> dict[str, str]:
    from fusion_bench_nufilt.demo import TASKS

    return {name: task.template for name, task in TASKS.items()}


def draw_task(name: str, out: Path, seed: int) -> None:
    """Draw a task of the demo with another seed, in mini8's format."""
    from fusion_bench_nufilt.demo.tasks import TASKS, render
    from fusion_bench_nufilt.demo.train import Recipe

    arrays = {"classnames": np.array(TASKS[name].classes)}
    for split, count in (("train", Recipe.train_pictures), ("test", Recipe.test_pictures)):
        images, labels = render(name, count, held_out=split == "test", seed=seed)
        order = np.random.default_rng(seed).permutation(count)
        arrays |= {f"images_{split}": images[order], f"labels_{split}": labels[order]}
    np.savez(out / f"{name}.npz", **arrays)


def train(
    mini8: Path,
    data: Path,
    models: Path,
    tasks: tuple[str, ...],
    more: dict[str, str],
    seed: int,
    further: tuple[str, ...] = (),
) -> dict[str, str]:
    """Run mini8's own script on these tasks, with one thread; return the prompt templates by
    task.
    """
    options = [f"--out={models}", f"--seed={seed}", *further]
    program = (
        "import runpy, sys; sys.path.insert(0, sys.argv[1]); import common; "
        f"common.TASKS = {list(tasks)!r}; common.TEMPLATES |= {more!r}; "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0] + '/prepare.py', run_name='__main__')"
    )
    environment = {**os.environ, "MINI8_DATA": str(data), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-c", program, str(mini8), *options], check=True, env=environment
    )
    templates = runpy.run_path(str(mini8 / "common.py"))["TEMPLATES"] | more
    return {task: templates[task] for task in tasks}


def make_demo(folder: Path, seed: int) -> Path:
    """Make the demo with another seed: its models, and its test pictures in mini8's format."""
    from fusion_bench_nufilt.demo import TASKS, demo_folder, load_test_dataset, load_train_dataset
    from fusion_bench_nufilt.demo.train import RECIPES

    size = os.environ.setdefault("NUFILT_DEMO", "full")
    os.environ["NUFILT_CACHE"] = str(folder)
    RECIPES[size] = dataclasses.replace(RECIPES[size], seed=seed)
    models = demo_folder()
    (folder / "data").mkdir(exist_ok=True)
    for name, task in TASKS.items():
        arrays = {}
        for split, load in (("train", load_train_dataset), ("test", load_test_dataset)):
            images, labels = load(name).tensors
            arrays |= {f"images_{split}": images.numpy(), f"labels_{split}": labels.numpy()}
        np.savez(folder / "data" / f"{name}.npz", classnames=np.array(task.classes), **arrays)
    return models


def write_images(data: Path, templates: dict[str, str], out: Path) -> None:
    script = Path(__file__).parents[2] / "examples/local_clip/npz_to_folders.py"
    files = [data / f"{task}.npz" for task in templates]
    subprocess.run([sys.executable, script, *files, "--out", out, "--train"], check=True)


def write_pool(
    config: Path,
    benchmark: str,
    models: Path,
    images: Path,
    templates: dict[str, str],
    recipe: dict[str, float],
) -> None:
    """Write a model pool and a task pool like those in ``examples/local_clip``."""
    name = f"clips_{benchmark}"
    clip = str(models / "clip")
    loaders = "fusion_bench_nufilt.continual.taskpools.local_tasks"
    pretrained = models / "_pretrained_"
    if not pretrained.is_dir():
        pretrained = models / "clip"
    model_paths = {"_pretrained_": str(pretrained)}
    train_datasets = {}
    test_datasets = {}
    for task, template in templates.items():
        model_paths[task] = str(models / task)
        train_datasets[task] = {
            "_target_": f"{loaders}.load_images",
            "name": task,
            "path": str(images / "train" / task),
        }
        test_datasets[task] = {
            "_target_": f"{loaders}.load_image_task",
            "name": task,
            "path": str(images / task),
            "template": template,
        }
    modelpool = {
        "defaults": [{"/taskpool@taskpool": name}, "_self_"],
        "_target_": "fusion_bench.modelpool.CLIPVisionModelPool",
        "_recursive_": False,
        "processor": clip,
        "models": model_paths,
        "train_datasets": train_datasets,
        "recipe": recipe,
    }
    taskpool = {
        "_target_": "fusion_bench.taskpool.CLIPVisionModelTaskPool",
        "_recursive_": False,
        "test_datasets": test_datasets,
        "clip_model": clip,
        "processor": clip,
        "data_processor": {"_target_": "fusion_bench_nufilt.demo.to_pixels", "_partial_": True},
        "dataloader_kwargs": {"batch_size": 500, "num_workers": 0, "shuffle": False},
    }
    for group, content in (("modelpool", modelpool), ("taskpool", taskpool)):
        (config / group).mkdir(parents=True, exist_ok=True)
        (config / group / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))


if __name__ == "__main__":
    main()
