"""The demo's folder on disk: built when it is first asked for, one finished part at a time."""

from __future__ import annotations

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
    """A folder to be made: a title, the training steps it takes, and what fills it."""

    title: str
    steps: int
    make: Callable[[Recipe, Path, Tick], None]
    """(recipe, the empty folder, tick). Parts made earlier are its siblings under `folder`."""


def demo_folder() -> Path:
    """The finished folder of the active recipe: `pictures`, `clip`, `_pretrained_` and the tasks.

    Builds what is missing. Each part appears at once and complete, so that an interrupted build is
    taken up where it stopped; of several processes that ask, one builds and the others wait.
    """
    recipe = active_recipe()
    folder = cache_folder() / recipe.fingerprint()
    if any(not (folder / name).is_dir() for name in _parts(recipe, folder)):
        folder.mkdir(parents=True, exist_ok=True)
        with _only_builder(folder):
            _build(recipe, folder)
    return folder


def _parts(recipe: Recipe, folder: Path) -> dict[str, Part]:
    """All parts, each after those it is made from."""
    text, vision, tuning = 2 * recipe.text_steps, recipe.pretrain_steps, recipe.finetune_steps
    return {
        "pictures": Part("drawing test pictures", 0, _make_pictures),
        "clip": Part("pretraining a tiny CLIP", text + vision, _make_clip),
        "_pretrained_": Part("taking its vision tower", 0, partial(_make_pretrained, folder)),
    } | {task: Part(f"fine-tuning on {task}", tuning, partial(_make_task, folder, task)) for task in TASKS}


def _build(recipe: Recipe, folder: Path) -> None:
    missing = {k: p for k, p in _parts(recipe, folder).items() if not (folder / k).is_dir()}
    if not missing:
        return
    _say(f"building the demo's pictures and models, once, in {folder} (a minute or two)")
    with tqdm(total=sum(part.steps for part in missing.values()), unit="step", disable=None) as bar:
        for name, part in missing.items():
            bar.set_description(part.title)
            with _own_conditions(recipe), atomic_folder(folder / name) as draft:
                part.make(recipe, draft, bar.update)


# --- what fills the parts ---------------------------------------------------------------------


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


# --- circumstances ----------------------------------------------------------------------------


def _say(message: str) -> None:
    print(f"fusion_bench_nufilt.demo: {message}", file=sys.stderr, flush=True)


@contextmanager
def _only_builder(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. The system lets go of it when the process ends, however it ends."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say("waiting for another process that is building the demo")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _own_conditions(recipe: Recipe) -> Iterator[None]:
    """Train the same way wherever the caller stands, and leave the caller's state as it was.

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
