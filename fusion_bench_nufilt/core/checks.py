"""The checks that refuse bad input of a merging step before any work."""

from collections.abc import Mapping

import torch
from torch import Tensor

from .config import FusionConfig
from .dtypes import wide_dtype
from .low_rank import LowRank

Layers = Mapping[str, Tensor]
TaskLayers = Mapping[str, Tensor | LowRank]


def check_layers(reference: Layers, layers: TaskLayers, *, model: str) -> None:
    """Refuse layers that cannot be merged with the reference's.

    Raises:
        ValueError: a layer is missing, unknown, not a matrix, of another shape, not floating point or not finite; the
            message names ``model`` and the layer.
    """
    for name, weight in reference.items():
        if name not in layers:
            raise ValueError(f"model '{model}' lacks layer '{name}' {tuple(weight.shape)} of the pretrained model")
        other = layers[name]
        matrices = (other.left, other.right) if isinstance(other, LowRank) else (other,)
        for matrix in matrices:
            if matrix.ndim != 2 or not matrix.is_floating_point():
                raise ValueError(
                    f"model '{model}', layer '{name}': expected a floating-point matrix, "
                    f"got shape {tuple(matrix.shape)} of {matrix.dtype}"
                )
        if other.shape != weight.shape:
            raise ValueError(
                f"model '{model}', layer '{name}': shape {tuple(other.shape)} differs from the pretrained "
                f"model's {tuple(weight.shape)}"
            )
        if not all(map(is_finite, matrices)):
            raise ValueError(f"model '{model}', layer '{name}': the weight has NaN or infinite values")
    if extra := layers.keys() - reference.keys():
        raise ValueError(f"model '{model}' has layers that the pretrained model lacks: {sorted(extra)}")


def check_adapters(layers: Layers, lora_A: Layers, config: FusionConfig) -> None:
    """Raise a ValueError that names the layer if its initial A is missing or not ``(lora_rank, d_i)``."""
    for name, weight in layers.items():
        d_i = weight.shape[1]
        expected = (config.ranks(d_i).lora, d_i)
        got = tuple(lora_A[name].shape) if name in lora_A else None
        if config.lora_rank > 0 and got != expected:
            raise ValueError(f"lora_A of layer '{name}': expected shape {expected}, got {got}")


def check_device(device: torch.device | str) -> torch.device:
    """Return a device, or raise a ValueError that names it if it is neither a CPU nor a GPU that PyTorch can use."""
    try:
        where = torch.device(device)
        if where.type not in ("cpu", "cuda"):
            raise ValueError(f"device '{where}': layers are computed on cpu or cuda only; choose device=cpu")
        torch.zeros(1, device=where).item()
    except (RuntimeError, AssertionError) as error:  # a PyTorch without CUDA, or no such device
        reason = str(error).splitlines()[0]
        raise ValueError(f"device '{device}': PyTorch can't compute there: {reason}; choose device=cpu") from error
    return where


def is_finite(values: Tensor) -> bool:
    """Tell whether no value is NaN or infinite, as a rule in one pass without a temporary of their size."""
    wide = wide_dtype(values)
    # A sum shows every NaN and infinity. If it overflows, finite values may be the reason, so that each is looked at.
    return bool(torch.isfinite(values.sum(dtype=wide))) or bool(torch.isfinite(values).all())
