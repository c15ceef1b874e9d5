"""Fine-tune the same tasks in several ways, as a development set for rules that must suit every
optimiser.

    python benchmarks/tunings.py --mini8 MINI8 --out DEV --seed SEED [demo] [mini8]

A full model by AdamW, a full model by Muon, a LoRA adapter from one A that all tasks share, and a
LoRA adapter from the task's own A; adapters are merged into their towers. Each kind is a model
pool, `judge_demo_muon` and so on, in DEV/config. Of a task's training pictures the last fifth is
held out. AdamW has the learning rate of the benchmark; any other kind has the smallest rate of its
grid at which the mean accuracy on the pictures held out is at most one point below AdamW's, or else
the last one. No test picture is seen. Three kinds are also trained with a tenth of the rate, for
small task vectors and for streams of tasks that differ in size.

The CLIP of mini8 is pretrained in 3,500 steps, half as many as in `judges.py`, and nothing is
augmented in fine-tuning. Its script needs transformers 4; what it has finished is kept.
"""

import argparse
import json
from copy import deepcopy
from dataclasses import dataclass
from math import cos, pi
from pathlib import Path

import judges
import numpy as np
import torch
from muon import Muon
from peft import LoraConfig, get_peft_model
from torch import Generator, Tensor, nn
from transformers import CLIPModel, CLIPTokenizer, CLIPVisionModel
from transformers.utils import logging

from fusion_bench_nufilt.demo.train import contrast_with, normalise, text_features

BATCH = 64
RECIPES = {"demo": (90, 5e-4), "mini8": (150, 3e-4)}  # the steps, and AdamW's learning rate
GRIDS = {
    "adamw": (1,),
    "muon": (2, 4, 8),
    "lora_one": (4, 8, 16, 32),
    "lora_own": (4, 8, 16, 32),
}  # over AdamW's
GENTLE = ("adamw", "muon", "lora_own")  # kinds that are also trained with a tenth of the rate
ADAPTER = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")

Pictures = tuple[Tensor, Tensor]  # (n, 32, 32, 3) and their labels (n,)


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmarks", nargs="*", default=["demo", "mini8"], metavar="BENCHMARK")
    parser.add_argument("--mini8", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--seed", required=True, type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    mini8, out, seed = arguments.mini8.resolve(), arguments.out.resolve(), arguments.seed
    for name in arguments.benchmarks:
        folder = out / name
        if name == "demo":
            models, templates = judges.make_demo(folder, seed), judges.demo_templates()
        else:
            judges.reshuffle(mini8 / "../../data/mini8", judges.EIGHT, folder / "data", seed)
            models, less = folder / "models", ("--pre-only", "--pre-steps=3500")
            templates = judges.train(mini8, folder / "data", models, judges.EIGHT, {}, seed, less)
        if not (folder / "images").exists():
            judges.write_images(folder / "data", templates, folder / "images")
        steps, least = RECIPES[name]
        tuning = Tuning(models / "clip", folder / "data", templates, steps, seed)
        rates: dict[str, float] = {}
        goal = 0.0
        for kind, multiples in GRIDS.items():
            rates[kind], reached = tuning.choose(
                kind, [least * each for each in multiples], goal, folder / kind
            )
            goal = goal or reached - 0.01
        for kind in GENTLE:
            gentle = f"{kind}_tenth"
            rates[gentle], _ = tuning.choose(gentle, [rates[kind] / 10], 0.0, folder / gentle)
        for kind, rate in rates.items():
            recipe = {"learning_rate": rate, "num_steps": steps, "batch_size": BATCH}
            judges.write_pool(
                out / "config",
                f"{name}_{kind}",
                folder / kind,
                folder / "images",
                templates,
                recipe,
            )


@dataclass
class Task:
    """What a tower is trained on, the pictures held out, and the features of the prompts."""

    seen: Pictures
    held_out: Pictures
    target: Tensor


class Tuning:
    """A pretrained CLIP and its tasks."""

    def __init__(
        self, clip: Path, data: Path, templates: dict[str, str], steps: int, seed: int
    ) -> None:
        self.clip = CLIPModel.from_pretrained(clip).requires_grad_(False).eval()
        self.tower = CLIPVisionModel.from_pretrained(clip)
        self.folder, self.steps, self.seed = clip, steps, seed
        tokenizer = CLIPTokenizer.from_pretrained(clip)
        self.tasks = {
            name: self._load(data / f"{name}.npz", text, tokenizer)
            for name, text in templates.items()
        }

    def _load(self, file: Path, template: str, tokenizer: CLIPTokenizer) -> Task:
        with np.load(file) as arrays:
            pictures, labels = (
                torch.from_numpy(arrays[f"{part}_train"]) for part in ("images", "labels")
            )
            prompts = [template.format(name) for name in arrays["classnames"]]
        first = len(labels) - len(labels) // 5
        target = text_features(self.clip, tokenizer, prompts)
        return Task((pictures[:first], labels[:first]), (pictures[first:], labels[first:]), target)

    def choose(
        self, kind: str, rates: list[float], goal: float, folder: Path
    ) -> tuple[float, float]:
        """Save the towers of the first rate that reaches a mean accuracy on the pictures held out;
        return both.
        """
        record = folder / "held_out.json"
        if not record.exists():
            folder.mkdir(exist_ok=True)
            (folder / "clip").is_symlink() or (folder / "clip").symlink_to(self.folder)
            tried = {}
            for rate in rates:
                hits = []
                for number, (name, task) in enumerate(self.tasks.items()):
                    vision = self.finetune(kind, rate, task, number)
                    hits.append(self.accuracy(vision, task))
                    vision.save_pretrained(folder / name)
                tried[rate] = sum(hits) / len(hits)
                print(
                    f"{kind}, rate {rate:g}: {tried[rate]:.4f} of the pictures held out", flush=True
                )
                if tried[rate] >= goal:
                    break
            record.write_text(json.dumps(tried))
        rate, reached = list(json.loads(record.read_text()).items())[-1]
        return float(rate), reached

    def finetune(self, kind: str, rate: float, task: Task, number: int) -> CLIPVisionModel:
        """Return a tower trained on a task; the rate falls to zero along a cosine."""
        torch.manual_seed(self.seed + (1 + number) * kind.startswith("lora_own"))  # of A
        model = deepcopy(self.tower)
        if kind.startswith("lora"):
            model = get_peft_model(model, ADAPTER)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        layers = [
            layer
            for layer in model.modules()
            if isinstance(layer, nn.Linear) and kind.startswith("muon")
        ]
        matrices = dict.fromkeys(layer.weight for layer in layers)
        rest = [weight for weight in trained if weight not in matrices]
        optimizers = [torch.optim.AdamW(rest, betas=(0.9, 0.98), weight_decay=0.0)]
        if matrices:
            optimizers.append(
                Muon(list(matrices), weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
            )
        loss = contrast_with(
            task.target,
            self.clip,
            model.train(),
            task.seen,
            BATCH,
            Generator().manual_seed(self.seed),
        )
        for step in range(self.steps):
            model.zero_grad()
            loss().backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = rate * (1 + cos(pi * step / self.steps)) / 2
                optimizer.step()
        return (model.merge_and_unload() if kind.startswith("lora") else model).eval()

    @torch.no_grad()
    def accuracy(self, vision: CLIPVisionModel, task: Task) -> float:
        pictures, labels = task.held_out
        features = self.clip.visual_projection(
            vision(pixel_values=normalise(pictures)).pooler_output
        )
        return ((features @ task.target.T).argmax(-1) == labels).float().mean().item()


if __name__ == "__main__":
    main()
