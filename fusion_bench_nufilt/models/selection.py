"""Which layers are merged, and the model families that ``target_modules: auto`` knows."""

import logging
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from fusion_bench_nufilt.methods.options import matches
from fusion_bench_nufilt.models.names import layer_name
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
        # Before CLIP's, whose names SmolVLM's image encoder has.
        r"(.*\.)?(language_model|text_model\.layers)\..*",
        r"(.*\.)?(language_model\.(.*\.)?|text_model\.layers\.)\d+\..*",
    ),
    Family(
        # Before the models that have a tower called visual: here it is what is merged.
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
    # Before transformers, which its linear layers resemble: its convolutions are merged, too.
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
    all_views = views(model)
    unsupported = unsupported_modules(model)
    target = _rule(all_views, unsupported, target_modules, _output_head(model))
    exclude = _Rule("(?!)")  # which no name matches
    if exclude_modules is not None:
        exclude = _rule(all_views, unsupported, exclude_modules, head=None)
    for name, reason in unsupported.items():
        is_refused = "quantised" in reason or target.explicit
        # Unless they are named, other matrices without a view count as other parameters.
        if is_refused and target.names(name) and not exclude.names(name):
            raise ValueError(f"{reason}; exclude_modules can leave it out")
    chosen = [view for view in all_views if target.takes(view) and not exclude.takes(view)]
    if not chosen:
        raise ValueError(
            f"{target_modules=}, {exclude_modules=} leave no layer of {type(model).__name__} to "
            f"merge; {_list_layers(all_views)}"
        )
    layers: dict[str, MatrixView] = {}
    seen = set()
    for view in chosen:
        # With its rows, since the layers in one packed parameter are not one weight.
        weight = (id(model.get_parameter(view.key)), view.rows)
        if weight not in seen:
            seen.add(weight)
            layers[layer_name(view.name)] = view
    return layers


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
    all_views: Sequence[MatrixView],
    unsupported: Iterable[str],
    patterns: str | Sequence[str],
    head: str | None,
) -> _Rule:
    if patterns == "all-linear":
        pattern = ".*"
        if head is not None:
            pattern = rf"(?!{re.escape(head)}$).*"
        return _Rule(pattern, convolutions=False, explicit=False)
    names = [view.name for view in all_views]
    names += unsupported
    if patterns == "auto":
        return _auto(all_views, names)
    if isinstance(patterns, str):
        return _Rule(patterns)
    names += [view.module for view in all_views]
    for word in patterns:
        if not any(f".{name}".endswith(f".{word}") for name in names):
            raise ValueError(
                f"'{word}' of {patterns!r} names no layer; it must be a name or its end after a "
                f"dot, or write the regular expression '.*{re.escape(word)}.*'; "
                f"{_list_layers(all_views)}"
            )
    words = "|".join(map(re.escape, patterns))
    return _Rule(rf"(.*\.)?({words})")


def _auto(all_views: Sequence[MatrixView], names: Sequence[str]) -> _Rule:
    for family, mark, pattern, convolutions in FAMILIES:
        rule = _Rule(pattern, convolutions, explicit=False)
        count = sum(map(rule.takes, all_views))
        if count and any(re.fullmatch(mark, name) for name in names):
            log.info("target_modules=auto: %s, %d layers match '%s'", family, count, pattern)
            return rule
    raise ValueError(
        "target_modules=auto knows CLIP vision towers, T5, and transformers and convolutional "
        "networks with numbered blocks, and this model is none: name its layers, or say "
        f"all-linear; {_list_layers(all_views)}"
    )


def _output_head(model: nn.Module) -> str | None:
    """Return the name of the output embedding, which ``all-linear`` leaves out, as it does in
    peft.
    """
    get_head = getattr(model, "get_output_embeddings", None)
    if not callable(get_head):
        return None
    head = get_head()
    for name, module in model.named_modules():
        if module is head:
            return name
    return None


def _list_layers(all_views: Sequence[MatrixView], at_most: int = 8) -> str:
    if not all_views:
        return "it has no layer"
    text = "its layers: " + ", ".join(view.name for view in all_views[:at_most])
    if len(all_views) > at_most:
        text += f" and {len(all_views) - at_most} more"
    return text
