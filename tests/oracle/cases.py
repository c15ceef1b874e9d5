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
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import AutoTokenizer
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
IMAGE_CLASSIFIERS = ("vit", "dinov2")
CLASSIFIERS = ("bert", "roberta", *IMAGE_CLASSIFIERS)
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
    saved: tuple[str, ...] = ()  # in full: a kind of norms, embeddings, the output head
    embeddings: bool = False
    tokens: bool = False  # two rows of the embeddings are trained
    tying: bool = False  # what is tied stays so
    experts: bool = False  # fused ones


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


def last_name(model: nn.Module, part: nn.Module | None) -> str:
    """Return the last part of the name of a module in a model."""
    for name, module in model.named_modules():
        if module is part:
            return name.rpartition(".")[2]
    raise AssertionError("it is no part of the model")


def expert_names(model: nn.Module) -> list[str]:
    """Return the last two parts of the names of fused experts."""
    names = set()
    for path, module in model.named_modules():
        for name, value in module.named_parameters(recurse=False):
            if value.ndim == 3 and path.endswith("experts"):
                names.add(f"{path.rpartition('.')[2]}.{name}")
    return sorted(names)


def modules_of_head(model: nn.Module) -> list[str]:
    """Return the names of what a classifier has beside the model that it is made from."""
    names = []
    for name, module in model.named_children():
        if name != model.base_model_prefix and next(module.parameters(), None) is not None:
            names.append(name)
    return names


def saved_modules(lora: Lora, model: nn.Module) -> list[str]:
    """Return the names of the modules that are saved in full."""
    modules = []
    if "norms" in lora.saved:
        norms = [module for module in model.modules() if "Norm" in type(module).__name__]
        names = {last_name(model, module) for module in norms}
        modules.append(min(name for name in names if not name.isdecimal()))
    if "embeddings" in lora.saved:
        modules.append(last_name(model, model.get_input_embeddings()))
    if "head" in lora.saved and output_head(model) is not None:
        modules.append(last_name(model, output_head(model)))
    return modules


def lora_config(task: Task, model: nn.Module) -> LoraConfig:
    """Return what peft makes of an adapter's description for the model that it starts from."""
    lora = task.lora
    assert lora is not None
    names = linear_names(model)
    if not names:
        raise ValueError("there is no linear layer with a name")
    targets = sorted({names[number % len(names)] for number in lora.targets})
    settings: dict[str, Any] = {"fan_in_fan_out": _is_conv1d(model, targets[0])}
    if lora.pattern:
        settings["rank_pattern"] = {targets[0]: 2}
        settings["alpha_pattern"] = {targets[0]: 5}
    modules = saved_modules(lora, model)
    if task.labels and task.seed % 2 and model.main_input_name == "input_ids":
        settings["task_type"] = "SEQ_CLS"  # which brings its head
    elif task.labels:
        modules += modules_of_head(model)
    if modules:
        settings["modules_to_save"] = modules
    if lora.experts:
        settings["target_parameters"] = expert_names(model)
    if lora.first_block:
        settings["layers_to_transform"] = [0]
    if lora.embeddings and not lora.tokens:  # peft refuses both
        targets.append(last_name(model, model.get_input_embeddings()))
    if lora.tokens:
        embeddings = last_name(model, model.get_input_embeddings())
        settings["trainable_token_indices"] = {embeddings: [3, 7]}
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        target_modules=targets,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        bias=lora.bias,
        ensure_weight_tying=lora.tying,
        **settings,
    )


def _is_conv1d(model: nn.Module, target: str) -> bool:
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == target and isinstance(module, Conv1D):
            return True
    return False


class NotTrainableError(Exception):
    """peft does not make this adapter, or not so that it runs."""


def save_adapter(folder: Path, base: nn.Module, task: Task) -> None:
    """Save an adapter of random values; NotTrainableError if peft can't train it."""
    torch.manual_seed(task.seed)  # peft draws A
    try:
        model = get_peft_model(base, lora_config(task, base))
    except (ValueError, NotImplementedError, AttributeError, TypeError) as error:
        raise NotTrainableError(str(error)) from error
    trained_rows = [
        module for module in model.modules() if isinstance(module, TrainableTokensLayer)
    ]
    for module in trained_rows:
        if isinstance(module.base_layer, ModulesToSaveWrapper):
            raise NotTrainableError("peft runs no rows of a module that is saved in full")
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
    if task.labels:
        return with_head(model, task)
    return model


