"""Parameters that modules of a model share, such as a head that is tied to the embedding."""

from collections import defaultdict
from collections.abc import Collection
from copy import copy, deepcopy

import torch
from torch import nn


def shared_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter; one that modules share has several."""
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return list(names.values())


def untie(model: nn.Module, names: Collection[str]) -> None:
    """Give some of the names of a parameter a parameter of their own, with the same values.

    Raises:
        ValueError: a module that other names belong to is inside one that is shared as a whole.
    """
    shared: set[str] = set()
    for names_of_one in shared_names(model):
        if not set(names).isdisjoint(names_of_one):
            shared.update(names_of_one)
    old = model.get_parameter(next(iter(names)))
    own = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
    for name in names:
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        # Names of one weight may also be names of one module, as of T5's embedding in
        # transformers 4.
        if any(model.get_submodule(_path(other)) is module for other in shared.difference(names)):
            parent = model.get_submodule(_path(path))
            # copy() shares the dict of parameters, where the new one would show under all names.
            module = copy(module)
            module._parameters = dict(module._parameters)
            parent.add_module(path.rpartition(".")[2], module)
        module.register_parameter(attribute, own)
    for name in shared:
        if (model.get_parameter(name) is own) != (name in names):
            raise ValueError(
                f"{type(model).__name__} can't hold '{name}' apart from what it is tied to: one "
                "module holds both"
            )


def without_values(model: nn.Module) -> nn.Module:
    """Return a copy of a model on PyTorch's meta device, which takes no memory."""
    tensors = [*model.parameters(), *model.buffers()]
    empty = {}
    for tensor in tensors:
        meta = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
        empty[id(tensor)] = meta
    # As deepcopy's memo, these stand for the tensors, and what modules share stays shared.
    return deepcopy(model, empty)


def _path(name: str) -> str:
    return name.rpartition(".")[0]
