"""What a checkpoint's tensors are called in the model that transformers makes of it.

transformers 5 renames parameters and joins experts when it loads a checkpoint, and undoes this when
it saves one; both versions load names of before as those of today. Here, a model has the names and
shapes of its checkpoint, which are those of transformers 4, so that a merge has the same bits under
both versions. What is asked of transformers is asked in this file alone, and some of it by private
names, all of which ``tests/models/test_names.py`` looks for.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from fusion_bench_nufilt.utils.tensors import TensorInfo


class Names:
    """The names of tensors in a checkpoint and in its model, where the two are the same."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model  # as the checkpoint stores it
        #: Shapes of matrices of the loaded model that a checkpoint stores as parts of others.
        self.divided: dict[str, tuple[int, ...]] = {}

    def name(self, key: str) -> str:
        """Return the model's name, up to the prefix of its backbone, for what is stored under a
        key, or what the loaded model calls so.
        """
        return key

    def stored(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what a checkpoint stores for parameters of the loaded model, by name."""
        return parameters

    def is_of_other_layout(self, key: str) -> bool:
        """Tell whether what is stored under a key is a part of a parameter of the model, or holds
        several: experts are stored one by one, or joined.
        """
        return False

    def is_of_loaded(self, key: str) -> bool:
        """Tell whether a key is the name of a parameter of the loaded model."""
        return True


class _NamesOfVersion4(Names):
    """The names under transformers 4, which renames what its class says."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._patterns = getattr(model, "_checkpoint_conversion_mapping", None) or {}

    def name(self, key: str) -> str:
        name = modern_name(key)
        for pattern, replacement in self._patterns.items():
            name, count = re.subn(pattern, replacement, name)
            # The first pattern that fits is the only one, as in transformers 4.
            if count:
                break
        return name


class _NamesOfVersion5(Names):
    """The names under transformers 5, whose changes of names and shapes are undone.

    Args:
        loaded: the model that transformers makes of the checkpoint, on the meta device.
        tensors: those of the checkpoint, which tell what it changes.
    """

    def __init__(self, loaded: Any, tensors: Mapping[str, TensorInfo]) -> None:
        super().__init__(loaded)
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import revert_weight_conversion

        # Names of before are left out: a model has those of today, whatever its checkpoint says.
        self._changes: list[Any] = get_model_conversion_mapping(loaded, add_legacy=False)
        self._joining = [change for change in self._changes if hasattr(change, "operations")]
        self._renaming = [change for change in self._changes if change not in self._joining]
        self._backbone = getattr(loaded, "base_model_prefix", None)
        self._parameters: dict[str, Tensor] = {}
        for name, parameter in loaded.named_parameters(remove_duplicate=False):
            self._parameters[name] = parameter.detach()
        used = self._used(self._changes, tensors)
        self._prefixes = [change for change in used if _adds_prefix(change)]
        self._keys: dict[str, str] = {}  # of parameters that are renamed and no more, by name
        self._undo: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
        self._stored_names = set(self._parameters)
        undone = [change for change in used if change not in self._prefixes]
        if not undone:
            return
        # For the model itself, all changes that transformers knows would be undone, not those used.
        holder: Any = SimpleNamespace(_weight_conversions=undone, config=loaded.config)
        # The shape is another than any tensor's, so that it is transposed.
        holder.get_parameter = lambda name: SimpleNamespace(shape=None)
        self._undo = partial(revert_weight_conversion, holder)
        stored = self._undo(self._parameters)
        # What was renamed and no more comes out as the same object.
        key_of = {id(tensor): key for key, tensor in stored.items()}
        for name, tensor in self._parameters.items():
            if id(tensor) in key_of:
                self._keys[name] = key_of[id(tensor)]
            elif tensor.ndim == 2:
                self.divided[name] = tuple(tensor.shape)
        self.model = _rebuilt(loaded, stored, {key: name for name, key in self._keys.items()})
        self._stored_names = set(stored)

    def _loaded(self, key: str) -> tuple[str, str | None]:
        """Return the name in the loaded model for a key, and the pattern of what joins or divides
        the tensor.
        """
        from transformers.core_model_loading import rename_source_key

        name, pattern = rename_source_key(
            key, self._renaming, self._joining, self._backbone, self._parameters
        )
        return name, pattern

    def _used(self, changes: list[Any], tensors: Mapping[str, TensorInfo]) -> list[Any]:
        """Return the changes that transformers makes to a checkpoint with these tensors."""
        kept = set()  # patterns of tensors that are stored in the shape in which the model has them
        for key, info in tensors.items():
            # This also marks each change that matches, which was_used() tells below.
            name, pattern = self._loaded(key)
            if name in self._parameters and self._parameters[name].shape == info.shape:
                kept.add(pattern)
        idle = []
        for change in self._joining:
            if _by_shape(change) and kept.issuperset(change.source_patterns):
                idle.append(change)
        return [change for change in changes if change.was_used() and change not in idle]

    def name(self, key: str) -> str:
        from transformers.core_model_loading import rename_source_key

        name = modern_name(key)
        if name in self._stored_names:
            return name
        if name in self._keys:
            return self._keys[name]
        loaded_name, pattern = self._loaded(name)
        if pattern is None and loaded_name in self._parameters:
            return self._keys.get(loaded_name, loaded_name)
        return str(rename_source_key(name, self._prefixes, [])[0])

    def stored(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._undo(parameters)

    def is_of_other_layout(self, key: str) -> bool:
        if self.name(key) in self._stored_names:
            return False
        name, _ = self._loaded(modern_name(key))
        return name in self._parameters

    def is_of_loaded(self, key: str) -> bool:
        return key in self._parameters


def names_of(loaded: nn.Module, tensors: Mapping[str, TensorInfo]) -> Names:
    """Return the names of a checkpoint's tensors, given the model that transformers makes of it, on
    the meta device.
    """
    if _legacy_changes() is None:
        return _NamesOfVersion4(loaded)
    return _NamesOfVersion5(loaded, tensors)


@cache
def modern_name(key: str) -> str:
    """Return the name under which transformers loads a tensor that a checkpoint stores by a name of
    before, such as ``LayerNorm.gamma``; any other name stays as it is.
    """
    changes = _legacy_changes()
    if changes is None:
        from transformers import PreTrainedModel

        name, _ = PreTrainedModel._fix_state_dict_key_on_load(key)
        return str(name)
    from transformers.core_model_loading import rename_source_key

    name, _ = rename_source_key(key, changes, [])
    return str(name)


@cache
def _legacy_changes() -> list[Any] | None:
    """Return what transformers 5 renames in checkpoints of all models, or None for version 4."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ModuleNotFoundError:
        return None
    changes: list[Any] = get_checkpoint_conversion_mapping("legacy")
    return changes


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


_KEPT_ATTRIBUTES = (
    "base_model_prefix",
    "_keys_to_ignore_on_load_unexpected",
    "get_input_embeddings",
    "get_output_embeddings",
)


class _Linear(nn.Linear):
    """A linear layer whose weight is not filled, which would take most of the time to make one."""

    def reset_parameters(self) -> None:
        pass


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
    kept = {name: staticmethod(getattr(model, name)) for name in _KEPT_ATTRIBUTES}
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
            parent.add_module(last, _Linear(1, 1, bias=False, device="meta"))
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


def module_of(name: str) -> str:
    """Return the path of the module that has a parameter, or another module, of a name."""
    return name.rpartition(".")[0]


def submodule(module: nn.Module, names: Iterable[str]) -> nn.Module:
    """Return the module at a path, making missing ones; a KeyError names a part that can't be a
    module's name.
    """
    for name in names:
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = getattr(module, name)
    return module