def classifier_class(model: nn.Module) -> Any:
    """Return the class of a model with a classifier in place of its head."""
    classes = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    return classes.get(type(model.config), type(model))


def with_head(model: nn.Module, task: Task) -> nn.Module:
    """Return a model with a task's classifier in place of its head."""
    config = deepcopy(model.config)
    config.num_labels = task.labels
    torch.manual_seed(task.seed)
    classifier = classifier_class(model)(config).eval()
    kept = {}
    for key, value in model.state_dict().items():
        if key.startswith(f"{model.base_model_prefix}."):
            kept[key] = value
    classifier.load_state_dict(kept, strict=False)
    return classifier


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


def save_tokens(
    folder: Path, model: nn.Module, tokens: list[str], seed: int, *, exactly: bool = False
) -> None:
    """Save a tokenizer, and give its new tokens rows in the model, which may have further ones."""
    words = tokenizer(*tokens)
    torch.manual_seed(seed)
    if exactly or len(words) > model.config.vocab_size:
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
        tokens = [NEW_TOKENS[number] for number in task.tokens]
        if task.lora is not None:
            model = with_head(stored, task) if task.labels else deepcopy(stored)
            if tokens:
                # Peft saves the embeddings if their number differs from the base's.
                save_tokens(folder / name, model, tokens, task.seed, exactly=True)
            save_adapter(folder / name, model, task)
            continue
        model = trained(stored, task)
        if case.with_tokenizer:
            save_tokens(folder / name, model, tokens, task.seed)
        shards = task.shards and not task.old_names
        dtype = task.dtype or case.dtype
        save_model(folder / name, model, dtype, shards=shards, old_names=task.old_names)


@torch.no_grad()
def loaded(
    case: Case, folder: Path, dtype: torch.dtype = torch.float64, labels: int = 0
) -> nn.Module:
    """Return the model of a folder in float64 as transformers loads it, with all of its keys, or
    with a classifier of its own or a new one.
    """
    base = base_model(case.family, case.tied)
    options: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    if labels:
        options |= {"num_labels": labels, "ignore_mismatched_sizes": True}
        model, _ = classifier_class(base).from_pretrained(folder, **options)
        return model.eval()
    model, info = type(base).from_pretrained(folder, **options)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[problem], f"{folder.name}: {problem} {info[problem]}"
    return model.eval()


def untied(model: nn.Module) -> nn.Module:
    """Give each module that shares its weight one of its own, as it has where factors are added to
    one of them alone, or to each.
    """
    weights = set()
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        if weight in weights:
            weight = nn.Parameter(weight.detach().clone())
            module.weight = weight
        weights.add(weight)
    return model


def adapted(base: nn.Module, folder: Path) -> nn.Module:
    """Return peft's model of an adapter, unmerged, in which nothing is tied any more."""
    return untied(PeftModel.from_pretrained(base, folder).eval())


def task_model(case: Case, folder: Path, number: int) -> nn.Module:
    """Return a task's model as transformers loads it, or as peft makes it of its adapter."""
    task = case.tasks[number]
    own_folder = folder / case.names[number]
    if task.lora is None:
        return untied(loaded(case, own_folder, labels=task.labels))
    base = loaded(case, folder / "base", labels=task.labels)
    if task.tokens:
        words = AutoTokenizer.from_pretrained(own_folder)
        base.resize_token_embeddings(len(words), mean_resizing=False)
    return adapted(base, own_folder)


def state_of(case: Case, folder: Path, number: int) -> dict[str, torch.Tensor]:
    """Return a task's tensors as transformers loads them and peft merges them."""
    model = task_model(case, folder, number)
    if isinstance(model, PeftModel):
        model = model.merge_and_unload()
    return model.state_dict()


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
                if task.lora is not None:
                    yield "LoRA", f"own {field}"
        if task.dtype not in ("", case.dtype):
            yield "task", f"{task.dtype} on {case.dtype}"
        if task.lora is not None:
            yield from lora_kinds(task.lora)


def lora_kinds(lora: Lora) -> Iterator[tuple[str, str]]:
    names = ("rslora", "dora", "first_block", "pattern", "embeddings", "tokens", "tying", "experts")
    drawn = [name for name in names if getattr(lora, name)]
    drawn += [f"saved {name}" for name in lora.saved]
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
