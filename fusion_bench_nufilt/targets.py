"""Which layers are merged, and what happens to every other parameter."""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from fusion_bench_nufilt.core import options
from fusion_bench_nufilt.core.checks import check_layers, is_finite
from fusion_bench_nufilt.core.options import check_choices

log = logging.getLogger(__name__)
option = partial(options.option, panel="Layers")

OtherParams = Literal["pretrained", "first", "mean"]


@dataclass(frozen=True)
class TargetConfig:
    """Which parameters are merged by the method, and what happens to the rest; see :func:`select_layers`.

    Raises:
        ValueError: a value out of its range; the message names the key.
    """

    target_modules: str | Sequence[str] = option(
        "auto",
        "What is merged. auto takes the authors' layers for CLIP vision towers (attention and fc1) and T5 (attention "
        "and feed-forward), and all projections in the blocks of a decoder; all-linear takes every linear layer but "
        "the output head. A list names words of module names, one string is a regular expression for the whole name.",
    )
    exclude_modules: str | Sequence[str] | None = option(None, "What is left out of them, in the same language.")
    other_params: OtherParams = option(
        "pretrained",
        "Every other parameter: pretrained keeps it (the authors' setting), first takes the first task's, mean "
        "averages over the tasks.",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        _check_patterns("target_modules", self.target_modules)
        if self.exclude_modules is not None:
            _check_patterns("exclude_modules", self.exclude_modules)


def _check_patterns(key: str, value: object) -> None:
    """A pattern is one non-empty string or a non-empty list of them."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not items or not all(isinstance(i, str) and i for i in items):
        raise ValueError(f"{key} must be a string or a list of strings, none empty, got {value!r}")


_VLM = "vision-language model, whose vision tower and projector count as other parameters"
# What `target_modules: auto` picks. The first family whose mark is found among the names of the linear modules
# wins. CLIP and T5: the authors' settings. Others: all linear layers in the numbered blocks of the language model.
_FAMILIES = (
    ("T5", r".*\.DenseReluDense\..*", r".*\.(SelfAttention|EncDecAttention|DenseReluDense)\..*"),
    (_VLM, r"(.*\.)?language_model\..*", r"(.*\.)?language_model\.(.*\.)?\d+\..*"),
    (_VLM, r"(.*\.)?(vision_tower|visual)\..*", r"(?!.*(vision_tower|visual))(.*\.)?\d+\..*"),
    ("CLIP vision tower", r"(?!.*text_model)(.*\.)?encoder\.layers\.\d+\.mlp\.fc1", r"(?!.*text_model).*(attn|fc1).*"),
    ("transformer", r"(.*\.)?\d+\..*", r"(.*\.)?\d+\..*"),
)


def select_layers(
    model: nn.Module,
    target_modules: str | Sequence[str] = "auto",
    exclude_modules: str | Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """The weights of the linear layers to merge, by state-dict key; a weight shared by modules comes once.

    Patterns follow peft's rules. One string is a regular expression that must match the whole module name. A list
    names words of the dotted module path, of which one must be found (``q_proj``, ``self_attn``, ``layers.0``); words
    end at dots and underscores, so ``attn`` finds ``self_attn``. Two strings are special: ``all-linear`` is every
    linear layer but the output head, and ``auto`` the paper's layers for CLIP vision towers and T5, else all linear
    layers in numbered blocks of a decoder, which is logged.

    Args:
        model: any module.
        target_modules: what to merge.
        exclude_modules: what to leave out of it.

    Raises:
        ValueError: nothing is left to merge, or a word of a list finds nothing; lists some names there are.
    """
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    chosen = _matching(linear, target_modules, _output_head(model))
    if exclude_modules is not None:
        excluded = set(_matching(linear, exclude_modules, head=None))
        chosen = [name for name in chosen if name not in excluded]
    if not chosen:
        raise ValueError(
            f"target_modules={_plain(target_modules)!r}, exclude_modules={_plain(exclude_modules)!r} leave no linear "
            f"layer of {type(model).__name__} to merge; {_some(linear)}"
        )
    weights: dict[str, Tensor] = {}
    for name in chosen:
        if not any(linear[name].weight is weight for weight in weights.values()):
            weights[f"{name}.weight"] = linear[name].weight
    return weights


def layer_name(key: str) -> str:
    """Name of a layer, the same with and without the prefix of a CLIP vision tower that transformers 5 drops."""
    return key.removeprefix("vision_model.").removesuffix(".weight")


def _matching(linear: Mapping[str, nn.Linear], patterns: str | Sequence[str], head: str | None) -> list[str]:
    """Names that the patterns choose, in the model's order."""
    if patterns == "all-linear":
        return [name for name in linear if name != head]
    if patterns == "auto":
        for family, mark, pattern in _FAMILIES:
            if any(re.fullmatch(mark, name) for name in linear):
                chosen = [name for name in linear if re.fullmatch(pattern, name)]
                log.info("target_modules=auto: %s, %d linear layers match '%s'", family, len(chosen), pattern)
                return chosen
        raise ValueError(
            "target_modules=auto knows CLIP vision towers, T5 and transformers with numbered blocks, and this model is "
            f"none: name its layers, or say all-linear; {_some(linear)}"
        )
    if isinstance(patterns, str):
        return [name for name in linear if re.fullmatch(patterns, name)]
    named: set[str] = set()
    for word in patterns:
        found = [name for name in linear if re.search(rf"(^|[._]){re.escape(word)}([._]|$)", name)]
        if not found:
            raise ValueError(f"'{word}' of {_plain(patterns)!r} names no linear layer; {_some(linear)}")
        named.update(found)
    return [name for name in linear if name in named]


def _output_head(model: nn.Module) -> str | None:
    """Name of the output embedding, which peft's ``all-linear`` leaves out too."""
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    return next((name for name, module in model.named_modules() if module is head), None)


def _plain(patterns: str | Sequence[str] | None) -> str | list[str] | None:
    return patterns if patterns is None or isinstance(patterns, str) else list(patterns)


def _some(names: Iterable[str], at_most: int = 8) -> str:
    names = list(names)
    if not names:
        return "it has no linear layer"
    more = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return "its linear layers: " + ", ".join(names[:at_most]) + more


def check_model(pretrained: nn.Module, model: nn.Module, keys: Sequence[str], *, name: str) -> None:
    """Refuse a model that cannot be merged with the pretrained one.

    Args:
        pretrained: the reference.
        model: the model to check.
        keys: state-dict keys of the merged layers.
        name: the model's name in the pool, for the message.

    Raises:
        ValueError: a merged layer is missing, of another shape or not finite, or another parameter of the model
            is of another shape or not finite.
    """
    reference, state = pretrained.state_dict(), model.state_dict()
    layers = {key: state[key] for key in keys if key in state}
    check_layers({key: reference[key] for key in keys}, layers, model=name)
    for key, value in state.items():
        if key in layers or key not in reference or not value.is_floating_point():
            continue
        if value.shape != reference[key].shape:
            raise ValueError(
                f"model '{name}', parameter '{key}': shape {tuple(value.shape)} differs from the pretrained "
                f"model's {tuple(reference[key].shape)}"
            )
        if not is_finite(value):
            raise ValueError(f"model '{name}', parameter '{key}' has NaN or infinite values")


@torch.no_grad()
def merge_other_params(
    merged: nn.Module, task: nn.Module, keys: Iterable[str], other_params: OtherParams, step: int
) -> int:
    """Apply ``other_params`` to everything in the state dict of ``merged`` outside the merged layers, in place.

    Args:
        merged: the merged model so far; the pretrained one before step 1.
        task: the model of this step.
        keys: state-dict keys of the merged layers.
        other_params: ``pretrained``, ``first`` or ``mean``.
        step: number of the task in the stream, from 1.

    Returns:
        How many entries were written. Entries that are not floating point, or that ``task`` lacks, stay.
    """
    if other_params == "pretrained" or (other_params == "first" and step > 1):
        return 0
    ours, theirs = merged.state_dict(keep_vars=True), task.state_dict()
    done = {id(ours[key]) for key in keys}
    written = 0
    for key, value in ours.items():
        if id(value) in done or key not in theirs or not value.is_floating_point():
            continue
        done.add(id(value))
        written += 1
        new = theirs[key].to(value.device)
        value.copy_(running_mean(value, new, step))
    return written


def running_mean(mean: Tensor, new: Tensor, step: int) -> Tensor:
    r"""Mean of ``step`` tensors from that of all but the last: :math:`m_t = m_{t-1} + (\theta_t - m_{t-1}) / t`.

    Exact at t = 1; in float32 at least, so that bf16 does not stall.
    """
    if step == 1:
        return new
    wide = torch.promote_types(mean.dtype, torch.float32)
    return torch.lerp(mean.to(wide), new.to(wide), 1 / step)
