"""What a model is known by: a digest of its weights, whatever it is called and wherever it lies."""

import hashlib
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from .tensors import digest


def model_digest(model: nn.Module | Mapping[str, Tensor]) -> str:
    """Return the SHA-256 digest of a model's parameters and buffers: their names, dtypes, shapes and bits.

    Two models have the same digest if, and only if, their state dicts are equal to the bit. The digest depends neither
    on the order of the entries nor on the device.
    """
    state = model.state_dict() if isinstance(model, nn.Module) else model
    tensors = ((name, value) for name, value in state.items() if isinstance(value, Tensor))
    return combined_digest((name, [str(value.dtype), tuple(value.shape), digest(value)]) for name, value in tensors)


def combined_digest(parts: Iterable[tuple[str, object]]) -> str:
    """Return one digest of named parts, such as the digests of tensors; their order does not matter."""
    lines = sorted(f"{part}\n" for part in parts)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
