"""The layers of a model: how its parameters hold them, which are merged, how much of the model that
is, and what their names tell.

A layer is a matrix W of shape ``(d_o, d_i)`` whose outputs are ``W x``. A :class:`MatrixView` says
which rows of which parameter hold it, and whether they hold it transposed.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fusion_bench_nufilt.methods.base import block_of
from fusion_bench_nufilt.methods.options import TargetConfig, matches
from fusion_bench_nufilt.utils.tensors import FLOATS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MatrixView:
    """One matrix in a parameter of a model."""

    name: str  # the layer's name: its module's, and the part's where a module holds several
    module: str  # the module's name
    key: str  # the parameter's key in the state dict
    shape: tuple[int, int]  # (d_o, d_i)
    rows: tuple[int, int]  # start and end of the rows in the parameter's first dimension
    stored_shape: tuple[int, ...]  # the shape in which these rows are stored
    transposed: bool = False  # whether they are stored as (d_i, d_o)
    linear: bool = True  # whether this is a linear layer and not a convolution

    def matrix(self, stored: Tensor) -> Tensor:
        """Return the matrix ``(d_o, d_i)`` in these rows of the parameter, without a copy if they
        are contiguous.
        """
        d_o, d_i = self.shape
        if self.transposed:
            return stored.reshape(d_i, d_o).T
        return stored.reshape(d_o, d_i)

    def as_stored(self, matrix: Tensor) -> Tensor:
        """Return a matrix in the form in which the parameter stores it; the inverse of
        :meth:`matrix`.
        """
        stored = matrix.T if self.transposed else matrix
        return stored.reshape(self.stored_shape)

    def read(self, model: nn.Module) -> Tensor:
        """Return the matrix in a model, which shares the model's memory if the parameter is
        contiguous.
        """
        return self.matrix(self._rows(model.get_parameter(self.key)))

    def write(self, model: nn.Module, matrix: Tensor) -> None:
        """Write a matrix into a model."""
        self._rows(model.get_parameter(self.key)).copy_(self.as_stored(matrix))

    def _rows(self, parameter: Tensor) -> Tensor:
        return parameter.detach()[slice(*self.rows)]


class Layer(NamedTuple):
    """A layer that is merged."""

    name: str  # its name in the model, which seeds the adapter
    param: str
    # Of the base checkpoint; more than one where a tied weight is stored more than once.
    keys: tuple[str, ...]
    view: MatrixView  # how the param's tensor holds the layer's matrix


def views(model: nn.Module) -> list[MatrixView]:
    """Return all matrices of a model in the order of its modules (``docs/checkpoints.md`` has a
    table).
    """
    all_views: list[MatrixView] = []
    # A module that is there under several names is under each: what it holds may be apart in files.
    for name, module in model.named_modules(remove_duplicate=False):
        all_views += _views_of(name, module)
    return all_views


def unsupported_modules(model: nn.Module) -> dict[str, str]:
    """Return the names of modules whose weights no view can hold, and why."""
    reasons = {}
    for name, module in model.named_modules():
        keys_of_views = {view.key for view in _views_of(name, module)}
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for attribute, tensor in tensors:
            key = _dotted_name(name, attribute)
            label = f"'{key}' of shape {tuple(tensor.shape)}"
            is_weight = attribute == "weight"
            is_parameter = isinstance(tensor, nn.Parameter)
            if "weight" in attribute and tensor.dtype not in FLOATS.values():
                reasons[name] = (
                    f"{label} is stored as {tensor.dtype}: quantised weights can't be merged"
                )
            elif is_weight and isinstance(module, _ConvNd) and module.groups > 1:
                reasons[name] = (
                    f"{label} is a convolution in {module.groups} groups, which is no matrix"
                )
            elif key not in keys_of_views and is_parameter and _long_sides(tensor) > 2:
                reasons[name] = (
                    f"{label} of {type(module).__name__} is no matrix or stack of matrices that "
                    "is known"
                )
    return reasons


def _views_of(name: str, module: nn.Module) -> list[MatrixView]:
    """Return the matrices in a module's own parameters."""
    own = {}
    for attribute, parameter in module.named_parameters(recurse=False):
        # One without elements holds no matrix, and has no rows to divide its size by.
        if parameter.numel():
            own[attribute] = parameter
    if isinstance(module, nn.Linear):
        return _view_of_whole(name, own, "weight")
    if _is_conv1d(module):
        return _view_of_whole(name, own, "weight", transposed=True)
    if isinstance(module, _ConvNd):
        # An output of a group sees the inputs of its group alone, and a transposed convolution
        # stores its inputs first: neither is (d_o, d_i).
        if module.groups > 1 or module.transposed:
            return []
        return _view_of_whole(name, own, "weight", linear=False)
    # By the parameter's name, since a model that is made of names has no MultiheadAttention.
    packed = own.get("in_proj_weight")
    if packed is not None and packed.ndim == 2 and len(packed) % 3 == 0:
        return _views_of_parts(name, own, "in_proj_weight", ["in_proj.q", "in_proj.k", "in_proj.v"])
    if isinstance(module, nn.MultiheadAttention):  # keys or values differ in size from queries
        return [
            *_view_of_whole(name, own, "q_proj_weight", "q_proj"),
            *_view_of_whole(name, own, "k_proj_weight", "k_proj"),
            *_view_of_whole(name, own, "v_proj_weight", "v_proj"),
        ]
    transposed = _are_experts_transposed(own)
    if transposed is not None:
        all_views = []
        for attribute in ("gate_up_proj", "down_proj"):
            experts = [f"{expert}.{attribute}" for expert in range(len(own[attribute]))]
            all_views += _views_of_parts(name, own, attribute, experts, transposed=transposed)
        return all_views
    weight = own.get("weight")
    if weight is not None and weight.ndim == 3:
        sizes = (getattr(module, "output_size", None), getattr(module, "input_size", None))
        if weight.shape[1:] == sizes:
            return _views_of_parts(name, own, "weight", list(map(str, range(len(weight)))))
    return []


