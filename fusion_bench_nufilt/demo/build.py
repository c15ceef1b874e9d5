"""The demo's folder on disk, built when it is first asked for, and the loaders that its pools name as `_target_`."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import TensorDataset
from tqdm.auto import tqdm
from transformers import CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer, CLIPVisionModel

from fusion_bench_nufilt.storage.files import atomic_folder

from .recipe import Recipe, active_recipe
from .render import SIDE
from .tasks import TASKS
from .train import Tick, draw_pictures, finetune, normalise, pretrain


def cache_folder() -> Path:
    """Return $NUFILT_CACHE, or else `fusion_bench_nufilt` in the user's cache folder."""
    if chosen := os.environ.get("NUFILT_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "fusion_bench_nufilt"


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


def _missing(recipe: Recipe, folder: Path) -> dict[str, int]:
    """Return the training steps of the parts that are not there yet, each part after those it is made from."""
    steps = {"pictures": 0, "clip": 2 * recipe.text_steps + recipe.pretrain_steps, "_pretrained_": 0}
    steps |= dict.fromkeys(TASKS, recipe.finetune_steps)
    return {part: number for part, number in steps.items() if not (folder / part).is_dir()}


def _build(recipe: Recipe, folder: Path) -> None:
    missing = _missing(recipe, folder)
    if not missing:  # another process built them while this one waited
        return
    _say(f"building the demo's pictures and models, once, in {folder} (a minute or two)")
    with tqdm(total=sum(missing.values()), unit="step", disable=None) as bar:
        for part in missing:
            bar.set_description(
                {"pictures": "drawing test pictures", "clip": "pretraining a tiny CLIP"}.get(part, part)
            )
            with _reproducible(recipe), atomic_folder(folder / part) as draft:
                if part == "pictures":
                    _make_pictures(recipe, draft)
                elif part == "clip":
                    _make_clip(recipe, draft, bar.update)
                else:
                    _make_tower(recipe, folder / "clip", part, bar.update).save_pretrained(draft)


def _make_pictures(recipe: Recipe, draft: Path) -> None:
    for task in TASKS:
        images, labels = draw_pictures(recipe, task, held_out=True)
        save_file({"images": images, "labels": labels}, draft / f"{task}.safetensors")


def _make_clip(recipe: Recipe, draft: Path, tick: Tick) -> None:
    clip, tokenizer = pretrain(recipe, draft, tick)
    clip.save_pretrained(draft)
    image_processor = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    CLIPProcessor(image_processor, tokenizer).save_pretrained(draft)


def _make_tower(recipe: Recipe, pretrained: Path, name: str, tick: Tick) -> CLIPVisionModel:
    clip = CLIPModel.from_pretrained(pretrained)
    vision = CLIPVisionModel(clip.config.vision_config)
    vision.vision_model.load_state_dict(clip.vision_model.state_dict())
    if name in TASKS:
        finetune(recipe, clip, CLIPTokenizer.from_pretrained(pretrained), vision, name, tick)
    return vision


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


class Pictures(TensorDataset):
    """Pictures as FusionBench expects them, from tensors (n, 32, 32, 3) of uint8 and (n,) of int64."""

    def __getitem__(self, index: int) -> Any:
        """Return `{"image": PIL.Image, "label": int}`."""
        image, label = super().__getitem__(index)
        return {"image": Image.fromarray(image.numpy()), "label": int(label)}


def load_vision_model(name: str) -> CLIPVisionModel:
    """Load the pretrained vision tower (`_pretrained_`) or the one fine-tuned on a task."""
    _check(name, {"_pretrained_", *TASKS}, "model")
    return CLIPVisionModel.from_pretrained(demo_folder() / name)


def load_clip() -> CLIPModel:
    """Load the whole pretrained CLIP, whose text tower encodes the class names of every task."""
    return CLIPModel.from_pretrained(demo_folder() / "clip")


def load_processor() -> CLIPProcessor:
    """Load the tokenizer and the image processor of the CLIP."""
    return CLIPProcessor.from_pretrained(demo_folder() / "clip", use_fast=False)


def load_test_dataset(task: str) -> Pictures:
    """Load the pictures of a task that no model was trained on."""
    _check(task, set(TASKS), "task")
    tensors = load_file(demo_folder() / "pictures" / f"{task}.safetensors")
    return Pictures(tensors["images"], tensors["labels"])


def load_train_dataset(task: str) -> Pictures:
    """Draw the pictures that a task's model was fine-tuned on."""
    _check(task, set(TASKS), "task")
    return Pictures(*draw_pictures(active_recipe(), task, held_out=False))


def to_pixels(image: Image.Image) -> Tensor:
    """Convert an image of 32 by 32 to pixel values (3, 32, 32).

    The result is the image processor's, whose overhead is larger than the model's time.
    """
    return normalise(torch.from_numpy(np.array(image)))


def _check(name: str, known: set[str], kind: str) -> None:
    if name not in known:
        raise ValueError(f"the demo has no {kind} {name!r}, only {', '.join(sorted(known))}")
