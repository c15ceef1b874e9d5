"""What the oracle draws: models of all families as they are saved, merged by all methods in all
ways. A case prints as the Python that makes it again, and as a command.

    python -m tests.oracle.cases "Case('gpt2', (Task(seed=1),))" FOLDER

saves the models of a case in a folder, and prints how they are merged.
"""

import dataclasses
import math
import re
import sys
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from fusion_bench_nufilt.methods.options import Settings
from tests.families import FAMILIES
from tests.merge.helpers import RANKS, rename
from tests.models.test_vocabulary import WORDS, tokenizer
from tests.released import RELEASED, released
from tests.tiny_models import adapt_at_random, clip, finetuned, full_clip, t5

BUILDERS = {
    **{name: lambda name=name: released(name) for name in RELEASED},
    **FAMILIES,
    "CLIP vision": clip,
    "CLIP": full_clip,
    "T5": t5,
}
#: Language models whose class takes token numbers and gives logits.
TEXT = tuple(name for name, (kind, _) in RELEASED.items() if kind.endswith("ForCausalLM"))
TEXT = (*(name for name in TEXT if name != "Phi-4-multimodal"), "gpt2", "qwen2", "mistral")
CLASSIFIERS = ("bert", "roberta", "vit", "dinov2")
#: Families whose checkpoints of before have LayerNorm.gamma and LayerNorm.beta.
RENAMED = ("bert", "roberta")
SHARD = "20KB"
NEW_TOKENS = ("<one>", "<two>", "three")


class Short:
    """What prints without the fields that have their defaults."""

    def __repr__(self) -> str:
        words = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value != field.default:
                words.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(words)})"


@dataclasses.dataclass(frozen=True, repr=False)
class Lora(Short):
    """An adapter's configuration; targets are numbers among the names of linear layers."""

    r: int = 4
    alpha: int = 8
    targets: tuple[int, ...] = (0, 1)
    rslora: bool = False
    dora: bool = False
    first_block: bool = False  # of two
    pattern: bool = False  # another rank and alpha for the first of its targets
    bias: str = "none"
    norms: bool = False  # saved whole
    embeddings: bool = False
    tokens: bool = False  # two rows of the embeddings are trained


@dataclasses.dataclass(frozen=True, repr=False)
class Task(Short):
    """A fine-tuned model, or an adapter."""

    seed: int
    lora: Lora | None = None
    dtype: str = ""  # the base's
    scale: float = 0.01
    few: bool = False  # every third parameter was trained
    shards: bool = False
    old_names: bool = False
    tokens: tuple[int, ...] = ()  # numbers among NEW_TOKENS
    labels: int = 0  # of another head


@dataclasses.dataclass(frozen=True, repr=False)
class Case(Short):
    """A base, its tasks, and how they are merged."""

    family: str
    tasks: tuple[Task, ...]
    dtype: str = "float32"
    shards: bool = False
    tied: bool | None = None  # as the family is
    old_names: bool = False
    method: str = "sum"
    options: tuple[tuple[str, Any], ...] = ()
    way: str = "at once"
    law: str = ""

    @property
    def names(self) -> list[str]:
        return [f"task{number}" for number in range(1, len(self.tasks) + 1)]

    @property
    def with_tokenizer(self) -> bool:
        return any(task.tokens for task in self.tasks)

    def command(self) -> str:
        """Return how a user would merge the models."""
        words = ["nufilt merge --base base"]
        words += [f"--task {name}" for name in self.names]
        words.append(f"--out out --method {self.method}")
        options = dict(self.options)
        if self.method == "nufilt":
            options = RANKS | options
        for name, value in options.items():
            text = str(list(value) if isinstance(value, tuple) else value)
            words.append(f"{name}={text.replace(' ', '')}")
        return " ".join(words)


