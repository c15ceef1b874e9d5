"""The demo's models: a tiny CLIP is trained on all tasks, then its vision tower on each one.

Like the CLIPs of the merging literature, the pretrained model sees much and names it badly, and
fine-tuning moves only the vision tower, and only a little.
"""

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TextIO

import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers.pre_tokenizers import ByteLevel
from torch import Generator, Tensor, nn
from tqdm.auto import trange
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer, CLIPVisionModel
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from fusion_bench_nufilt.utils.options import unknown

from .render import SIDE
from .tasks import TASKS, render

Loss = Callable[[], Tensor]

MEAN = torch.tensor(OPENAI_CLIP_MEAN)
STD = torch.tensor(OPENAI_CLIP_STD)
ALL_PROMPTS = list(chain.from_iterable(task.prompts() for task in TASKS.values()))


@dataclass(frozen=True)
class Recipe:
    """All numbers on which the models depend; those of another recipe are kept in another
    folder.
    """

    edition: int = 1  # raised when the code makes other models of the same numbers
    seed: int = 0
    # The order of sums depends on it, and two would be very slow on a busy machine.
    threads: int = 1

    train_pictures: int = 2000  # of each task
    test_pictures: int = 320

    width: int = 128
    layers: int = 3
    heads: int = 4
    patch: int = 8
    widening: int = 2  # of the MLPs; CLIP has 4, but 2 is enough here and a third faster
    text_width: int = 64
    text_layers: int = 1

    text_steps: int = 100  # before and after pretraining, which is on all tasks at once
    text_lr: float = 2e-3
    pretrain_steps: int = 1000
    pretrain_lr: float = 2e-3
    pretrain_warmup: int = 50
    # How far, in feature lengths, prompts are then moved away from their pictures.
    misalignment: float = 6.0
    finetune_steps: int = 90
    finetune_lr: float = 5e-4
    batch: int = 64

    def fingerprint(self) -> str:
        """Return a short name for exactly this recipe."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:12]


TINY = Recipe(
    train_pictures=64, test_pictures=16, width=64, layers=2, heads=2, text_width=32,
    text_steps=10, pretrain_steps=10, finetune_steps=5, batch=32,
)  # fmt: skip
"""For tests: made in seconds, and its models know next to nothing."""

RECIPES = {"full": Recipe(), "tiny": TINY}


def active_recipe() -> Recipe:
    """Return the recipe that $NUFILT_DEMO names: "full" (the default) or "tiny"."""
    name = os.environ.get("NUFILT_DEMO", "full")
    if name not in RECIPES:
        raise ValueError(unknown("NUFILT_DEMO", name, RECIPES))
    return RECIPES[name]


def normalise(pictures: Tensor) -> Tensor:
    """Convert uint8 (..., 32, 32, 3) to float32 (..., 3, 32, 32), as CLIP's image processor
    does.
    """
    return ((pictures.float() / 255 - MEAN) / STD).movedim(-1, -3)


def standard_error() -> TextIO:
    """Return standard error, also while a comparison silences it: training takes minutes."""
    if getattr(sys.stderr, "name", None) == os.devnull and sys.__stderr__ is not None:
        return sys.__stderr__
    return sys.stderr


def make_tokenizer(folder: Path) -> CLIPTokenizer:
    """Return a CLIP tokenizer with a token for each word of the prompts; its files are written to
    `folder`.
    """
    letters = sorted(ByteLevel.alphabet())
    ranks: dict[tuple[str, str], int] = {}  # the merges of byte-pair encoding, in their order
    words = set(" ".join(ALL_PROMPTS).split())
    # A set of words has another order in each process, and the ids follow from the order.
    for word in sorted(words):
        # Merge as the tokenizer will, earliest merge first, and add a merge where none applies.
        parts = [*word[:-1], word[-1] + "</w>"]
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            pair = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
            ranks.setdefault(pair, len(ranks))
            i = pairs.index(pair)
            parts[i : i + 2] = ["".join(pair)]
    vocabulary = letters + [letter + "</w>" for letter in letters]
    merged_parts = {first + second for first, second in ranks}
    vocabulary += sorted(merged_parts - set(vocabulary))
    vocabulary += ["<|startoftext|>", "<|endoftext|>"]
    ids = {token: i for i, token in enumerate(vocabulary)}
    vocab_file = folder / "vocab.json"
    vocab_file.write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2"]
    lines += [f"{first} {second}" for first, second in ranks]
    merges_file = folder / "merges.txt"
    merges_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return CLIPTokenizer(str(vocab_file), str(merges_file), model_max_length=77)


def make_clip(recipe: Recipe, tokenizer: CLIPTokenizer) -> CLIPModel:
    """Return an untrained CLIP, whose weights are drawn from torch's global generator."""

    vision = {
        "hidden_size": recipe.width,
        "intermediate_size": recipe.widening * recipe.width,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "projection_dim": recipe.width,
        "hidden_act": "gelu",
        "image_size": SIDE,
        "patch_size": recipe.patch,
    }
    text = {
        "hidden_size": recipe.text_width,
        "intermediate_size": recipe.widening * recipe.text_width,
        "num_hidden_layers": recipe.text_layers,
        "num_attention_heads": 2,
        "projection_dim": recipe.width,
        "hidden_act": "gelu",
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 77,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = CLIPConfig(
        projection_dim=recipe.width,
        vision_config=vision,
        text_config=text,
    )
    return CLIPModel(config)


@torch.no_grad()
def initialise_embeddings(clip: CLIPModel, pictures: Tensor, generator: Generator) -> None:
    """Initialise the vision tower's embeddings so that it learns fast.

    Patches become whitened principal components, since random ones would show little but
    brightness. Positions become waves in x and y as strong as the patches, since random ones are
    too weak at first for attention.
    """
    embeddings = clip.vision_model.embeddings
    weight = embeddings.patch_embedding.weight
    width, _, size, _ = weight.shape
    patches = F.unfold(normalise(pictures), size, stride=size)  # (pictures, elements, patches)
    patches = patches.transpose(1, 2).flatten(0, 1)
    _, S, Vh = torch.linalg.svd(patches - patches.mean(0), full_matrices=False)
    std = S / len(patches) ** 0.5
    damped_std = std + 0.05 * std[0]  # weak components are mostly noise
    components = (Vh / damped_std[:, None])[:width]
    rotation, _ = torch.linalg.qr(torch.randn(width, width, generator=generator))
    filters = rotation[:, : len(components)] @ components
    weight.copy_(0.5 * filters.view_as(weight))

    side = SIDE // size
    positions = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    frequencies = torch.linspace(math.pi / side, math.pi, width // 4)
    phase = positions[..., None] * frequencies
    waves = torch.cat([phase.sin(), phase.cos()], dim=-1).flatten(1)
    embeddings.position_embedding.weight[0] = 0
    embeddings.position_embedding.weight[1:] = 0.5 * waves


def minimise(
    loss: Loss,
    parameters: Iterable[nn.Parameter],
    steps: int,
    lr: float,
    warmup: int = 0,
    decay: float = 0,
) -> None:
    """Train by AdamW; the learning rate rises linearly and then falls to zero along a cosine."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=decay, betas=(0.9, 0.98))
    for step in trange(steps, unit="step", leave=False, file=standard_error(), disable=None):
        rise = min(1.0, (step + 1) / (warmup + 1))
        fall = 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = lr * rise * fall
        optimizer.zero_grad()
        loss().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()


def text_features(clip: CLIPModel, tokenizer: CLIPTokenizer, prompts: list[str]) -> Tensor:
    """Return one unit row for each prompt."""
    tokens = tokenizer(prompts, padding=True, return_tensors="pt")
    pooled = clip.text_model(**tokens).pooler_output
    return F.normalize(clip.text_projection(pooled), dim=-1)


def contrast_with(
    target: Tensor,
    clip: CLIPModel,
    vision: nn.Module,
    pictures: Tensor,
    labels: Tensor,
    batch: int,
    generator: Generator,
) -> Loss:
    """Return CLIP's loss of a newly drawn batch: a picture must find its prompt among `target`."""
    # The temperature stays what it is: only towers and projections are trained.
    scale = clip.logit_scale.exp().item()

    def loss() -> Tensor:
        i = torch.randint(len(pictures), (batch,), generator=generator)
        pooled = vision(pixel_values=normalise(pictures[i])).pooler_output
        features = F.normalize(clip.visual_projection(pooled), dim=-1)
        return F.cross_entropy(scale * features @ target.T, labels[i])

    return loss


def draw_pictures(recipe: Recipe, task: str, *, held_out: bool) -> tuple[Tensor, Tensor]:
    """Draw a task's pictures (n, 32, 32, 3) for training or, held out, for testing, and their
    labels (n,).
    """
    if task not in TASKS:
        raise ValueError(unknown("task of the demo", task, TASKS))
    number = recipe.train_pictures
    if held_out:
        number = recipe.test_pictures
    pictures, labels = render(task, number, held_out=held_out, seed=recipe.seed)
    return torch.from_numpy(pictures), torch.from_numpy(labels)


def pretrain(recipe: Recipe, folder: Path) -> tuple[CLIPModel, CLIPTokenizer]:
    """Train the pretrained model; the tokenizer's files are left in `folder`."""
    generator = Generator().manual_seed(recipe.seed)
    tokenizer = make_tokenizer(folder)
    clip = make_clip(recipe, tokenizer).train()
    pictures_by_task = []
    labels_by_task = []
    num_classes = 0
    for name, task in TASKS.items():
        task_pictures, task_labels = draw_pictures(recipe, name, held_out=False)
        pictures_by_task.append(task_pictures)
        labels_by_task.append(num_classes + task_labels)  # a number among the classes of all tasks
        num_classes += len(task.classes)
    pictures = torch.cat(pictures_by_task)
    labels = torch.cat(labels_by_task)
    sample = torch.randperm(len(pictures), generator=generator)[:2000]
    initialise_embeddings(clip, pictures[sample], generator)

    # 1. Move words apart from each other, so that they can serve as targets.
    words = [*clip.text_model.parameters(), *clip.text_projection.parameters()]

    def crowding() -> Tensor:
        features = text_features(clip, tokenizer, ALL_PROMPTS)
        return F.cross_entropy(10 * features @ features.T, torch.arange(len(features)))

    minimise(crowding, words, recipe.text_steps, recipe.text_lr)

    # 2. Move pictures towards their words.
    target = text_features(clip, tokenizer, ALL_PROMPTS).detach()
    matching = contrast_with(
        target, clip, clip.vision_model, pictures, labels, recipe.batch, generator
    )
    vision = [*clip.vision_model.parameters(), *clip.visual_projection.parameters()]
    minimise(
        matching,
        vision,
        recipe.pretrain_steps,
        recipe.pretrain_lr,
        recipe.pretrain_warmup,
        decay=0.05,
    )

    # 3. Move words away from their pictures: a real CLIP sees better than it names, so that
    #    fine-tuning gains much by small changes, and merging works.
    noise = torch.randn(target.shape, generator=generator) / target.shape[1] ** 0.5
    moved_target = F.normalize(target + recipe.misalignment * noise, dim=-1)

    def distance() -> Tensor:
        features = text_features(clip, tokenizer, ALL_PROMPTS)
        cosines = (features * moved_target).sum(-1)
        return 1 - cosines.mean()

    minimise(distance, words, recipe.text_steps, recipe.text_lr)
    return clip.eval(), tokenizer


def finetune(
    recipe: Recipe, clip: CLIPModel, tokenizer: CLIPTokenizer, vision: CLIPVisionModel, task: str
) -> None:
    """Train `vision` in place on one task; all other weights of `clip` are frozen."""
    clip.requires_grad_(False)
    pictures, labels = draw_pictures(recipe, task, held_out=False)
    target = text_features(clip, tokenizer, TASKS[task].prompts())
    generator = Generator().manual_seed(recipe.seed)
    loss = contrast_with(target, clip, vision.train(), pictures, labels, recipe.batch, generator)
    minimise(loss, vision.parameters(), recipe.finetune_steps, recipe.finetune_lr)
    vision.eval()
