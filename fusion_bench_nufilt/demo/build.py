"""The demo's folder on disk: built when it is first asked for, one finished part at a time."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock, Timeout
from safetensors.torch import save_file
from tqdm.auto import tqdm
from transformers import CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer, CLIPVisionModel

from fusion_bench_nufilt.demo.recipe import Recipe, active_recipe, cache_folder
from fusion_bench_nufilt.demo.render import SIDE
from fusion_bench_nufilt.demo.tasks import TASKS, render
from fusion_bench_nufilt.demo.train import Tick, finetune, pretrain
from fusion_bench_nufilt.storage.files import atomic_folder


class Part(NamedTuple):
    """One folder of the demo."""

    title: str
    steps: int  # training steps that it takes
    make: Callable[[Recipe, Path, Tick], None]  # fills an empty folder; the parts made earlier are its siblings


def demo_folder() -> Path:
    """Return the finished folder of the active recipe: `pictures`, `clip`, `_pretrained_` and the tasks.

    What is missing is built. Each part appears at once and complete, so that an interrupted build goes on where it
    stopped. If several processes ask, one builds and the others wait.
    """
    recipe = active_recipe()
    folder = cache_folder() / recipe.fingerprint()
    if _missing(recipe, folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")  # the system releases it when the process ends, however it ends
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            _say("waiting for another process that is building the demo")
            held = lock.acquire()
        with held:
            _build(recipe, folder)
    return folder


def _missing(recipe: Recipe, folder: Path) -> dict[str, Part]:
    """Return the parts that are not there yet, each after those it is made from."""
    parts = {
        "pictures": Part("drawing test pictures", 0, _make_pictures),
        "clip": Part("pretraining a tiny CLIP", 2 * recipe.text_steps + recipe.pretrain_steps, _make_clip),
        "_pretrained_": Part("taking its vision tower", 0, partial(_make_pretrained, folder)),
    }
    for task in TASKS:
        parts[task] = Part(f"fine-tuning on {task}", recipe.finetune_steps, partial(_make_task, folder, task))
    return {name: part for name, part in parts.items() if not (folder / name).is_dir()}


def _build(recipe: Recipe, folder: Path) -> None:
    missing = _missing(recipe, folder)
    if not missing:  # another process built them while this one waited
        return
    _say(f"building the demo's pictures and models, once, in {folder} (a minute or two)")
    with tqdm(total=sum(part.steps for part in missing.values()), unit="step", disable=None) as bar:
        for name, part in missing.items():
            bar.set_description(part.title)
            with _reproducible(recipe), atomic_folder(folder / name) as draft:
                part.make(recipe, draft, bar.update)


def _make_pictures(recipe: Recipe, draft: Path, tick: Tick) -> None:
    for task in TASKS:
        images, labels = render(task, recipe.test_pictures, held_out=True, seed=recipe.seed)
        tensors = {"images": torch.from_numpy(images), "labels": torch.from_numpy(labels)}
        save_file(tensors, draft / f"{task}.safetensors")


def _make_clip(recipe: Recipe, draft: Path, tick: Tick) -> None:
    clip, tokenizer = pretrain(recipe, draft, tick)
    clip.save_pretrained(draft)
    image_processor = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    CLIPProcessor(image_processor, tokenizer).save_pretrained(draft)


def _make_pretrained(folder: Path, recipe: Recipe, draft: Path, tick: Tick) -> None:
    clip = CLIPModel.from_pretrained(folder / "clip")
    vision = CLIPVisionModel(clip.config.vision_config)
    vision.vision_model.load_state_dict(clip.vision_model.state_dict())
    vision.save_pretrained(draft)


def _make_task(folder: Path, task: str, recipe: Recipe, draft: Path, tick: Tick) -> None:
    clip = CLIPModel.from_pretrained(folder / "clip")
    tokenizer = CLIPTokenizer.from_pretrained(folder / "clip")
    vision = CLIPVisionModel.from_pretrained(folder / "_pretrained_")
    finetune(recipe, clip, tokenizer, vision, task, tick)
    vision.save_pretrained(draft)


def _say(message: str) -> None:
    print(f"fusion_bench_nufilt.demo: {message}", file=sys.stderr, flush=True)


@contextmanager
def _reproducible(recipe: Recipe) -> Iterator[None]:
    """Train the same way whatever the caller's settings are, and leave those as they were.

    FusionBench loads models inside `torch.no_grad`, with any number of threads and any seed.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(recipe.threads)
    try:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            torch.default_generator.manual_seed(recipe.seed)
            yield
    finally:
        torch.set_num_threads(threads)