def settings_of(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the method and of the targets, and the settings."""
    names = {field.name for field in dataclasses.fields(Settings)}
    options: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for name, value in case.options:
        given = list(value) if isinstance(value, tuple) else value
        if name in names:
            settings[name] = given
        else:
            options[name] = given
    return options, settings


@cache
def base_model(family: str, tied: bool | None) -> nn.Module:
    """Return the model that a family's tasks start from, which nobody changes."""
    if tied is None:
        return BUILDERS[family]()
    name, settings = RELEASED[family]
    RELEASED[family] = (name, {**settings, "tie_word_embeddings": tied})
    try:
        return released(family)
    finally:
        RELEASED[family] = (name, settings)


def linear_names(model: nn.Module) -> list[str]:
    """Return the last parts of the names of linear layers but the output head, in order."""
    head = output_head(model)
    names = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            names.append(name.rpartition(".")[2])
    return sorted(name for name in set(names) if not name.isdecimal())


def output_head(model: nn.Module) -> nn.Module | None:
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def embedding_name(model: nn.Module) -> str:
    """Return the last part of the name of a model's embeddings of tokens."""
    embeddings = model.get_input_embeddings()
    for name, module in model.named_modules():
        if module is embeddings:
            return name.rpartition(".")[2]
    raise AssertionError("a language model has embeddings")


def lora_config(lora: Lora, model: nn.Module) -> LoraConfig:
    names = linear_names(model)
    if not names:
        raise ValueError("there is no linear layer with a name")
    targets = sorted({names[number % len(names)] for number in lora.targets})
    settings: dict[str, Any] = {"fan_in_fan_out": _is_conv1d(model, targets[0])}
    if lora.pattern:
        settings["rank_pattern"] = {targets[0]: 2}
        settings["alpha_pattern"] = {targets[0]: 5}
    if lora.norms:
        norms = {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if "Norm" in type(module).__name__
        }
        settings["modules_to_save"] = [min(norms)]
    if lora.first_block:
        settings["layers_to_transform"] = [0]
    if lora.embeddings and not lora.tokens:  # peft refuses both
        targets.append(embedding_name(model))
    if lora.tokens:
        settings["trainable_token_indices"] = {embedding_name(model): [3, 7]}
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        target_modules=targets,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        bias=lora.bias,
        **settings,
    )


def _is_conv1d(model: nn.Module, target: str) -> bool:
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == target and isinstance(module, Conv1D):
            return True
    return False


class NotTrainableError(Exception):
    """peft does not make this adapter."""


def save_adapter(folder: Path, base: nn.Module, task: Task) -> None:
    """Save an adapter of random values; NotTrainableError if peft refuses its configuration."""
    assert task.lora is not None
    torch.manual_seed(task.seed)  # peft draws A
    try:
        model = get_peft_model(deepcopy(base), lora_config(task.lora, base))
    except (ValueError, NotImplementedError, AttributeError, TypeError) as error:
        raise NotTrainableError(str(error)) from error
    adapt_at_random(model, task.seed, 0.1)
    # As peft names the folder of a base that was loaded from there.
    model.peft_config["default"].base_model_name_or_path = str(folder.parent / "base")
    model.save_pretrained(folder)


def trained(base: nn.Module, task: Task) -> nn.Module:
    """Return the fine-tuned model of a task."""
    model = finetuned(base, seed=task.seed, scale=task.scale)
    if task.few:
        for number, (ours, theirs) in enumerate(
            zip(model.parameters(), base.parameters(), strict=True)
        ):
            if number % 3:
                ours.data.copy_(theirs.data)
    if not task.labels:
        return model
    config = deepcopy(model.config)
    config.num_labels = task.labels
    torch.manual_seed(task.seed)
    with_head = type(model)(config).eval()
    kept = {}
    for key, value in model.state_dict().items():
        if key.startswith(f"{model.base_model_prefix}."):
            kept[key] = value
    with_head.load_state_dict(kept, strict=False)
    return with_head


def save_model(
    folder: Path, model: nn.Module, dtype: str, *, shards: bool, old_names: bool
) -> None:
    model = deepcopy(model).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=SHARD if shards else "5GB")
    if old_names:
        rename(folder, old_name)


def old_name(key: str) -> str:
    key = key.replace("LayerNorm.weight", "LayerNorm.gamma")
    return key.replace("LayerNorm.bias", "LayerNorm.beta")


def save_tokens(folder: Path, model: nn.Module, tokens: list[str], seed: int) -> None:
    """Save a tokenizer, and give its new tokens rows in the model."""
    words = tokenizer(*tokens)
    torch.manual_seed(seed)
    if len(words) > model.config.vocab_size:
        model.resize_token_embeddings(len(words), mean_resizing=False)
    with torch.no_grad():
        rows = model.get_input_embeddings().weight[WORDS : len(words)]
        rows.copy_(0.1 * torch.randn(rows.shape))
    words.save_pretrained(folder)


def save_case(case: Case, folder: Path) -> None:
    """Save the folders `base`, `task1`, …; NotTrainableError if peft refuses an adapter."""
    base = base_model(case.family, case.tied)
    if case.with_tokenizer:
        base = deepcopy(base)
        save_tokens(folder / "base", base, [], seed=0)
    # A base whose names are renamed is in one file, so that no index has to be.
    shards = case.shards and not case.old_names
    save_model(folder / "base", base, case.dtype, shards=shards, old_names=case.old_names)
    stored = deepcopy(base).to(getattr(torch, case.dtype)).float()
    for name, task in zip(case.names, case.tasks, strict=True):
        if task.lora is not None:
            save_adapter(folder / name, stored, task)
            continue
        model = trained(stored, task)
        if case.with_tokenizer:
            tokens = [NEW_TOKENS[number] for number in task.tokens]
            save_tokens(folder / name, model, tokens, task.seed)
        shards = task.shards and not task.old_names
        dtype = task.dtype or case.dtype
        save_model(folder / name, model, dtype, shards=shards, old_names=task.old_names)


