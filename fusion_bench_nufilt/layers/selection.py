"""The choice of the layers that are merged."""

import logging
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from fusion_bench_nufilt.layers.families import FAMILIES
from fusion_bench_nufilt.layers.patterns import matches
from fusion_bench_nufilt.layers.views import View, opaque, views

log = logging.getLogger(__name__)


def select_layers(
    model: nn.Module,
    target_modules: str | Sequence[str] = "auto",
    exclude_modules: str | Sequence[str] | None = None,
) -> dict[str, View]:
    """Return the layers to merge of a model, by their :func:`layer_name`; a weight that modules share comes once.

    Patterns follow peft's rules. One string is a regular expression that must match the whole module name. A list
    names words of the dotted module path, one of which must be found (``q_proj``, ``self_attn``, ``layers.0``); words
    end at dots and underscores, so that ``attn`` finds ``self_attn``. Where a module holds several layers, patterns
    are also matched with the name of the part: ``attn.in_proj.q``, ``experts.3.down_proj``. Two strings are special:
    ``all-linear`` is every linear layer but the output head, and ``auto`` is the paper's layers for CLIP vision towers
    and T5, and all projections in numbered blocks for other models; it logs what it chose. What ``exclude_modules``
    matches in the same language is left out.

    Raises:
        ValueError: nothing is left to merge, or a word of a list finds nothing (the message lists some names that
            there are); a named weight is quantised, or holds no matrix, such as a convolution in groups.
    """
    there, unknown = views(model), opaque(model)
    target = _rule(model, there, unknown, target_modules, _output_head(model))
    exclude = None if exclude_modules is None else _rule(model, there, unknown, exclude_modules, head=None)
    for name, why in unknown.items():
        refused = "quantised" in why or target.explicit
        if refused and target.names(name) and not (exclude and exclude.names(name)):
            raise ValueError(f"{why}; exclude_modules can leave it out")
    chosen = [view for view in there if target.takes(view) and not (exclude and exclude.takes(view))]
    if not chosen:
        raise ValueError(
            f"target_modules={_plain(target_modules)!r}, exclude_modules={_plain(exclude_modules)!r} leave no layer "
            f"of {type(model).__name__} to merge; {_some(view.name for view in there)}"
        )
    once: dict[tuple[int, tuple[int, int]], View] = {}
    for view in chosen:
        once.setdefault((id(model.get_parameter(view.key)), view.rows), view)
    return {layer_name(view.name): view for view in once.values()}


def layer_name(name: str) -> str:
    """Return the name of a layer without the prefix of CLIP vision towers, which transformers 5 drops."""
    return name.removeprefix("vision_model.")


class _Rule(NamedTuple):
    """The user's patterns as one regular expression for whole names."""

    pattern: str
    convolutions: bool = True
    explicit: bool = True  # whether the user named these modules

    def names(self, *names: str) -> bool:
        return any(matches(self.pattern, name, of="target_modules or exclude_modules") for name in names)

    def takes(self, view: View) -> bool:
        return (view.linear or self.convolutions) and self.names(view.name, view.module)


def _rule(
    model: nn.Module,
    there: Sequence[View],
    unknown: Iterable[str],
    patterns: str | Sequence[str],
    head: str | None,
) -> _Rule:
    if patterns == "all-linear":
        rest = "" if head is None else rf"(?!{re.escape(head)}$)"
        return _Rule(rest + ".*", convolutions=False, explicit=False)
    names = [*(view.name for view in there), *unknown]
    if patterns == "auto":
        return _auto(there, names)
    if isinstance(patterns, str):
        return _Rule(patterns)
    words = [rf"(.*[._])?{re.escape(word)}([._].*)?" for word in patterns]
    for word, pattern in zip(patterns, words, strict=True):
        if not any(re.fullmatch(pattern, name) for name in names):
            raise ValueError(f"'{word}' of {_plain(patterns)!r} names no layer; {_some(view.name for view in there)}")
    return _Rule("|".join(words))


def _auto(there: Sequence[View], names: Sequence[str]) -> _Rule:
    for family, mark, pattern, convolutions in FAMILIES:
        rule = _Rule(pattern, convolutions, explicit=False)
        found = sum(map(rule.takes, there))
        if found and any(re.fullmatch(mark, name) for name in names):
            log.info("target_modules=auto: %s, %d layers match '%s'", family, found, pattern)
            return rule
    raise ValueError(
        "target_modules=auto knows CLIP vision towers, T5, and transformers and convolutional networks with numbered "
        f"blocks, and this model is none: name its layers, or say all-linear; {_some(view.name for view in there)}"
    )


def _output_head(model: nn.Module) -> str | None:
    """Return the name of the output embedding, which peft's ``all-linear`` leaves out, too."""
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    return next((name for name, module in model.named_modules() if module is head), None)


def _plain(patterns: str | Sequence[str] | None) -> str | list[str] | None:
    return patterns if patterns is None or isinstance(patterns, str) else list(patterns)


def _some(names: Iterable[str], at_most: int = 8) -> str:
    names = list(names)
    if not names:
        return "it has no layer"
    more = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return "its layers: " + ", ".join(names[:at_most]) + more
