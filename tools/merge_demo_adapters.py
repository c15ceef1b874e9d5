"""Merge an adapter for each task of the demo into one adapter, and score what peft makes of it.

    python tools/merge_demo_adapters.py --out ADAPTER

The demo trains whole models; the best approximations of their updates are the adapters here.
"""

import argparse
import warnings
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from fusion_bench_nufilt.demo import (
    TASKS,
    demo_folder,
    load_clip,
    load_processor,
    load_test_dataset,
    load_vision_model,
)
from fusion_bench_nufilt.demo.train import normalise, text_features
from fusion_bench_nufilt.merge import Settings, merge_folders, plan_merge


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rank", type=int, default=4, help="of an adapter")
    parser.add_argument("--method", default="best")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    # peft 0.21 asks transformers for a property by its old name.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    scores = Scores()
    alone = []
    with TemporaryDirectory() as folder:
        adapters = []
        for task in TASKS:
            adapter = Path(folder) / task
            save_adapter(task, arguments.rank, adapter)
            alone.append(scores.accuracy(with_adapter(adapter), task))
            adapters.append(str(adapter))
        try:
            plan = plan_merge(
                None, adapters, settings=Settings(adapter=True), method=arguments.method
            )
            merge_folders(plan, arguments.out)
        except ValueError as error:
            parser.error(str(error))
    merged = with_adapter(arguments.out)
    together = [scores.accuracy(merged, task) for task in TASKS]
    rank = merged.peft_config["default"].r
    print(
        f"{len(TASKS)} adapters of rank {arguments.rank} in one of rank {rank}, by "
        f"{arguments.method}: {100 * fmean(together):.1f} % are right, of the adapters alone "
        f"{100 * fmean(alone):.1f} %"
    )


def save_adapter(task: str, rank: int, folder: Path) -> None:
    """Save a model's updates of its linear layers, cut to a rank."""
    base = load_vision_model("_pretrained_")
    tuned = load_vision_model(task)
    layers = [name for name, module in base.named_modules() if isinstance(module, nn.Linear)]
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=layers)
    model = get_peft_model(base, config)
    for name in layers:
        layer = model.get_submodule(f"base_model.model.{name}")
        update = tuned.get_submodule(name).weight.detach() - layer.weight.detach()
        U, s, Vh = torch.linalg.svd(update, full_matrices=False)
        layer.lora_A["default"].weight.data = s[:rank, None].sqrt() * Vh[:rank]
        layer.lora_B["default"].weight.data = U[:, :rank] * s[:rank].sqrt()
    model.peft_config["default"].base_model_name_or_path = str(demo_folder() / "_pretrained_")
    model.save_pretrained(folder)


def with_adapter(folder: Path) -> PeftModel:
    return PeftModel.from_pretrained(load_vision_model("_pretrained_"), folder).eval()


class Scores:
    """Zero-shot accuracies of vision towers of the demo's CLIP."""

    def __init__(self) -> None:
        self.clip = load_clip()
        self.tokenizer = load_processor().tokenizer

    @torch.no_grad()
    def accuracy(self, tower: nn.Module, task: str) -> float:
        pictures, labels = load_test_dataset(task).tensors
        text = text_features(self.clip, self.tokenizer, TASKS[task].prompts())
        pooled = tower(pixel_values=normalise(pictures)).pooler_output
        # The length of an image's features changes no order of its similarities.
        similarities = self.clip.visual_projection(pooled) @ text.mT
        return (similarities.argmax(dim=-1) == labels).float().mean().item()


if __name__ == "__main__":
    main()