@torch.no_grad()
def loaded(case: Case, folder: Path, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return the model of a folder in float64 as transformers loads it, with all of its keys."""
    kind = type(base_model(case.family, case.tied))
    model, info = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[problem], f"{folder.name}: {problem} {info[problem]}"
    return model.eval()


def untied(model: nn.Module) -> nn.Module:
    """Give the output head a weight of its own, as an adapter of the embeddings alone has it."""
    head = output_head(model)
    if head is not None and head.weight is model.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    return model


def adapted(case: Case, base: Path, number: int) -> PeftModel:
    """Return peft's model of a task's adapter, unmerged."""
    model = loaded(case, base)
    lora = case.tasks[number].lora
    # peft trains rows of tied weights in both, and factors of one of them alone.
    if lora is not None and not lora.tokens:
        model = untied(model)
    return PeftModel.from_pretrained(model, base.parent / case.names[number]).eval()


def state_of(case: Case, folder: Path, number: int) -> dict[str, torch.Tensor]:
    """Return a task's tensors as transformers loads them and peft merges them."""
    name = case.names[number]
    if case.tasks[number].lora is None:
        return untied(loaded(case, folder / name)).state_dict()
    return untied(adapted(case, folder / "base", number).merge_and_unload()).state_dict()


def kinds_of(case: Case) -> Iterator[tuple[str, str]]:
    """Yield what a case has, as a column and a kind."""
    yield "family", case.family
    yield "base", case.dtype
    yield "base", "shards" if case.shards else "one file"
    if case.tied is not None:
        yield "base", "tied" if case.tied else "untied"
    if case.old_names:
        yield "base", "names of before"
    yield "method", case.method
    yield "way", case.way
    yield "law", case.law or "none"
    yield "tasks", str(len(case.tasks))
    for name, value in case.options:
        yield "option", f"{name}={value}" if isinstance(value, str | bool) else name
    for task in case.tasks:
        yield "task", "full" if task.lora is None else "LoRA"
        for field in ("few", "shards", "old_names", "tokens", "labels"):
            if getattr(task, field):
                yield "task", field
        if task.dtype not in ("", case.dtype):
            yield "task", f"{task.dtype} on {case.dtype}"
        if task.lora is not None:
            yield from lora_kinds(task.lora)


def lora_kinds(lora: Lora) -> Iterator[tuple[str, str]]:
    names = ("rslora", "dora", "first_block", "pattern", "norms", "embeddings", "tokens")
    drawn = [name for name in names if getattr(lora, name)]
    if lora.bias != "none":
        drawn.append(f"bias={lora.bias}")
    for name in drawn or ["plain"]:
        yield "LoRA", name


def block_depths(keys: list[str]) -> dict[str, float]:
    """Return how deep in its stack each key lies, from -1 to 1; keys outside of all, 0."""
    numbers: dict[str, tuple[str | None, int]] = {}
    for key in keys:
        # A number in a row of layers, as in mlp.0.weight, is no block's, which has modules inside.
        match = re.match(r"(?:(.*?)\.)?(\d+)\..*\.", key)
        if match:
            numbers[key] = (match[1], int(match[2]))
    last: dict[str | None, int] = {}
    for stack, number in numbers.values():
        last[stack] = max(last.get(stack, 0), number)
    depths = dict.fromkeys(keys, 0.0)
    for key, (stack, number) in numbers.items():
        if last[stack]:
            depths[key] = 2 * number / last[stack] - 1
    return depths


def spacing(dtype: str) -> float:
    return torch.finfo(getattr(torch, dtype)).eps


def largest(state: dict[str, torch.Tensor]) -> float:
    return max((float(value.abs().max()) for value in state.values() if value.numel()), default=0.0)


def is_close(value: torch.Tensor, expected: torch.Tensor, relative: float, absolute: float) -> bool:
    """Tell whether two tensors agree; NaN agrees with nothing."""
    if value.shape != expected.shape:
        return False
    bound = relative * expected.abs() + absolute
    return bool(((value - expected).abs() <= bound).all()) and math.isfinite(float(value.sum()))


def main() -> None:
    case = eval(sys.argv[1])  # what this module printed
    folder = Path(sys.argv[2])
    folder.mkdir()
    save_case(case, folder)
    print(f"cd {folder}\n{case.command()}\n# {case.way}; law: {case.law or 'none'}")


if __name__ == "__main__":
    main()
