"""Merge models of your own, held in memory, one after another."""

from copy import deepcopy

import torch
from transformers import CLIPVisionConfig, CLIPVisionModel

from fusion_bench.method import NUFILTMerging


def finetune(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Stands for training: a copy with a random step on every parameter."""
    generator = torch.Generator().manual_seed(seed)
    copy = deepcopy(model)
    for parameter in copy.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    return copy


if __name__ == "__main__":
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    base = CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=16, patch_size=8))
    algorithm = NUFILTMerging(shuffle_order=False, null_rank=8, lora_rank=4)
    merged = algorithm.run(
        {"_pretrained_": base, "birds": finetune(base, 1), "cars": finetune(base, 2)}
    )
    print(
        type(merged).__name__,
        "with",
        sum(p.numel() for p in merged.parameters()),
        "parameters",
    )
