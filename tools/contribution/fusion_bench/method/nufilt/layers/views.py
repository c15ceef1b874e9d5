"""The layers of a model that can be merged: its linear layers."""

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class View:
    """The weight of a linear layer, in any model of an architecture."""

    name: str  # of the layer
    module: str  # of the module: the same
    key: str  # of the weight in the state dict
    shape: tuple[int, int]  # (d_o, d_i)
    rows: tuple[int, int]  # all of the weight's
    linear: bool = True

    def read(self, model: nn.Module) -> Tensor:
        """The weight ``(d_o, d_i)`` in a model, sharing its memory."""
        return model.get_parameter(self.key).detach()

    def write(self, model: nn.Module, weight: Tensor) -> None:
        """Put a weight into a model."""
        self.read(model).copy_(weight)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy one weight of the layer into another."""
        target.copy_(source)


def views(model: nn.Module) -> list[View]:
    """All linear layers of a model, in the order of its modules."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.weight.is_floating_point():
            d_o, d_i = module.weight.shape
            key = f"{name}.weight" if name else "weight"
            found.append(View(name, name, key, (d_o, d_i), (0, d_o)))
    return found


def opaque(model: nn.Module) -> dict[str, str]:
    """Linear layers that can't be merged, by name, and why."""
    return {
        name: f"'{name}.weight' is stored as {module.weight.dtype}: quantised weights can't be merged"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not module.weight.is_floating_point()
    }
