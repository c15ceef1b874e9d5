"""
Which matrices of a model are merged, and how its parameters hold them.

A layer is a matrix W (d_o, d_i) whose outputs are W x: a linear layer, a Conv1D of GPT-2,
q, k and v of one packed parameter, one expert of a packed mixture, or a convolution.
"""

import logging
import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Dict, Iterator, List, NamedTuple, Sequence, Set, Tuple, Union

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layer:
    """One matrix in a parameter of a model."""

    name: str  # the module's, and the part's where a module holds several
    module: str
    key: str  # the parameter's key in the state dict
    shape: Tuple[int, int]  # (d_o, d_i)
    rows: slice  # of the parameter's first dimension
    stored: Tuple[int, ...]  # the shape in which these rows are stored
    transposed: bool = False  # whether they are stored as (d_i, d_o)
    linear: bool = True  # and not a convolution

    def read(self, model: nn.Module) -> Tensor:
        """Return the matrix in a model, which shares the model's memory where it can."""
        part = model.get_parameter(self.key).detach()[self.rows]
        if self.transposed:
            return part.reshape(self.shape[::-1]).T
        return part.reshape(self.shape)

    def write(self, model: nn.Module, matrix: Tensor):
        """Write a matrix into a model."""
        if self.transposed:
            matrix = matrix.T
        model.get_parameter(self.key).detach()[self.rows] = matrix.reshape(self.stored)


def all_layers(model: nn.Module) -> List[Layer]:
    """Return all matrices of a model, in the order of its modules."""
    layers = []
    for name, module in model.named_modules():
        layers += _layers_of(name, module)
    return layers


def _layers_of(name: str, module: nn.Module) -> Iterator[Layer]:
    own = dict(module.named_parameters(recurse=False))

    def split(
        attribute: str, parts: Sequence[str] = ("",), transposed=False, linear=True
    ) -> Iterator[Layer]:
        parameter = own.get(attribute)
        if parameter is None or parameter.ndim < 2 or not _is_float(parameter):
            return
        size = len(parameter) // len(parts)
        stored = (size, *parameter.shape[1:])
        expert = size == 1 and parameter.ndim == 3 and linear
        height, *sides = stored[1:] if expert else stored
        shape = (math.prod(sides), height) if transposed else (height, math.prod(sides))
        key = _join(name, attribute)
        for i, part in enumerate(parts):
            path = _join(name, part)
            rows = slice(i * size, (i + 1) * size)
            yield Layer(path, name, key, shape, rows, stored, transposed, linear)

    if isinstance(module, nn.Linear):
        yield from split("weight")
    elif type(module).__name__ == "Conv1D":  # of transformers, stored transposed
        yield from split("weight", transposed=True)
    elif isinstance(module, _ConvNd):
        if module.groups == 1 and not module.transposed:
            yield from split("weight", linear=False)
    elif "in_proj_weight" in own and own["in_proj_weight"].shape[0] % 3 == 0:
        yield from split("in_proj_weight", ("in_proj.q", "in_proj.k", "in_proj.v"))
    elif isinstance(module, nn.MultiheadAttention):  # keys or values of another size
        for part in ("q_proj", "k_proj", "v_proj"):
            yield from split(f"{part}_weight", (part,))
    elif "gate_up_proj" in own and own["gate_up_proj"].ndim == 3:  # packed experts
        n, *up = own["gate_up_proj"].shape
        _, *down = own["down_proj"].shape
        if up in ([2 * down[1], down[0]], [down[1], 2 * down[0]]):
            for attribute in ("gate_up_proj", "down_proj"):
                parts = [f"{i}.{attribute}" for i in range(n)]
                yield from split(attribute, parts, transposed=up[0] == down[1])
    elif "weight" in own and own["weight"].ndim == 3 and hasattr(module, "output_size"):
        experts = [str(i) for i in range(len(own["weight"]))]  # GraniteMoE
        yield from split("weight", experts)


def _is_float(tensor: Tensor) -> bool:
    # float8 is quantised
    return tensor.is_floating_point() and tensor.element_size() > 1


def _join(*parts: str) -> str:
    return ".".join(filter(None, parts))


class Family(NamedTuple):
    """A kind of models, and the layers that ``auto`` merges in them."""

    name: str
    mark: str  # matches the name of a layer that only such models have
    pattern: str  # matches the names of the layers to merge
    convolutions: bool = False  # whether convolutions are merged, too


VLM = "vision-language model, whose vision tower and projector are not merged"
BLOCKS = r"(.*\.)?\d+\..*"  # inside a numbered block
RESBLOCKS = r"(.*\.)?visual\.transformer\.resblocks\.\d+\."
# The first that fits wins. CLIP and T5 are the authors' choice; of all other models, all
# projections in blocks are merged.
FAMILIES = (
    Family(
        "T5",
        r".*\.DenseReluDense\..*",
        r".*\.(SelfAttention|EncDecAttention|DenseReluDense)\..*",
    ),
    Family(
        VLM,
        r"(.*\.)?(language_model|text_model\.layers)\..*",
        r"(.*\.)?(language_model\.(.*\.)?|text_model\.layers\.)\d+\..*",
    ),
    Family(
        "OpenCLIP vision tower",
        RESBLOCKS + r"attn\.in_proj\.q",
        RESBLOCKS + r"(attn\..*|mlp\.c_fc)",
    ),
    Family(
        VLM,
        r"(.*\.)?(vision_tower|visual|embed_tokens_extend)\..*",
        r"(?!.*(vision_tower|visual|embed_tokens_extend))(.*\.)?\d+\..*",
    ),
    Family(
        "CLIP vision tower",
        r"(?!.*text_model)(.*\.)?encoder\.layers\.\d+\.mlp\.fc1",
        r"(?!.*text_model).*(attn|fc1).*",
    ),
    Family(
        "ConvNeXt",
        r"(.*\.)?stages\.\d+\..*\.(dwconv|conv_dw)",
        BLOCKS,
        convolutions=True,
    ),
    Family("transformer", BLOCKS, BLOCKS),
    Family("convolutional network", BLOCKS, BLOCKS, convolutions=True),
)


