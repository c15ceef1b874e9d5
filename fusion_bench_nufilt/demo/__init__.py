"""Eight small tasks and a tiny CLIP, made on the spot, without a download.

The first load makes all of them in a cache folder, which takes a minute or two. The model pool and the task pool
`nufilt_demo` hand the loaders to FusionBench's own CLIP pools.
"""

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from filelock import FileLock, Timeout
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import TensorDataset
from tqdm.auto import tqdm
from transformers import CLIPModel, CLIPProcessor, CLIPTokenizer, CLIPVisionModel

from fusion_bench_nufilt.storage.files import atomic_folder
from fusion_bench_nufilt.taskpools.local_tasks import register_task

from .render import SIDE
from .tasks import TASKS
from .train import Recipe, Tick, active_recipe, draw_pictures, finetune, normalise, pretrain

# The one that needs no torchvision, which has another name in transformers 5.
ImageProcessor: Any = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor

# FusionBench's task pool asks its registry for class names and prompts.
for _name, _task in TASKS.items():
    register_task(_name, _task.classes, _task.template)


class Pictures(TensorDataset):
    """Items `{"image": PIL.Image, "label": int}`, from pictures (n, 32, 32, 3) and labels (n,)."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return {"image": Image.fromarray(image.numpy()), "label": int(label)}


def load_vision_model(name: str) -> CLIPVisionModel:
    """Load the pretrained vision tower (`_pretrained_`) or the one fine-tuned on a task."""
    _check("model", name, ["_pretrained_", *TASKS])
    return CLIPVisionModel.from_pretrained(demo_folder() / name)


def load_clip() -> CLIPModel:
    """Load the whole pretrained CLIP."""
    return CLIPModel.from_pretrained(demo_folder() / "clip")


def load_processor() -> CLIPProcessor:
    """Load the CLIP's tokenizer and image processor."""
    clip = demo_folder() / "clip"
    return CLIPProcessor(ImageProcessor.from_pretrained(clip), CLIPTokenizer.from_pretrained(clip))


def load_test_dataset(task: str) -> Pictures:
    """Load the pictures of a task that no model was trained on."""
    _check("task", task, TASKS)
    tensors = load_file(demo_folder() / "pictures" / f"{task}.safetensors")
    return Pictures(tensors["images"], tensors["labels"])


def load_train_dataset(task: str) -> Pictures:
    """Draw the pictures that a task's model was fine-tuned on."""
    _check("task", task, TASKS)
    return Pictures(*draw_pictures(active_recipe(), task, held_out=False))


def to_pixels(image: Image.Image) -> Tensor:
    """Convert an image to pixel values (3, 32, 32), as the slower image processor does."""
    return normalise(torch.from_numpy(np.array(image)))


def _check(kind: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ValueError(f"the demo has no {kind} {name!r}, only {', '.join(known)}")


def cache_folder() -> Path:
    """Return $NUFILT_CACHE, or else `fusion_bench_nufilt` in the user's cache folder."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fusion_bench_nufilt"
    return Path(os.environ.get("NUFILT_CACHE") or folder).expanduser()


def demo_folder() -> Path:
    """Return the folder of the active recipe: `pictures`, `clip`, `_pretrained_` and the tasks.

    One process builds missing parts while others wait. A part appears once it is complete, so that an interrupted build
    goes on where it stopped.
    """
    recipe = active_recipe()
    folder = cache_folder() / recipe.fingerprint()
    if _missing(recipe, folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")  # which the system releases when the process ends
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            _say("waiting for another process that is building the demo")
            held = lock.acquire()
        with held:
            if missing := _missing(recipe, folder):  # unless another process built them meanwhile
                _build(recipe, folder, missing)
    return folder


def _missing(recipe: Recipe, folder: Path) -> dict[str, int]:
    """Return the training steps of the missing parts, each after those from which it is made."""
    steps = {"pictures": 0, "clip": 2 * recipe.text_steps + recipe.pretrain_steps, "_pretrained_": 0}
    steps |= dict.fromkeys(TASKS, recipe.finetune_steps)
    return {part: number for part, number in steps.items() if not (folder / part).is_dir()}


def _build(recipe: Recipe, folder: Path, missing: dict[str, int]) -> None:
    _say(f"building the demo, once, in {folder} (a minute or two)")
    with tqdm(total=sum(missing.values()), unit="step", disable=None) as bar:
        for part in missing:
            bar.set_description(part)
            with _reproducible(recipe), atomic_folder(folder / part) as draft:
                _make(recipe, part, draft, folder / "clip", bar.update)


def _make(recipe: Recipe, part: str, draft: Path, pretrained: Path, tick: Tick) -> None:
    """Write a part to the folder `draft`; towers are made from the CLIP in the folder `pretrained`."""
    if part == "pictures":
        for task in TASKS:
            images, labels = draw_pictures(recipe, task, held_out=True)
            save_file({"images": images, "labels": labels}, draft / f"{task}.safetensors")
    elif part == "clip":
        clip, tokenizer = pretrain(recipe, draft, tick)
        clip.save_pretrained(draft)
        image_processor = ImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
        CLIPProcessor(image_processor, tokenizer).save_pretrained(draft)
    else:
        vision = CLIPVisionModel.from_pretrained(pretrained)
        if part in TASKS:
            clip, tokenizer = CLIPModel.from_pretrained(pretrained), CLIPTokenizer.from_pretrained(pretrained)
            finetune(recipe, clip, tokenizer, vision, part, tick)
        vision.save_pretrained(draft)


def _say(message: str) -> None:
    print(f"fusion_bench_nufilt.demo: {message}", file=sys.stderr, flush=True)


@contextmanager
def _reproducible(recipe: Recipe) -> Iterator[None]:
    """Train in the same way whatever the caller's seed, threads and gradient mode are, and restore those."""
    threads = torch.get_num_threads()
    torch.set_num_threads(recipe.threads)
    try:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            torch.default_generator.manual_seed(recipe.seed)
            yield
    finally:
        torch.set_num_threads(threads)
