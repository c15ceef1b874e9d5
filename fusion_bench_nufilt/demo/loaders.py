"""Loaders that the demo's model pool and task pool name as `_target_`."""

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
        """Take `images`, uint8 (n, 32, 32, 3), and `labels`, int64 (n,)."""
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, object]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        image = Image.fromarray(self.images[index].numpy())
        return {"image": image, "label": int(self.labels[index])}


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
    return Pictures(**load_file(demo_folder() / "pictures" / f"{task}.safetensors"))


def load_train_dataset(task: str) -> Pictures:
    """Draw the pictures that a task's model was fine-tuned on."""
    _check(task, set(TASKS), "task")
    return Pictures(*load_pictures(active_recipe(), task))


def to_pixels(image: Image.Image) -> Tensor:
    """Convert an image of 32 by 32 to pixel values (3, 32, 32).

    The result is the image processor's, whose overhead is larger than the model's time.
    """
    return normalise(torch.from_numpy(np.array(image)))


def _check(name: str, known: set[str], kind: str) -> None:
    if name not in known:
        raise ValueError(f"the demo has no {kind} {name!r}, only {', '.join(sorted(known))}")