def _view_of_whole(
    name: str,
    own: Mapping[str, nn.Parameter],
    attribute: str,
    part: str = "",
    *,
    transposed: bool = False,
    linear: bool = True,
) -> list[MatrixView]:
    """Return the matrix that is a whole parameter, if the module has it."""
    parameter = own.get(attribute)
    if parameter is None or parameter.dtype not in FLOATS.values() or parameter.ndim < 2:
        return []
    return _views_of_parts(name, own, attribute, [part], transposed=transposed, linear=linear)


def _views_of_parts(
    name: str,
    own: Mapping[str, nn.Parameter],
    attribute: str,
    parts: Sequence[str],
    *,
    transposed: bool = False,
    linear: bool = True,
) -> list[MatrixView]:
    """Return the matrices that lie in a parameter one below another."""
    parameter = own[attribute]
    size = len(parameter) // len(parts)
    stored_shape = (size, *parameter.shape[1:])
    sides = stored_shape
    if size == 1 and parameter.ndim == 3 and linear:  # a stack of experts
        sides = stored_shape[1:]
    height = sides[0]
    width = math.prod(sides[1:])
    shape = (width, height) if transposed else (height, width)
    key = _dotted_name(name, attribute)
    all_views = []
    for number, part in enumerate(parts):
        rows = (number * size, (number + 1) * size)
        view = MatrixView(
            _dotted_name(name, part), name, key, shape, rows, stored_shape, transposed, linear
        )
        all_views.append(view)
    return all_views


def _is_conv1d(module: nn.Module) -> bool:
    """Tell, without importing transformers, whether a module is its Conv1D: a linear layer stored
    transposed.
    """
    names = [f"{kind.__module__}.{kind.__name__}" for kind in type(module).__mro__]
    return "transformers.pytorch_utils.Conv1D" in names


def _are_experts_transposed(own: dict[str, nn.Parameter]) -> bool | None:
    """Tell whether fused experts are stored transposed, or return None if these are not fused
    experts.

    With n inputs and m hidden units, ``gate_up_proj`` and ``down_proj`` of an expert are (2m, n)
    and (n, m), or (n, 2m) and (m, n) if transposed. For no n and m are the two cases the same.
    """
    gate_up = own.get("gate_up_proj")
    down = own.get("down_proj")
    if gate_up is None or down is None or gate_up.ndim != 3 or down.ndim != 3:
        return None
    if len(gate_up) != len(down):
        return None
    height_up, width_up = gate_up.shape[1:]
    height_down, width_down = down.shape[1:]
    if (height_up, width_up) == (2 * width_down, height_down):
        return False
    if (height_up, width_up) == (width_down, 2 * height_down):
        return True
    return None


def _long_sides(tensor: Tensor) -> int:
    # A class token is (1, 1, d), and no stack of matrices.
    return sum(size > 1 for size in tensor.shape)


def _dotted_name(name: str, attribute: str) -> str:
    """Return the dotted name of a module's attribute; both may be empty, as the root module's name
    is.
    """
    return ".".join(filter(None, (name, attribute)))


class Family(NamedTuple):
    """A family of models, and the layers that ``auto`` merges in them."""

    name: str
    mark: str  # a regular expression for the name of a module that only such models have
    pattern: str  # a regular expression for the names of the layers to merge
    convolutions: bool = False  # whether convolutions are merged, too


