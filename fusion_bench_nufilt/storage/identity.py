"""What tells whether results are the same: the digests of weights, and the versions of the packages that made them."""

import hashlib
from collections.abc import Iterable, Mapping
from importlib.metadata import version

from torch import Tensor, nn

from .tensors import digest

_PACKAGES = ("fusion-bench-nufilt", "fusion-bench", "torch", "transformers", "safetensors")


def model_digest(model: nn.Module | Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a model's parameters and buffers, in any order: of names, dtypes, shapes and bits."""
    state = model.state_dict() if isinstance(model, nn.Module) else model
    tensors = ((name, value) for name, value in state.items() if isinstance(value, Tensor))
    return combined_digest((name, [str(value.dtype), tuple(value.shape), digest(value)]) for name, value in tensors)


def combined_digest(parts: Iterable[tuple[str, object]]) -> str:
    """Return one digest of named parts, such as the digests of tensors; their order does not matter."""
    lines = sorted(f"{part}\n" for part in parts)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that results depend on, by the names that they are installed under."""
    return {package: version(package) for package in _PACKAGES}
