"""Eight small tasks and a tiny CLIP, made on the spot, without a download.

The first load makes all models in a cache folder, which takes a minute or two. The model pool and
the task pool `nufilt_demo` hand the loaders to FusionBench's own CLIP pools.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from filelock import FileLock, Timeout
from PIL import Image
from torch import Tensor
from torch.utils.data import TensorDataset
from tqdm.auto import tqdm
from transformers import CLIPModel, CLIPProcessor, CLIPTokenizer, CLIPVisionModel
from transformers.utils import logging as transformers_logging

from fusion_bench_nufilt.continual.taskpools.local_tasks import register_task
from fusion_bench_nufilt.utils.files import Manifest
from fusion_bench_nufilt.utils.finished import FinishedFolder
from fusion_bench_nufilt.utils.options import unknown

from .render import SIDE
from .tasks import TASKS
from .train import (
    Recipe,
    active_recipe,
    draw_pictures,
    finetune,
    normalise,
    pretrain,
    standard_error,
)

TOWERS = ("_pretrained_", *TASKS)
PARTS = ("clip", *TOWERS)  # each after those from which it is made
_DIGESTS = "digests.json"  # of the other files of a part

# The one that needs no torchvision, which has another name in transformers 5.
ImageProcessor: Any = (
    getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor
)


def _register(name: str) -> None:
    """Tell FusionBench the class names and the prompt of a task, which it has in one registry."""
    register_task(name, TASKS[name].classes, TASKS[name].template)


for _name in TASKS:
    _register(_name)


class Pictures(TensorDataset):
    """Items `{"image": PIL.Image, "label": int}`, from pictures (n, 32, 32, 3) and labels (n,)."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return {"image": Image.fromarray(image.numpy()), "label": int(label)}


def load_vision_model(name: str) -> CLIPVisionModel:
    """Load the pretrained vision tower (`_pretrained_`) or the one fine-tuned on a task."""
    if name not in TOWERS:
        raise ValueError(unknown("model of the demo", name, TOWERS))
    folder = demo_folder() / name
    with _quiet_transformers():
        return CLIPVisionModel.from_pretrained(folder)


def load_clip() -> CLIPModel:
    """Load the whole pretrained CLIP."""
    folder = demo_folder() / "clip"
    with _quiet_transformers():
        return CLIPModel.from_pretrained(folder)


def load_processor() -> CLIPProcessor:
    """Load the CLIP's tokenizer and image processor."""
    clip = demo_folder() / "clip"
    return CLIPProcessor(ImageProcessor.from_pretrained(clip), CLIPTokenizer.from_pretrained(clip))


def load_test_dataset(task: str) -> Pictures:
    """Draw the pictures of a task that no model was trained on."""
    if task in TASKS:
        _register(task)  # a user's task of the same name may have been in its place
    return Pictures(*draw_pictures(active_recipe(), task, held_out=True))


def load_train_dataset(task: str) -> Pictures:
    """Draw the pictures that a task's model was fine-tuned on."""
    return Pictures(*draw_pictures(active_recipe(), task, held_out=False))


def to_pixels(image: Image.Image) -> Tensor:
    """Convert an image to pixel values (3, 32, 32), as the slower image processor does."""
    return normalise(torch.from_numpy(np.array(image)))


def cache_folder() -> Path:
    """Return $NUFILT_CACHE, or else `fusion_bench_nufilt` in the user's cache folder."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fusion_bench_nufilt"
    return Path(os.environ.get("NUFILT_CACHE") or folder).expanduser()


def demo_folder() -> Path:
    """Return the folder of the active recipe, with the models `clip` and `_pretrained_` and one for
    each task.

    One process builds missing parts while others wait. A part appears once it is complete, so that
    an interrupted build goes on where it stopped. One whose files have changed since is made again.
    """
    recipe = active_recipe()
    folder = cache_folder() / recipe.fingerprint()
    if not _missing_parts(folder):
        return folder
    _refuse_unwritable(folder)
    lock = FileLock(folder / ".lock")  # which the system releases when the process ends
    try:
        # Without waiting at first, so that who has to wait is told.
        lock.acquire(timeout=0)
    except Timeout:
        _say("waiting for another process that is building the demo")
        lock.acquire()
    try:
        _build(recipe, folder)
    finally:
        lock.release()
    return folder


def _refuse_unwritable(folder: Path) -> None:
    """Make a folder in which files can be made; an OSError says where else to have it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".lock").touch()
    except OSError as error:
        raise OSError(
            f"the demo's models can't be written to '{folder}' ({error.strerror}): set "
            "NUFILT_CACHE to a folder that can be written"
        ) from None


def _build(recipe: Recipe, folder: Path) -> None:
    """Make the parts that the folder lacks, unless another process has made them meanwhile."""
    missing_parts = _missing_parts(folder)
    if not missing_parts:
        return
    _say(f"building the demo, once, in {folder} (a minute or two)")
    with _quiet_transformers():
        for part in tqdm(missing_parts, "Demo", unit="model", file=standard_error(), disable=None):
            with _reproducible(recipe), _part_in(folder / part).keep({}) as draft:
                _make(recipe, part, draft, folder / "clip")


def _missing_parts(folder: Path) -> list[str]:
    return [part for part in PARTS if not _is_whole(folder / part)]


#: By part, the sizes and times of its files when their digests were verified by this process.
_verified: dict[Path, list[tuple[int, int]]] = {}


def _part_in(folder: Path) -> FinishedFolder[Manifest]:
    return FinishedFolder(folder / _DIGESTS, Manifest, "it is made again")


def _is_whole(folder: Path) -> bool:
    """Tell whether a part is there, with the files that were written."""
    part = _part_in(folder)
    try:
        manifest = part.content()
        if manifest is None:
            return False
        states = []
        for name in manifest.get("files", {}):
            state = (folder / name).stat()
            states.append((state.st_size, state.st_mtime_ns))
        # Every load of a model comes here, and digests take longer than the rest of it.
        if not states or _verified.get(folder) != states:
            part.whole()
            _verified[folder] = states
    except (OSError, ValueError):
        return False
    return True


def _make(recipe: Recipe, part: str, draft: Path, pretrained: Path) -> None:
    """Write a part to the folder `draft`; towers are made from the CLIP in the folder
    `pretrained`.
    """
    if part == "clip":
        clip, tokenizer = pretrain(recipe, draft)
        clip.save_pretrained(draft)
        # By default it would enlarge pictures to CLIP's 224 pixels.
        image_processor = ImageProcessor(
            size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
        )
        CLIPProcessor(image_processor, tokenizer).save_pretrained(draft)
        return
    vision = CLIPVisionModel.from_pretrained(pretrained)
    if part in TASKS:
        clip = CLIPModel.from_pretrained(pretrained)
        tokenizer = CLIPTokenizer.from_pretrained(pretrained)
        finetune(recipe, clip, tokenizer, vision, part)
    vision.save_pretrained(draft)


def _say(message: str) -> None:
    print(f"fusion_bench_nufilt.demo: {message}", file=standard_error(), flush=True)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide the bars of transformers, and its report that a vision tower has no words."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def _reproducible(recipe: Recipe) -> Iterator[None]:
    """Train in the same way whatever the caller's seed, threads and gradient mode are, and restore
    those.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(recipe.threads)
    try:
        # Pools load models inside runs without gradients, in which nothing could be trained.
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            torch.default_generator.manual_seed(recipe.seed)
            yield
    finally:
        torch.set_num_threads(threads)
