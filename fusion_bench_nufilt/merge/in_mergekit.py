"""The layer-wise methods as merge methods of mergekit, which reads, plans and writes."""

import re
from dataclasses import Field, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from mergekit.io.tasks import LoaderCache
from mergekit.merge_methods import base as mergekit
from mergekit.merge_methods import register
from pydantic import AfterValidator, FiniteFloat
from torch import Tensor

from fusion_bench_nufilt.methods.base import LayerMethod
from fusion_bench_nufilt.methods.options import Settings, TargetConfig
from fusion_bench_nufilt.methods.registry import METHODS
from fusion_bench_nufilt.models.checkpoint import Checkpoint
from fusion_bench_nufilt.models.door import open_models
from fusion_bench_nufilt.models.layers import Layer
from fusion_bench_nufilt.models.model import ModelWeights
from fusion_bench_nufilt.models.selection import Selection
from fusion_bench_nufilt.utils.options import split_options
from fusion_bench_nufilt.utils.tensors import in_dtype

from .fuse import check_layers, merge_matrices
from .plan import method_of
from .rules import RULES
from .strength import strength_of


# mergekit refuses a name that is registered twice in a process.
@cache
def register_methods() -> None:
    """Make every layer-wise method a merge method of mergekit, under its own name."""
    for kind in METHODS.values():
        register(MergekitMethod(kind))


class MergekitMethod(mergekit.GroupMergeMethod):
    """A layer-wise method, to which models come in the order of the file, each with a ``weight``
    for its update.
    """

    def __init__(self, kind: type[LayerMethod]) -> None:
        self.kind = kind
        weight = mergekit.ParameterSpec(
            "weight", FiniteFloat, mergekit.ParameterScope.NON_BASE, 1.0
        )
        parameters = [weight]
        for options_class in (Settings, kind.Options, TargetConfig):
            for option in fields(options_class):
                if options_class is Settings and option.name != "seed":
                    continue
                # mergekit takes tensors of equal shapes alone.
                if option.name == "heads":
                    continue
                parameters.append(_parameter(options_class, option, kind))
        url = re.search(r"https://[^)]+", getattr(kind, "citation", ""))
        self.spec = mergekit.MergeMethodSpec(
            kind.name,
            tuple(parameters),
            mergekit.InputContract(mergekit.BasePolicy.REQUIRED, min_non_base=1),
            pretty_name=kind.label,
            reference_url=url and url[0],
            optional_tensor_policy=mergekit.OptionalTensorPolicy.PASSTHROUGH_BASE_SINGLETON,
        )

    @torch.no_grad()
    def merge_group(self, group: Any, /, **parameters: Any) -> Tensor:
        """Merge the layers that a tensor holds; ``other_params`` says what becomes of a tensor
        without any.
        """
        (options, targets), rest = split_options((self.kind.Options, TargetConfig), parameters)
        base = group.base.tensor
        folder = _folder(group.base.id)
        model = _base(folder, targets)
        name = group.metadata.name
        layers = _layers_in(model, group)
        method = method_of(self.kind, options, rest["seed"], model.selection)
        if not layers:
            # A tensor of the base that no task changes is copied, whatever it holds.
            if targets.other_params == "pretrained" or not base.is_floating_point():
                return base
            method = RULES[targets.other_params](None, ())
        pretrained = _matrices(layers, base, name)
        if layers:
            check_layers(pretrained, pretrained, model=str(group.base.id))
        tasks = []
        for task in group.non_base:
            matrices = _matrices(layers, task.tensor, name)
            check_layers(pretrained, matrices, model=str(task.id))
            tasks.append(matrices)
        strengths = [1.0] * len(tasks)
        if method.weighs_tasks:
            strengths = [_strength(folder, targets, _folder(task.id)) for task in group.non_base]
        merged = merge_matrices(
            method,
            pretrained,
            tasks,
            strengths=strengths,
            coefficients=[rest["weight"][task.id] for task in group.non_base],
        )
        if not layers:
            return in_dtype(name, merged[name], base.dtype).reshape(base.shape)
        # Rows that no layer has stay the base's, bit by bit.
        result = base.clone()
        for layer in layers:
            part = layer.view.as_stored(merged[layer.name])
            result[slice(*layer.view.rows)] = in_dtype(name, part, base.dtype)
        return result


def _parameter(
    options_class: type, option: Field[Any], method_class: type[LayerMethod]
) -> mergekit.ParameterSpec:
    """Return an option as a parameter of mergekit, which has its class check its values when it
    plans the merge.
    """

    def check(value: Any) -> Any:
        options_class(**{option.name: value})
        return value

    checked: Any = Annotated[option.type, AfterValidator(check)]
    default = method_class.defaults.get(option.name, option.default)
    scope = mergekit.ParameterScope.SHARED
    return mergekit.ParameterSpec(option.name, checked, scope, default)


class _Base(NamedTuple):
    """What is merged of a base, and for each of its tensors, by param, the layers in it."""

    selection: Selection
    layers: dict[str, list[Layer]]


def _folder(model: Any) -> Path:
    """Return the folder of a model, in which mergekit has also merged an adapter."""
    return Path(LoaderCache().get(model).index.base_path).resolve()


@cache
def _base(folder: Path, targets: TargetConfig) -> _Base:
    selection = open_models(str(folder), [], None, targets, Settings())
    architecture = selection.architecture
    # mergekit gives tensors as they are stored, of which the base has one for each layer.
    layers: dict[str, list[Layer]] = {}
    for key in selection.base.whole:
        layers[architecture.param(key)] = []
    for layer in selection.layers:
        layers[architecture.param(layer.view.key)].append(layer)
    return _Base(selection, layers)


def _layers_in(base: _Base, group: Any) -> list[Layer]:
    """Return the layers to merge that a tensor holds."""
    tensor = group.metadata.name
    param = base.selection.architecture.param(tensor)
    if param not in base.layers:
        raise ValueError(
            f"the base '{group.base.id}' has no tensor '{tensor}' of the result: name one that has "
            "all its layers"
        )
    return base.layers[param]


# mergekit gives one tensor at a time, and a strength is that of a whole model.
@cache
def _strength(base_folder: Path, targets: TargetConfig, folder: Path) -> float:
    """Return the strength of a task, which is measured with the first of its tensors."""
    selection = _base(base_folder, targets).selection
    task = ModelWeights(Checkpoint.open(str(folder)), selection.architecture)
    task.tie(selection.architecture)
    task.leave_unchanged(selection.pretrained)  # mergekit may do without some of its tensors
    return strength_of(selection.pretrained, selection.layers, task)


def _matrices(layers: list[Layer], tensor: Tensor, name: str) -> dict[str, Tensor]:
    """Return the layers that a tensor holds, or all of it as one row, under its own name."""
    if not layers:
        return {name: tensor.reshape(1, -1)}
    return {layer.name: layer.view.matrix(tensor[slice(*layer.view.rows)]) for layer in layers}
