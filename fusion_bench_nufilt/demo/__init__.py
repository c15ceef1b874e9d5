"""Eight small tasks and a tiny CLIP, which are made on the spot, without a download.

The first load draws the pictures, pretrains the CLIP and fine-tunes it eight times, which takes a minute or two, and
keeps them in a cache folder; every later one reads from there. `config/modelpool/nufilt_demo.yaml` and
`config/taskpool/nufilt_demo.yaml` hand the loaders to FusionBench's own CLIP pools.
"""

from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import TensorDataset
from transformers import CLIPModel, CLIPProcessor, CLIPVisionModel

from fusion_bench_nufilt.taskpools.local_tasks import register_task

from .build import demo_folder
from .tasks import TASKS
from .train import active_recipe, draw_pictures, normalise

# FusionBench's task pool asks its registry for class names and prompts.
for _name, _task in TASKS.items():
    register_task(_name, _task.classes, _task.template)


class Pictures(TensorDataset):
    """Items `{"image": PIL.Image, "label": int}`, from tensors (n, 32, 32, 3) of uint8 and (n,) of int64."""

    def __getitem__(self, index: int) -> Any:
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
    """Convert an image of 32 by 32 to the pixel values (3, 32, 32) of the image processor, which is slower."""
    return normalise(torch.from_numpy(np.array(image)))


def _check(name: str, known: set[str], kind: str) -> None:
    if name not in known:
        raise ValueError(f"the demo has no {kind} {name!r}, only {', '.join(sorted(known))}")
