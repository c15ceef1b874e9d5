"""The architecture of a model: which of its tensors hold layers, and what its modules call them.

A model in memory tells it by its modules. A checkpoint's is built on PyTorch's meta device from its
config.json, or else guessed from the names and shapes of its tensors. transformers 5 renames
parameters and joins experts when it loads a checkpoint, and undoes this when it saves one. Here,
layers have the names and shapes of transformers 4 under both versions, so that a merge has the same
bits.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fusion_bench_nufilt.methods.base import block_of, last_block_numbers
from fusion_bench_nufilt.methods.options import TargetConfig
from fusion_bench_nufilt.utils.files import printable
from fusion_bench_nufilt.utils.garbage import garbage_left
from fusion_bench_nufilt.utils.tensors import FLOATS, TensorInfo

from .checkpoint import Checkpoint
from .heads import Heads
from .layers import (
    Coverage,
    Layer,
    MatrixView,
    coverage,
    layer_name,
    select_layers,
    shared_weights,
    views,
    without_numbers,
)
from .names import Names, modern_name, module_of, names_of, submodule
from .source import RowRanges, Source, rows_key

log = logging.getLogger(__name__)

# Buffers that no training changes, by the last part of their names.
_COMPUTED = (
    "position_ids",
    "token_type_ids",
    "inv_freq",
    "original_inv_freq",
    "masked_bias",
    "num_batches_tracked",
)


class PlaceInStack(NamedTuple):
    """Where a stack of matrices in the loaded model holds a layer."""

    param: str
    number: int  # of the matrix, which is an expert's
    rows: slice  # of it that are the layer's
    flipped: bool  # whether the layer's matrix is the transpose of these rows


class Architecture:
    """A model's modules, of which names and shapes alone count: its own, or modules on PyTorch's
    meta device.

    Keys of a checkpoint may differ from the model's names (older LLaVA checkpoints, a base model
    without its head) and several names may share one weight. A *param* is the first of the model's
    names for a weight; a key that the model does not know is its own param. Where a parameter holds
    several layers (packed attention projections, fused experts), each part is a param, and
    :meth:`split` makes each part a tensor of its own, which is read, merged or copied, and written
    by itself.

    Args:
        loaded: a model of this architecture, as transformers has it in memory.
        naming: what a checkpoint calls its tensors; by default, the same.
        known_from: what tells the architecture: a class, the modules, or the names of tensors.
        config: that of a checkpoint, which may untie what the modules share.
    """

    def __init__(
        self,
        loaded: nn.Module,
        naming: Names | None = None,
        known_from: str = "the modules",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.naming = naming or Names(loaded)
        self.model = self.naming.model
        self.known_from = known_from
        #: Shapes of parameters of three dimensions, by name in the loaded model.
        self.stacks: dict[str, tuple[int, ...]] = {}
        # An adapter names parameters of the loaded model, in which transformers 5 joins experts
        # that a checkpoint stores one by one.
        #: Those of which transformers says that they hold the transposes of linear layers.
        self.transposed_stacks: set[str] = set()
        for name, parameter in loaded.named_parameters():
            if parameter.ndim == 3:
                self.stacks[name] = tuple(parameter.shape)
                module = loaded.get_submodule(module_of(name))
                if getattr(module, "is_transposed", False):
                    self.transposed_stacks.add(name)
        # Where the model has parts that are models by themselves, by the names of their classes.
        self._paths_of_parts: dict[str, str] = {}
        for path, module in loaded.named_modules():
            if hasattr(module, "base_model_prefix"):
                self._paths_of_parts.setdefault(type(module).__name__, path)
        self.backbone = getattr(self.model, "base_model_prefix", "")
        self.embedding, self.head, self._tables = _token_tables(self.model)
        # By the name of what transformers 5 ties, that of what it is tied to.
        self._sources: dict[str, str] = {}
        for tied_name, name in getattr(loaded, "all_tied_weights_keys", {}).items():
            self._sources[self.naming.name(tied_name)] = self.naming.name(name)
        self._params: dict[str, str] = {}
        weights = shared_names(self.model, config)
        for names in weights:
            self._params |= dict.fromkeys(names, self.first(names))
        self._unsaved = set(_unsaved_buffers(loaded))
        self._views_by_key: dict[str, list[MatrixView]] = defaultdict(list)
        for view in views(self.model):
            self._views_by_key[view.key].append(view)
        self._find_layers()
        several = [names for names in weights if len(names) > 1]
        #: The names of each weight that the configuration ties.
        self.shared = [names for names in several if self._params[names[0]] not in self._row_ranges]

    def _find_layers(self) -> None:
        self.views: dict[str, MatrixView] = {}  # of all layers, by param
        self._places_in_stacks: dict[str, list[PlaceInStack]] = {}  # once for all adapters
        self._row_ranges: dict[str, RowRanges] = {}  # of parameters that hold several layers
        self._packed: dict[str, str] = {}  # the names of these and of their parts, with the params
        for key, views_of_key in self._views_by_key.items():
            param = self._params[key]
            if len(views_of_key) > 1:
                self._row_ranges[param] = [view.rows for view in views_of_key]
                names = [name for name, its_param in self._params.items() if its_param == param]
                for name in names:
                    self._packed[name] = param
                    for rows in self._row_ranges[param]:
                        self._packed[rows_key(name, rows)] = rows_key(param, rows)
            for view in views_of_key:
                self.views.setdefault(self.param_of(view), view)
        self._params |= self._packed

    @classmethod
    def of_checkpoint(cls, base: Checkpoint) -> "Architecture":
        """Return the architecture in the config.json of a checkpoint, or else the one that its
        tensors' names tell.
        """
        built, known_from = on_meta(base)
        return cls(built, names_of(built, base.tensors), known_from, base.config)

    # What tensors are called

    def model_name(self, key: str) -> str:
        """Return the model's name for a checkpoint's key, renamed as transformers does when it
        loads one, whatever the tensor is tied to; what holds several layers has one name.
        """
        for name in (*self._names(key), key):
            if name in self._params:
                return self._packed.get(name, name)
        return modern_name(key)

    def _names(self, key: str) -> tuple[str, ...]:
        """Return what the model may call a tensor, with and without the name of its backbone."""
        name = self.naming.name(key)
        return name, f"{self.backbone}.{name}", name.removeprefix(f"{self.backbone}.")

    def prefix_of(self, class_name: str) -> str:
        """Return what comes before a name in a part of the model that is of a class."""
        path = self._paths_of_parts.get(class_name)
        return f"{path}." if path else ""

    def has(self, key: str) -> bool:
        """Tell whether a tensor that a checkpoint stores under ``key`` is one of the model's."""
        return self.model_name(key) in self._params

    def param(self, key: str) -> str:
        """Return the param of the tensor that a checkpoint stores under ``key``."""
        name = self.model_name(key)
        return self._params.get(name, name)

    def param_of(self, view: MatrixView) -> str:
        """Return the param of the tensor that holds a layer's matrix and nothing else."""
        param = self._params[view.key]
        if param in self._row_ranges:
            return rows_key(param, view.rows)
        return param

    def first(self, names: Sequence[str]) -> str:
        """Return the name by which a weight of several names goes: the one that the others are tied
        to.
        """
        for name in names:
            if name in self._sources.values():
                return name
        # transformers 4 does not tell, and a head that shares the embedding may come before it.
        if self.embedding in names:
            return self.embedding
        return names[0]

    def by_param(self, source: Source) -> dict[str, list[str]]:
        """Return a model's keys by param, in its own order."""
        params = defaultdict(list)
        for key in source.tensors:
            params[self.param(key)].append(key)
        return params

    # Which weights are tied

    @property
    def names_by_weight(self) -> list[list[str]]:
        """The names of what :attr:`shared` has, by the weights that they have in this merge."""
        names = defaultdict(list)
        for name in chain(*self.shared):
            names[self._params[name]].append(name)
        return list(names.values())

    @property
    def tied_to_embedding(self) -> list[str]:
        """The names of the weight that the configuration has the embedding be, its own as well."""
        return list(chain(*(names for names in self.shared if self.embedding in names)))

    def tied_by_class(self, name: str) -> list[str]:
        """Return the names that the model's class ties to a weight, whether it is one with theirs
        in this model or not.
        """
        return [tied for tied, source in self._sources.items() if source == name]

    def may_untie(self, config: Mapping[str, Any]) -> bool:
        """Tell whether a configuration that ties the head to the embedding may say from now on that
        nothing is tied.

        That of an encoder and a decoder may not, since T5 also scales its outputs by it. Without
        it, transformers 5 still loads what is stored as two weights, and 4 ties them.
        """
        if config.get("is_encoder_decoder"):
            return False
        for names in self.names_by_weight:
            if len(names) > 1 and not self._sources.keys().isdisjoint(names):
                return False
        heads = [name for name in self.head if name in self.tied_to_embedding]
        return any(self._params[name] != self._params[self.embedding] for name in heads)

    def names_to_store(self, names: Sequence[str]) -> Sequence[str]:
        """Return the names under which a checkpoint must store a weight that was untied, so that
        transformers loads it under all of them.
        """
        tied = next(group for group in self.shared if names[0] in group)
        if len(names) == len(tied):
            return []  # it is as the base has it
        # What is not stored is tied to the first, whatever else is stored.
        first = self.first(tied)
        return [first] if first in names else names

    def apart(self, weights: Iterable[Sequence[str]]) -> "Architecture":
        """Return this architecture where each of some groups of names is a weight of its own.

        Raises:
            ValueError: one module holds weights of two groups, which no model has apart.
        """
        other = copy(self)
        other._params = dict(self._params)
        for names in weights:
            other._params |= dict.fromkeys(names, self.first(names))
        for names in self.shared:
            holders: dict[tuple[int, str], str] = {}
            for name in names:
                # A module can be copied for one of its names, and what holds it can not.
                path, _, inside = name.rpartition(".")
                outer, _, inner = path.rpartition(".")
                holder = (id(self.model.get_submodule(outer)), f"{inner}.{inside}")
                param = other._params[name]
                if holders.setdefault(holder, param) != param:
                    raise ValueError(
                        f"{type(self.model).__name__} can't hold '{name}' apart from what it is "
                        "tied to: one module holds both"
                    )
        other._find_layers()
        return other

    def select(self, targets: TargetConfig) -> dict[str, MatrixView]:
        """Return the layers that targets name, by name."""
        return select_layers(
            self.model, targets.target_modules, targets.exclude_modules, self._params
        )

    def coverage(self, layers: Iterable[Layer], targets: TargetConfig) -> Coverage:
        """Return what a merge of layers covers of the model."""
        views_by_name = {layer.name: layer.view for layer in layers}
        return coverage(self.model, views_by_name, targets, self._params)

    def selects(self, targets: TargetConfig, names: Collection[str]) -> bool:
        """Tell whether one of these parameters holds a layer to merge."""
        return any(view.key in names for view in self.select(targets).values())

    # What the tensors are

    def shape(self, param: str) -> tuple[int, ...]:
        return tuple(self.model.get_parameter(param).shape)

    def rows(self, param: str) -> int:
        """Return the number of rows of a tensor, zero for one that the model does not have."""
        if param not in self._params:
            return 0
        return self.shape(param)[0]

    def packed_params(self, param: str) -> list[str]:
        """Return the params of the layers in a parameter that holds several, else none."""
        return [rows_key(param, rows) for rows in self._row_ranges.get(param, ())]

    def split(self, source: Source) -> None:
        """Split the tensors of a model that hold several layers; those of another shape stay
        whole.
        """
        row_ranges = {}
        for key, info in source.whole.items():
            param = self.param(key)
            if param in self._row_ranges and info.shape == self.shape(param):
                row_ranges[key] = self._row_ranges[param]
        source.split(row_ranges)

    def is_computed(self, param: str) -> bool:
        """Return whether a tensor is computed when a model is built, such as the frequencies of
        rotary embeddings, which older versions of transformers stored.
        """
        is_known = param.rpartition(".")[2] in _COMPUTED
        return is_known or not self._unsaved.isdisjoint(self._names(param))

    def embeddings(self, stored: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Return the params of the tensors with a row for every token, given the stored tensors'
        shapes by param.
        """
        params = []
        for name in self._tables:
            param = self._params[name]
            if param in stored and param not in params:
                params.append(param)
        return [param for param in params if stored[param][0] == stored[params[0]][0]]

    # Which layers are merged

    def layers(self, base: Source, targets: TargetConfig, heads: Heads) -> list[Layer]:
        """Return the layers to merge, in the base's order, at last those that it lacks."""
        selected = self.select(targets)
        layers_by_param = {}
        stored = self.by_param(base)
        for name, view in selected.items():
            if not heads.of([view.key]):
                param = self.param_of(view)
                layers_by_param[param] = Layer(name, param, tuple(stored.get(param, ())), view)
        if not layers_by_param:
            raise ValueError(
                f"all {len(selected)} layers to merge in '{base.name}' belong to the tasks' own "
                f"heads ({', '.join(sorted(heads.modules))}): name others in target_modules, or "
                "say heads=none"
            )
        layers = [layers_by_param[param] for param in stored if param in layers_by_param]
        return [*layers, *(layer for layer in layers_by_param.values() if not layer.keys)]

    def unused_keys(self, base: Source) -> list[str]:
        """Return the keys of stored tensors of layers that the model lacks: their names differ from
        its own by a number alone.
        """
        # transformers passes over these itself: DeepSeek-V3 stores a layer that its model lacks.
        ignored = getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ()
        known = set(map(without_numbers, self._params))
        unused = []
        for key in base.tensors:
            if self.model_name(key) in self._params:
                continue
            is_ignored = any(re.search(pattern, key) for pattern in ignored)
            if not is_ignored and known.intersection(map(without_numbers, self._names(key))):
                unused.append(key)
        return unused

    def other_keys(self, base: Source, layers: Iterable[Layer]) -> dict[str, tuple[str, ...]]:
        """Return the base's keys of every tensor outside the layers, by param."""
        chosen = {layer.param for layer in layers}
        by_param = self.by_param(base)
        return {param: tuple(keys) for param, keys in by_param.items() if param not in chosen}

    @property
    def last_blocks(self) -> dict[str | None, int]:
        """The number of the last block of each stack of the model's blocks."""
        names = [*self._params, *(view.name for view in self.views.values())]
        return last_block_numbers(map(layer_name, names))

    # Where an adapter's parameters are

    def stacks_of(self, module: str) -> dict[str, str]:
        """Return the names in :attr:`stacks` of a module's own parameters, by their last parts."""
        paths = {module, *self._names(module)}
        stacks = {}
        for name in self.stacks:
            path, _, attribute = name.rpartition(".")
            if path in paths:
                stacks[attribute] = name
        return stacks

    def rows_of_divided(self, name: str) -> tuple[str, slice] | None:
        """Return the param that has a matrix of the loaded model among its rows, and which these
        are; None for a matrix that is stored by itself, or whose rows do not stand side by side.
        """
        for candidate in self._names(name):
            if candidate in self._places_of_divided:
                return self._places_of_divided[candidate]
        return None

    @cached_property
    def _places_of_divided(self) -> dict[str, tuple[str, slice]]:
        """What :meth:`rows_of_divided` returns, by the name in the loaded model."""
        names = list(self.naming.divided)
        numbers = {}  # of the rows of all these matrices
        count = 0
        ends = []
        for name in names:
            rows = self.naming.divided[name][0]
            whole = torch.arange(count, count + rows, dtype=torch.int64, device="cpu")
            numbers[name] = whole[:, None]
            count += rows
            ends.append(count)
        bounds = torch.tensor(ends, dtype=torch.int64, device="cpu")
        places = {}
        for key, stored in self.naming.stored(numbers).items():
            owners = torch.bucketize(stored.flatten(), bounds, right=True)
            for owner in owners.unique().tolist():
                name = names[owner]
                first = int((owners == owner).nonzero()[0])
                of_name = slice(first, first + len(numbers[name]))
                if torch.equal(stored[of_name], numbers[name]):
                    places[name] = (self.param(key), of_name)
        return places

    def places_in_stack(self, name: str) -> list[PlaceInStack]:
        """Return where a parameter ``(count, height, width)`` of the loaded model holds layers, or
        nothing if it is no stack of layers.
        """
        if name not in self._places_in_stacks:
            self._places_in_stacks[name] = self._find_places(name)
        return self._places_in_stacks[name]

    def _find_places(self, name: str) -> list[PlaceInStack]:
        count, height, _ = self.stacks[name]
        # The numbers of the rows, stored as the parameter would be.
        numbers = torch.arange(count * height, dtype=torch.int64, device="cpu")
        numbers = numbers.reshape(count, height, 1)
        places = []
        for key, stored in self.naming.stored({name: numbers}).items():
            param = self.param(key)
            params = self.packed_params(param) or [param]
            for part, rows in zip(params, stored.reshape(-1, *stored.shape[-2:]), strict=True):
                number, first = divmod(int(rows.min()), height)
                stop = int(rows.max()) - number * height + 1
                # A slice cuts the layer's factors, so that its rows must stand side by side.
                if part not in self.views or stop - first != rows.numel():
                    return []
                # The numbers of a stored row stand side by side if it is a column of the parameter.
                flipped = (rows.shape[-1] > 1) != self.views[part].transposed
                places.append(PlaceInStack(part, number, slice(first, stop), flipped))
        return places

    def holds_layers(self, name: str) -> bool:
        """Return whether a parameter of the loaded model is stored as linear layers or holds
        several.
        """
        stack = torch.empty(self.stacks[name], dtype=torch.float32, device="meta")
        for key in self.naming.stored({name: stack}):
            param = self.param(key)
            # The weight of a one-dimensional convolution has three sides, too, and is one layer.
            is_linear = param in self.views and self.views[param].linear
            if not (is_linear or self.packed_params(param)):
                return False
        return True


def _token_tables(model: Any) -> tuple[str, list[str], list[str]]:
    """Return the name of the weight of a model's embedding, the names of the output head's weights
    with a row for every token, and all names of both; all are empty if it does not tell.
    """
    try:
        embedding = model.get_input_embeddings()
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # not a transformers model, or with two towers
        return "", [], []
    if not isinstance(embedding, nn.Embedding):
        return "", [], []
    paths = {id(module): path for path, module in model.named_modules()}
    names_of_head = []
    tables = {id(embedding.weight)}
    if isinstance(head, nn.Module):
        for attribute, table in head.named_parameters():
            # A head's bias has a row for every token, too, and grows with the vocabulary.
            if len(table) == embedding.num_embeddings:
                tables.add(id(table))
            if table.shape == embedding.weight.shape:
                names_of_head.append(f"{paths.get(id(head))}.{attribute}")
    names_of_tables = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in tables:
            names_of_tables.append(name)
    return f"{paths.get(id(embedding))}.weight", names_of_head, names_of_tables


def shared_names(model: nn.Module, config: Mapping[str, Any] | None = None) -> list[list[str]]:
    """Return the names of each weight; one that modules share has several.

    ``config`` is that of a model which is on the meta device: transformers 5 builds all T5s with a
    tied head, and unties it as it loads those that say so.
    """
    weights = shared_weights(model)
    if config is not None and config.get("tie_word_embeddings") is False:
        _, head, _ = _token_tables(model)
        weights |= dict.fromkeys(head, "the head's own")
    names = defaultdict(list)
    for name, weight in weights.items():
        names[weight].append(name)
    return list(names.values())


def _unsaved_buffers(model: nn.Module) -> Iterator[str]:
    """Yield the names of a model's buffers that it does not save."""
    for path, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            yield f"{path}.{name}".removeprefix(".")


def untie_parameter(model: nn.Module, names: Sequence[str], others: Iterable[str]) -> None:
    """Give some of the names of a parameter a parameter of their own, with the same values, where
    :meth:`Architecture.apart` lets them have one; the ``others`` keep theirs.
    """
    old = model.get_parameter(names[0])
    own = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
    for name in names:
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        # Names of one weight may also be names of one module, as of T5's embedding in
        # transformers 4.
        if any(model.get_submodule(module_of(other)) is module for other in others):
            parent = model.get_submodule(module_of(path))
            # copy() shares the dict of parameters, where the new one would show under all names.
            module = copy(module)
            module._parameters = dict(module._parameters)
            parent.add_module(path.rpartition(".")[2], module)
        module.register_parameter(attribute, own)


def on_meta(base: Checkpoint) -> tuple[nn.Module, str]:
    """Return the model on the meta device, and what its architecture is known from."""
    config = base.config
    if config.get("architectures"):
        import transformers

        name = config["architectures"][0]
        try:
            # Both import what there is of the class, all of transformers' way to load models.
            with garbage_left():
                settings = settings_of(base.folder)
                model_class = getattr(transformers, name)
            with torch.device("meta"):
                return model_class._from_config(settings), name
        except Exception as error:  # its own code, another version of transformers, a bad config
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            log.warning(
                "transformers can't build '%s' of '%s' (%s): layers are told by name",
                name,
                base.name,
                reason,
            )
    told_by_names: Any = from_names(base.tensors)
    told_by_names.base_model_prefix = _backbone_of(str(config.get("model_type")))
    return told_by_names, "names of the tensors"


def settings_of(folder: Path) -> Any:
    """Return the configuration that transformers has of a folder, without code of its own: layers
    of a model that needs it are told by names instead.
    """
    import transformers

    settings = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return without_implementations(settings)


def without_implementations(settings: Any) -> Any:
    """Return a configuration of transformers that chooses no implementation of attention or
    experts: one that is named like a repository of the hub is code, which transformers would load.
    """
    for name in ("_attn_implementation", "_experts_implementation"):
        if hasattr(settings, name):  # transformers 4 has the first alone
            setattr(settings, name, None)
    return settings


def _backbone_of(model_type: str) -> str:
    """Return where the backbone lies in models of a type, empty for one that is not known."""
    import transformers

    try:
        kind = transformers.MODEL_MAPPING[transformers.CONFIG_MAPPING[model_type]]
        return str(getattr(kind, "base_model_prefix", ""))
    except (KeyError, ImportError):
        return ""


# Words in the names of matrices that are not layers, for architectures that transformers does not
# know.
_NOT_LINEAR = re.compile(
    r"(^|[._])(wte|wpe|shared|ln\w*|\w*embed\w*|\w*norm\w*|relative_attention_bias)([._]|$)"
)
# Parameters that hold several layers, and their numbers of dimensions.
_PACKED = {"in_proj_weight": 2, "gate_up_proj": 3, "down_proj": 3}
_GPT2 = re.compile(r"(.*\.)?attn\.c_attn\.weight")  # (d, 3d) where the layers are transposed
_HEAD = re.compile(r"(.*\.)?(lm_head|embed_out|output)")


def from_names(tensors: Mapping[str, TensorInfo]) -> nn.Module:
    """Return a model with a linear layer for every stored matrix that does not look like anything
    else.

    Packed projections of an `nn.MultiheadAttention` and fused experts are recognised by the names
    of their parameters, and GPT-2's transposed layers by the shape of `c_attn`. Convolutions are
    left alone: a shape hides their groups.
    """
    from transformers.pytorch_utils import Conv1D

    root = nn.Module()
    shapes_of_gpt2 = [info.shape for key, info in tensors.items() if _GPT2.fullmatch(key)]
    like_gpt2 = any(shape[1:] == (3 * shape[0],) for shape in shapes_of_gpt2)
    for key, info in tensors.items():
        path = key.removesuffix(".weight")
        *parents, last = path.split(".")
        is_plain = path != key and len(info.shape) == 2
        is_packed = path == key and len(info.shape) == _PACKED.get(last)
        if not (is_packed or is_plain) or info.dtype not in FLOATS or _NOT_LINEAR.search(path):
            continue
        try:
            module = submodule(root, parents)
            if is_packed:
                values = torch.empty(info.shape, dtype=torch.float32, device="meta")
                module.register_parameter(last, nn.Parameter(values))
                continue
            rows, columns = info.shape
            linear: nn.Module
            with torch.device("meta"):
                if like_gpt2 and last.startswith("c_"):
                    linear = Conv1D(columns, rows)
                else:
                    linear = nn.Linear(columns, rows, bias=False)
            if last in module._modules:  # a.b.weight came before a.weight
                for name, inner in module.get_submodule(last).named_children():
                    linear.add_module(name, inner)
            module.add_module(last, linear)
        except KeyError as error:
            log.warning("tensor '%s' is not merged as a layer: %s", printable(key), error.args[0])
            continue
        # all-linear leaves the output head out, and asks the model which module that is. In a
        # block, a layer of such a name is another one, such as the output of an RWKV's attention.
        if _HEAD.fullmatch(path) and block_of(path) is None:
            root.get_output_embeddings = lambda head=linear: head  # type: ignore[assignment]
    return root