_VLM = "vision-language model, whose vision tower and projector count as other parameters"
_IN_BLOCKS = r"(.*\.)?\d+\..*"  # inside a numbered block
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
    Family("ConvNeXt", r"(.*\.)?stages\.\d+\..*\.(dwconv|conv_dw)", _IN_BLOCKS, convolutions=True),
    Family("transformer", _IN_BLOCKS, _IN_BLOCKS),
    Family("convolutional network", _IN_BLOCKS, _IN_BLOCKS, convolutions=True),
)


def select_layers(
    model: nn.Module,
    target_modules: str | Sequence[str] = "auto",
    exclude_modules: str | Sequence[str] | None = None,
    weights: Mapping[str, str] | None = None,
) -> dict[str, MatrixView]:
    """Return the layers of a model to merge, by name; a weight of several names comes once.

    ``weights`` tells by parameter which weight it is, by default the one that the modules share.

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
    target = _make_rule(all_views, unsupported, target_modules, _output_head(model))
    exclude = _Rule("(?!)")  # which no name matches
    if exclude_modules is not None:
        exclude = _make_rule(all_views, unsupported, exclude_modules, head=None)
    for name, reason in unsupported.items():
        is_refused = "quantised" in reason or target.explicit
        # Unless they are named, other matrices without a view count as other parameters.
        if is_refused and target.fits(name) and not exclude.fits(name):
            raise ValueError(f"{reason}; exclude_modules can leave it out")
    chosen = [view for view in all_views if target.takes(view) and not exclude.takes(view)]
    if not chosen:
        raise ValueError(
            f"{target_modules=}, {exclude_modules=} leave no layer of {type(model).__name__} to "
            f"merge; {_list_layers(all_views)}"
        )
    weights = weights or shared_weights(model)
    layers: dict[str, MatrixView] = {}
    seen = set()
    for view in chosen:
        # With its rows, since the layers in one packed parameter are not one weight.
        weight = (weights[view.key], view.rows)
        if weight not in seen:
            seen.add(weight)
            layers[layer_name(view.name)] = view
    return layers


class _Rule(NamedTuple):
    """The user's patterns as one regular expression for whole names."""

    pattern: str
    convolutions: bool = True
    explicit: bool = True  # whether the user named these modules

    def fits(self, name: str) -> bool:
        return matches(self.pattern, name, of="target_modules or exclude_modules")

    def takes(self, view: MatrixView) -> bool:
        if not (view.linear or self.convolutions):
            return False
        return self.fits(view.name) or self.fits(view.module)


