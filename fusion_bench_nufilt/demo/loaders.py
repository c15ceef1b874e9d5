"""What the demo's model pool and task pool point at with `_target_`."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset
from transformers import CLIPModel, CLIPProcessor, CLIPVisionModel

from fusion_bench_nufilt.demo.build import demo_folder
from fusion_bench_nufilt.demo.recipe import active_recipe
from fusion_bench_nufilt.demo.tasks import TASKS
from fusion_bench_nufilt.demo.train import load_pictures, normalise


class Pictures(Dataset[dict[str, object]]):
    """Pictures as FusionBench expects them: `{"image": PIL.Image, "label": int}`."""

    def __init__(self, images: Tensor, labels: Tensor):
        """`images`: uint8 (n, 32, 32, 3); `labels`: int64 (n,)."""
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, object]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        image = Image.fromarray(self.images[index].numpy())
        return {"image": image, "label": int(self.labels[index])}


def load_vision_model(name: str) -> CLIPVisionModel:
    """The pretrained vision tower (`_pretrained_`) or the one fine-tuned on a task."""
    _check(name, {"_pretrained_", *TASKS}, "model")
    return CLIPVisionModel.from_pretrained(demo_folder() / name)


def load_clip() -> CLIPModel:
    """The whole pretrained CLIP, whose text tower names the classes of every task."""
    return CLIPModel.from_pretrained(demo_folder() / "clip")


def load_processor() -> CLIPProcessor:
    """Its tokenizer and image processor."""
    return CLIPProcessor.from_pretrained(demo_folder() / "clip", use_fast=False)


def load_test_dataset(task: str) -> Pictures:
    """The pictures of one task that no model was trained on."""
    _check(task, set(TASKS), "task")
    return Pictures(**load_file(demo_folder() / "pictures" / f"{task}.safetensors"))


def load_train_dataset(task: str) -> Pictures:
    """The pictures that a task's model was fine-tuned on."""
    _check(task, set(TASKS), "task")
    return Pictures(*load_pictures(active_recipe(), task))


def to_pixels(image: Image.Image) -> Tensor:
    """PIL image of 32 by 32 → (3, 32, 32): what the image processor gives, without its overhead.

    That would take longer than the model does.
    """
    return normalise(torch.from_numpy(np.array(image)))


def _check(name: str, known: set[str], kind: str) -> None:
    if name not in known:
        raise ValueError(f"the demo has no {kind} {name!r}, only {', '.join(sorted(known))}")
