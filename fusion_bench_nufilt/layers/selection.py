"""Which layers are merged."""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from fusion_bench_nufilt.layers.families import FAMILIES

log = logging.getLogger(__name__)


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
        for family, mark, pattern in FAMILIES:
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
