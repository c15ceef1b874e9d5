"""Measure what merging does to a generative model: perplexity of a tiny byte-level Llama on text it
was not tuned for.

    python benchmarks/perplexity.py

The base is trained on Python's standard library, and fine-tuned on licences, C headers and Perl
modules, as far as this machine has them. Every text is cut in two: the last tenth is held out. One
order, one seed.
"""

import math
import sysconfig
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fusion_bench_nufilt import LayerwiseMergingAlgorithm, NufiltContinualMergingAlgorithm

LENGTH, BATCH = 64, 16
TEXTS = {
    "python": (sysconfig.get_path("stdlib"), "*.py"),
    "licences": ("/usr/share/common-licenses", "*"),
    "c": ("/usr/include", "*.h"),
    "perl": ("/usr/share/perl", "**/*.pm"),
}


def read(folder: str, pattern: str, limit: int = 2_000_000) -> tuple[Tensor, Tensor]:
    files = sorted({path.resolve() for path in Path(folder).glob(pattern) if path.is_file()})
    text = torch.frombuffer(
        bytearray(b"".join(path.read_bytes() for path in files)[:limit]), dtype=torch.uint8
    ).long()
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def batch(text: Tensor, generator: torch.Generator, size: int = BATCH) -> Tensor:
    starts = torch.randint(len(text) - LENGTH, (size,), generator=generator)
    return text[starts[:, None] + torch.arange(LENGTH)]


def train(model: LlamaForCausalLM, text: Tensor, steps: int, lr: float) -> LlamaForCausalLM:
    generator, model = torch.Generator().manual_seed(0), model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = (
            lr * min(1, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
        )
        tokens = batch(text, generator)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, text: Tensor) -> float:
    tokens = batch(text, torch.Generator().manual_seed(1), size=128)
    return math.exp(model(input_ids=tokens, labels=tokens).loss.item())


def main() -> None:
    texts = {name: read(*where) for name, where in TEXTS.items()}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
    )
    base = train(LlamaForCausalLM(config), texts["python"][0], steps=900, lr=3e-3)
    tuned = {
        name: train(deepcopy(base), texts[name][0], 120, 1e-3) for name in TEXTS if name != "python"
    }
    rest = {"target_modules": "all-linear", "other_params": "mean", "shuffle_order": False}
    methods = {
        "spectral": LayerwiseMergingAlgorithm("spectral", **rest),
        "spectral, ramp": LayerwiseMergingAlgorithm("spectral", **rest, ramp=0.4),
        "NUFILT all-linear": NufiltContinualMergingAlgorithm(
            **rest, null_rank=1 / 6, lora_rank=1 / 12
        ),
        "the plain sum": NufiltContinualMergingAlgorithm(**rest, null_space=False, lora_rank=0),
    }
    rows = {"base": base} | {f"tuned on {name}": model for name, model in tuned.items()}
    for count in range(1, len(tuned) + 1):
        pool = {"_pretrained_": base} | dict(list(tuned.items())[:count])
        rows |= {f"{name}, {count} merged": method.run(pool) for name, method in methods.items()}
    print("| perplexity on | " + " | ".join(texts) + " |\n| --- |" + " ---: |" * len(texts))
    for name, model in rows.items():
        print(
            f"| {name} | "
            + " | ".join(f"{perplexity(model, text):.2f}" for _, text in texts.values())
            + " |",
            flush=True,
        )


if __name__ == "__main__":
    main()