def select_layers(
    model: nn.Module,
    target_modules: Union[str, List[str]] = "auto",
    exclude_modules: Union[str, List[str], None] = None,
) -> Dict[str, Layer]:
    """
    Return the layers to merge by their names; a weight that modules share comes once.

    Args:
        model: the pretrained model.
        target_modules: ``auto``; ``all-linear`` for every linear layer but the output head;
            a list of names of modules, whole or from a dot on (``q_proj``); or one regular
            expression for the whole name.
        exclude_modules: what is left out, named in the same way.

    Raises:
        ValueError: nothing is left, an entry of a list names no layer, or a weight is quantised.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not _is_float(module.weight):
            what = f"'{name}' is stored as {module.weight.dtype}"
            raise ValueError(f"{what}: quantised weights can't be merged")
    there = all_layers(model)
    target = _rule(model, there, target_modules)
    exclude = _rule(model, there, exclude_modules or [])
    chosen = {}
    taken = set()
    for layer in there:
        place = (id(model.get_parameter(layer.key)), layer.rows.start)
        if layer.name in target - exclude and place not in taken:
            taken.add(place)
            # transformers 5 drops the prefix of CLIP vision towers
            chosen[layer.name.removeprefix("vision_model.")] = layer
    if not chosen:
        raise ValueError(
            f"{target_modules=}, {exclude_modules=} leave no layer of "
            f"{type(model).__name__} to merge"
        )
    return chosen


def _rule(
    model: nn.Module, there: List[Layer], patterns: Union[str, List[str]]
) -> Set[str]:
    """Return the names of the layers that the patterns name."""

    def matching(pattern: str, convolutions: bool = True) -> Set[str]:
        names = set()
        for layer in there:
            if layer.linear or convolutions:
                if any(re.fullmatch(pattern, x) for x in (layer.name, layer.module)):
                    names.add(layer.name)
        return names

    if patterns == "all-linear":
        head = getattr(model, "get_output_embeddings", lambda: None)()
        heads = {name for name, module in model.named_modules() if module is head}
        return matching(".*", convolutions=False) - heads
    if patterns == "auto":
        names = [layer.name for layer in there]
        names += [name for name, _ in model.named_modules()]
        for family, mark, pattern, convolutions in FAMILIES:
            found = matching(pattern, convolutions)
            if found and any(re.fullmatch(mark, name) for name in names):
                log.info("target_modules=auto: %s, %d layers", family, len(found))
                return found
        raise ValueError("target_modules=auto knows no layer of this model: name some")
    if isinstance(patterns, str):
        return matching(patterns)
    found = {word: matching(rf"(.*\.)?{re.escape(word)}") for word in patterns}
    for word, layers in found.items():
        if not layers:
            raise ValueError(f"'{word}' of {list(patterns)} names no layer")
    return set().union(*found.values())


def merged_shares(model: nn.Module, layers: Dict[str, Layer]) -> Tuple[float, float]:
    """Return the shares of all parameters, and of those in numbered blocks, in layers."""
    merged = Counter()
    for layer in layers.values():
        merged[id(model.get_parameter(layer.key))] += math.prod(layer.shape)
    everything = dict(model.named_parameters())
    blocks = [p for key, p in everything.items() if re.fullmatch(BLOCKS + r"\..*", key)]

    def share_of(parameters) -> float:
        count = sum(p.numel() for p in parameters)
        return sum(merged[id(p)] for p in parameters) / max(1, count)

    return share_of(everything.values()), share_of(blocks or everything.values())


@torch.no_grad()
def average_others(
    merged: nn.Module, task: nn.Module, layers: Dict, count: int, means: Dict
):
    """Take a task into the ``means``, in float32, of ``count`` tasks of all but layers."""
    ours = merged.state_dict(keep_vars=True)
    theirs = task.state_dict()
    in_layers = defaultdict(list)
    for layer in layers.values():
        in_layers[id(ours[layer.key])].append(layer)
    done = set()
    for key, value in ours.items():
        parts = in_layers[id(value)]
        whole = sum(math.prod(layer.shape) for layer in parts) == value.numel()
        if whole or id(value) in done or not value.is_floating_point():
            continue
        done.add(id(value))
        wide = torch.promote_types(value.dtype, torch.float32)
        mean = means.get(key, value).to(wide)
        means[key] = torch.lerp(mean, theirs[key].to(value.device, wide), 1 / count)
        for layer in parts:  # this parameter also holds layers, which stay
            means[key][layer.rows] = value[layer.rows].to(wide)
        value.copy_(means[key])
