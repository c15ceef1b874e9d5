"""A model as its checkpoints store it.

transformers 5 renames parameters and joins experts when it loads a checkpoint, and undoes this when
it saves one. Here, layers have the names and shapes of transformers 4 under both versions, so that
a merge has the same bits.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from fusion_bench_nufilt.utils.tensors import TensorInfo

Rename = Callable[[str], str]
Undo = Callable[[dict[str, Tensor]], dict[str, Tensor]]
_KEPT = (
    "base_model_prefix",
    "_keys_to_ignore_on_load_unexpected",
    "get_input_embeddings",
    "get_output_embeddings",
)


def as_stored(model: Any, tensors: Mapping[str, TensorInfo]) -> tuple[nn.Module, Rename, Undo]:
    """Return a model on the meta device as a checkpoint with these tensors stores it, and two
    functions.

    The first renames keys: one and the model's name for it differ in prefixes only, such as that of
    the language model among other towers. The second returns what is stored for parameters of the
    given model, by name.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import rename_source_key, revert_weight_conversion
    except ModuleNotFoundError:  # transformers 4
        return (
            model,
            partial(_rename, getattr(model, "_checkpoint_conversion_mapping", None) or {}),
            dict,
        )
    # Legacy names are left out, since transformers does not bring these back when it saves.
    changes: list[Any] = get_model_conversion_mapping(model, add_legacy=False)
    joining = [change for change in changes if hasattr(change, "operations")]
    renaming = [change for change in changes if change not in joining]
    parameters = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameters[name] = parameter.detach()
    backbone = getattr(model, "base_model_prefix", None)
    kept = set()  # patterns of tensors that are stored in the shape in which the model has them
    for key, info in tensors.items():
        # This also marks each change that matches, which was_used() tells below.
        name, pattern = rename_source_key(key, renaming, joining, backbone, parameters)
        if name in parameters and parameters[name].shape == info.shape:
            kept.add(pattern)
    idle = []
    for change in joining:
        if _by_shape(change) and kept.issuperset(change.source_patterns):
            idle.append(change)
    used = [change for change in changes if change.was_used() and change not in idle]
    prefixes = [change for change in used if _adds_prefix(change)]
    names: dict[str, str] = {}
    undo: Undo = dict
    undone = [change for change in used if change not in prefixes]
    if undone:
        # For the model itself, all changes that transformers knows would be undone, not those used.
        holder: Any = SimpleNamespace(_weight_conversions=undone, config=model.config)
        # The shape is another than any tensor's, so that it is transposed.
        holder.get_parameter = lambda name: SimpleNamespace(shape=None)
        undo = partial(revert_weight_conversion, holder)
        stored = undo(parameters)
        # What comes out as the same object was renamed and no more.
        key_of = {id(tensor): key for key, tensor in stored.items()}
        for name, tensor in parameters.items():
            if id(tensor) in key_of:
                names[name] = key_of[id(tensor)]
        model = _rebuilt(model, stored, {key: name for name, key in names.items()})
    return model, lambda key: names.get(key) or rename_source_key(key, prefixes, [])[0], undo


def _rename(patterns: Mapping[str, str], key: str) -> str:
    for pattern, replacement in patterns.items():
        key, count = re.subn(pattern, replacement, key)
        # The first pattern that fits is the only one, as in transformers 4.
        if count:
            break
    return key


def _adds_prefix(change: Any) -> bool:
    """Tell whether transformers 4 makes the change, too."""
    at_start = change._original_source_patterns[0].startswith("^")
    return at_start and getattr(change, "prefix_to_remove", None) is None


def _by_shape(change: Any) -> bool:
    """Tell whether the change transposes those tensors whose shape is not the model's, as of
    Qwen3-VL's experts.
    """
    operations = getattr(change, "operations", ())
    return any(getattr(operation, "check_dims", False) for operation in operations)


def _rebuilt(model: nn.Module, stored: Mapping[str, Tensor], names: Mapping[str, str]) -> nn.Module:
    """Return a model of the stored tensors; ``names`` has the names of those that are parameters of
    ``model``.

    A module of ``model`` is used where it holds what is stored. Any other with a matrix was linear
    in transformers 4.
    """
    leaves = {}
    for name, module in model.named_modules():
        # These routers of transformers 5 are no linear layers; in transformers 4 they are.
        is_router = type(module).__name__.endswith("TopKRouter")
        if not module._modules and not is_router:
            leaves[name] = module
    kept = {name: staticmethod(getattr(model, name)) for name in _KEPT}
    # Under the model's own name, which messages about its layers have.
    root: Any = type(type(model).__name__, (nn.Module,), kept)()
    joined = sorted(stored.keys() - names.keys(), reverse=True)  # a weight before its bias
    for key in [*names, *joined]:
        path, _, attribute = key.rpartition(".")
        *parents, last = path.split(".")
        parent = submodule(root, parents)
        path_before, _, attribute_before = names.get(key, "").rpartition(".")
        leaf = leaves.get(path_before)
        has_same_attribute = leaf is not None and attribute_before == attribute
        if has_same_attribute and parent._modules.get(last, leaf) is leaf:
            parent.add_module(last, leaf)
            continue
        if attribute == "weight" and stored[key].ndim == 2:
            parent.add_module(last, nn.Linear(1, 1, bias=False, device="meta"))
        own: Any = submodule(root, path.split(".") if path else [])
        if attribute == "weight" and stored[key].ndim == 3:
            # The sizes by which a stack of matrices is told from any other weight of three sides.
            _, own.output_size, own.input_size = stored[key].shape
        if key in names:
            parameter = model.get_parameter(names[key])
        else:
            parameter = nn.Parameter(stored[key], requires_grad=False)
        own.register_parameter(attribute, parameter)
    return root


def submodule(module: nn.Module, names: Iterable[str]) -> nn.Module:
    """Return the module at a path, making missing ones; a KeyError names a part that can't be a
    module's name.
    """
    for name in names:
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    return module
