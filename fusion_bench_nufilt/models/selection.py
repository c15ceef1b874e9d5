"""Which layers are merged, and the model families that ``target_modules: auto`` knows."""

import logging
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from fusion_bench_nufilt.models.names import layer_name
from fusion_bench_nufilt.models.targets import matches
from fusion_bench_nufilt.models.views import MatrixView, unsupported_modules, views

log = logging.getLogger(__name__)


class Family(NamedTuple):
    """A family of models, and the layers that ``auto`` merges in them."""

    name: str
    mark: str  # a regular expression for the name of a module that only such models have
    pattern: str  # a regular expression for the names of the layers to merge
    convolutions: bool = False  # whether convolutions are merged, too


_VLM = "vision-language model, whose vision tower and projector count as other parameters"
_BLOCKS = r"(.*\.)?\d+\..*"  # inside a numbered block
# The first family that fits wins. CLIP and T5 merge the authors' layers, the others all projections
# in blocks.
FAMILIES = (
    Family(
        "T5", r".*\.DenseReluDense\..*", r".*\.(SelfAttention|EncDecAttention|DenseReluDense)\..*"
    ),
    Family(
        _VLM,
        r"(.*\.)?(language_model|text_model\.layers)\..*",
        r"(.*\.)?(language_model\.(.*\.)?|text_model\.layers\.)\d+\..*",
    ),
    Family(
        "OpenCLIP vision tower",
        r"(.*\.)?visual\.transformer\.resblocks\.\d+\.attn\.in_proj\.q",
        r"(.*\.)?visual\.transformer\.resblocks\.\d+\.(attn\..*|mlp\.c_fc)",
    ),
    Family(
        _VLM,
        r"(.*\.)?(vision_tower|visual|embed_tokens_extend)\..*",
        r"(?!.*(vision_tower|visual|embed_tokens_extend))(.*\.)?\d+\..*",
    ),
    Family(
        "CLIP vision tower",
        r"(?!.*text_model)(.*\.)?encoder\.layers\.\d+\.mlp\.fc1",
        r"(?!.*text_model).*(attn|fc1).*",
    ),
    Family("ConvNeXt", r"(.*\.)?stages\.\d+\..*\.(dwconv|conv_dw)", _BLOCKS, convolutions=True),
    Family("transformer", _BLOCKS, _BLOCKS),
    Family("convolutional network", _BLOCKS, _BLOCKS, convolutions=True),
)


def select_layers(
    model: nn.Module,
    target_modules: str | Sequence[str] = "auto",
    exclude_modules: str | Sequence[str] | None = None,
) -> dict[str, MatrixView]:
    """Return the layers of a model to merge, by name; a weight that modules share comes once.

    Patterns follow peft's rules. One string is a regular expression that must match the whole
    module name. A list has names of modules, whole or from a dot on: ``q_proj``, ``0.mlp.fc1``.
    Where a module holds several layers, patterns are also matched with the name of the part:
    ``attn.in_proj.q``, ``3.down_proj``. Two strings are special: ``all-linear`` is every linear
    layer but the output head, and ``auto`` is the paper's layers for CLIP vision towers and T5, and
    all projections in numbered blocks for other models; it logs what it chose. What
    ``exclude_modules`` matches in the same language is left out.

    Raises:
        ValueError: nothing is left to merge, or an entry of a list finds nothing (the message lists
            some of the names there); a named weight is quantised, or holds no matrix, such as a
            convolution in groups.
    """
    there, unknown = views(model), unsupported_modules(model)
    target = _rule(there, unknown, target_modules, _output_head(model))
    nothing = _Rule("(?!)")  # which no name matches
    exclude = (
        nothing if exclude_modules is None else _rule(there, unknown, exclude_modules, head=None)
    )
    for name, why in unknown.items():
        refused = "quantised" in why or target.explicit
        if refused and target.names(name) and not exclude.names(name):
            raise ValueError(f"{why}; exclude_modules can leave it out")
    chosen = [view for view in there if target.takes(view) and not exclude.takes(view)]
    if not chosen:
        raise ValueError(
            f"{target_modules=}, {exclude_modules=} leave no layer of {type(model).__name__} to "
            f"merge; {_some(there)}"
        )
    once: dict[tuple[int, tuple[int, int]], MatrixView] = {}
    for view in chosen:
        once.setdefault((id(model.get_parameter(view.key)), view.rows), view)
    return {layer_name(view.name): view for view in once.values()}


class _Rule(NamedTuple):
    """The user's patterns as one regular expression for whole names."""

    pattern: str
    convolutions: bool = True
    explicit: bool = True  # whether the user named these modules

    def names(self, *names: str) -> bool:
        return any(
            matches(self.pattern, name, of="target_modules or exclude_modules") for name in names
        )

    def takes(self, view: MatrixView) -> bool:
        return (view.linear or self.convolutions) and self.names(view.name, view.module)


def _rule(
    there: Sequence[MatrixView],
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
    names += [view.module for view in there]
    for word in patterns:
        if not any(f".{name}".endswith(f".{word}") for name in names):
            how = (
                "must be a name or its end after a dot, or write the regular expression "
                f"'.*{re.escape(word)}.*'"
            )
            raise ValueError(f"'{word}' of {patterns!r} names no layer; it {how}; {_some(there)}")
    return _Rule(rf"(.*\.)?({'|'.join(map(re.escape, patterns))})")


def _auto(there: Sequence[MatrixView], names: Sequence[str]) -> _Rule:
    for family, mark, pattern, convolutions in FAMILIES:
        rule = _Rule(pattern, convolutions, explicit=False)
        found = sum(map(rule.takes, there))
        if found and any(re.fullmatch(mark, name) for name in names):
            log.info("target_modules=auto: %s, %d layers match '%s'", family, found, pattern)
            return rule
    raise ValueError(
        "target_modules=auto knows CLIP vision towers, T5, and transformers and convolutional "
        "networks with numbered "
        f"blocks, and this model is none: name its layers, or say all-linear; {_some(there)}"
    )


def _output_head(model: nn.Module) -> str | None:
    """Return the name of the output embedding, which ``all-linear`` leaves out, as it does in
    peft.
    """
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    return next((name for name, module in model.named_modules() if module is head), None)


def _some(there: Sequence[MatrixView], at_most: int = 8) -> str:
    if not there:
        return "it has no layer"
    more = f" and {len(there) - at_most} more" if len(there) > at_most else ""
    return "its layers: " + ", ".join(view.name for view in there[:at_most]) + more