def _make_rule(
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
        return _auto_rule(all_views, names)
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


def _auto_rule(all_views: Sequence[MatrixView], names: Sequence[str]) -> _Rule:
    for family, mark, pattern, convolutions in FAMILIES:
        if not any(re.fullmatch(mark, name) for name in names):
            continue
        rule = _Rule(pattern, convolutions, explicit=False)
        count = sum(map(rule.takes, all_views))
        if count:
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


_TREATMENT = {
    "pretrained": "kept as the pretrained model has them",
    "first": "kept as the first task has them",
    "mean": "averaged",
}


@dataclass(frozen=True)
class Coverage:
    """Counts of parameters, and shares of the model's elements (0 to 1), by what happens to
    them.
    """

    layers: int  # number of matrices that are merged
    merged: tuple[int, float]  # number of parameters, and share of elements
    other_params: tuple[int, float]
    # Share of the elements in numbered blocks; None if there are no such blocks.
    merged_share_of_blocks: float | None
    # Names (with * for numbers) of matrices in blocks that are not merged, and their counts.
    left_out: dict[str, int]
    targets: TargetConfig

    def __str__(self) -> str:
        parameters, share = self.merged
        text = (
            f"merging {self.layers} layers in {parameters} parameters, {share:.1%} of all elements"
        )
        if self.merged_share_of_blocks is not None:
            text += f" and {self.merged_share_of_blocks:.1%} of those in blocks"
        text += (
            f"; {self.other_params[0]} other parameters ({1 - share:.1%}) are "
            f"{_TREATMENT[self.targets.other_params]}"
        )
        if self.left_out:
            text += f"; matrices in blocks that are not merged: {self.names_left_out}"
        return text

    @property
    def names_left_out(self) -> str:
        """The names in ``left_out``, with counts above one in brackets."""
        names = []
        for name, count in self.left_out.items():
            names.append(f"{name} ({count})" if count > 1 else name)
        return ", ".join(names)

    @property
    def warning(self) -> str | None:
        """The warning that ``auto`` merges less than half of the blocks, where it does."""
        share = self.merged_share_of_blocks
        if self.targets.target_modules != "auto" or share is None or share >= 0.5:
            return None
        return (
            f"target_modules=auto merges only {share:.1%} of the elements in blocks; the rest is "
            f"{_TREATMENT[self.targets.other_params]}. Name the layers in target_modules, or say "
            "all-linear, to merge more"
        )

    def as_dict(self) -> dict[str, object]:
        """Return the counts and shares as a JSON file has them."""
        shares = {"merged": self.merged, "averaged": (0, 0.0), "kept": (0, 0.0)}
        if self.targets.other_params == "mean":
            shares["averaged"] = self.other_params
        else:
            shares["kept"] = self.other_params
        content: dict[str, object] = {"layers": self.layers}
        for name, (count, share) in shares.items():
            content[name] = {"parameters": count, "share": share}
        content["merged_share_of_blocks"] = self.merged_share_of_blocks
        content["left_out"] = self.left_out
        return content


def shared_weights(model: nn.Module) -> dict[str, str]:
    """Return by parameter the first name of the weight that it is, which modules may share."""
    first_names: dict[int, str] = {}
    weights = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        weights[name] = first_names.setdefault(id(parameter), name)
    return weights


def coverage(
    model: nn.Module,
    layers: Mapping[str, MatrixView],
    targets: TargetConfig,
    weights: Mapping[str, str] | None = None,
) -> Coverage:
    """Return what a merge of ``layers`` covers of a model, whose parameters may be on the meta
    device. ``weights`` tells which weight each is, as in :func:`select_layers`.
    """
    weights = weights or shared_weights(model)
    merged: Counter[str] = Counter()  # merged elements by weight
    for view in layers.values():
        merged[weights[view.key]] += math.prod(view.shape)
    parameters = {}  # by weight
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameters[weights[name]] = parameter
    in_blocks = list(filter(in_module_of_block, parameters))
    left_out: Counter[str] = Counter()
    for key in in_blocks:
        name, _, attribute = key.rpartition(".")
        parameter = parameters[key]
        is_matrix = _looks_like_matrix(model.get_submodule(name), attribute, parameter)
        # Of a parameter that holds several layers, some may be merged and others not.
        if is_matrix and merged[key] < parameter.numel():
            left_out[without_numbers(key)] += 1
    count = sum(elements > 0 for elements in merged.values())
    share = merged.total() / sum(parameter.numel() for parameter in parameters.values())
    share_of_blocks = None
    elements_in_blocks = sum(parameters[key].numel() for key in in_blocks)
    if elements_in_blocks:
        merged_in_blocks = sum(merged[key] for key in in_blocks)
        share_of_blocks = merged_in_blocks / elements_in_blocks
    other_params = (len(parameters) - count, 1 - share)
    return Coverage(
        len(layers), (count, share), other_params, share_of_blocks, dict(left_out), targets
    )


def _looks_like_matrix(module: nn.Module, attribute: str, parameter: Tensor) -> bool:
    """Tell whether a parameter has the shape of a matrix or of several, and is neither an embedding
    nor a bias.
    """
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) or attribute.endswith("bias"):
        return False
    return _long_sides(parameter) >= 2


def layer_name(name: str) -> str:
    """Return the name of a layer, given that of its module: transformers 5 drops the prefix of CLIP
    vision towers.
    """
    # A layer's name seeds its A, so that it must be the same under both versions.
    return name.removeprefix("vision_model.")


def exclude_hint(layers: Sequence[str], common_layers: Iterable[str] = ()) -> str:
    """Return the end of a message about layers that only some of the models have, given the layers
    that all of them have.
    """
    if len(layers) == 1:
        return f"; exclude_modules=[{layers[0]}] leaves it out"
    # By a part of their names that no other has, such as that of a vision tower.
    names = list(common_layers)
    for part in layers[0].split("."):
        is_common = all(part in layer.split(".") for layer in layers)
        if is_common and not part.isdigit() and not any(part in name for name in names):
            return f"; exclude_modules='.*{part}.*' leaves them out"
    if len(layers) > 8:
        return "; exclude_modules can leave them out"
    return f"; exclude_modules=[{','.join(layers)}] leaves them out"


def in_module_of_block(tensor: str) -> bool:
    """Return whether a tensor belongs to a module inside a block, and is not the block's own
    parameter.
    """
    block = block_of(tensor)
    return block is not None and "." in block.inside


# The dots are not consumed, so that of two numbers side by side both are found.
_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")


def without_numbers(name: str) -> str:
    """Return a name with ``*`` for the numbers of blocks, so that the same layers of all blocks
    have one name.
    """
    return _NUMBER.sub("*", name)


def with_same_ending(name: str, names: Iterable[str]) -> list[str]:
    """Return the names that are the same as this one from its block on, as in ``layers.0.mlp``."""
    in_block = re.search(r"[^.]+\.\d+\..*", name)
    if in_block is None:
        return []
    ending = f".{in_block[0]}"
    return sorted(other for other in names if f".{other}".endswith(ending))
