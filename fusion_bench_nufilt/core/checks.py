"""What a merging step refuses, before any work."""

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
        ValueError: a layer is missing, unknown, not a matrix, of another shape, not floating point or not finite;
            names ``model`` and the layer.
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
    """Refuse initial A that do not fit the layers.

    Raises:
        ValueError: one is missing or has another shape than ``(lora_rank, d_i)``; names the layer.
    """
    for name, weight in layers.items():
        rank, d_i = config.ranks(weight.shape[1]).lora, weight.shape[1]
        expected, got = (rank, d_i), tuple(lora_A[name].shape) if name in lora_A else None
        if rank > 0 and got != expected:
            raise ValueError(f"lora_A of layer '{name}': expected shape {expected}, got {got}")


def check_device(device: torch.device | str) -> torch.device:
    """Refuse a device on which the method was not tried, or that is not there.

    Raises:
        ValueError: names the device, and what to say instead.
    """
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device '{device}': {error}") from error
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device '{where}': layers are computed on cpu or cuda only; choose device=cpu")
    try:
        torch.zeros(1, device=where).item()
    except (RuntimeError, AssertionError) as error:  # a PyTorch without CUDA, or no such device
        reason = str(error).splitlines()[0]
        raise ValueError(f"device '{where}': PyTorch can't compute there: {reason}; choose device=cpu") from error
    return where


def is_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite, in one pass without a temporary of their size."""
    wide = wide_dtype(values)
    # A sum shows every NaN and infinity; if it overflows, finite values may be the reason, and each is looked at.
    return bool(torch.isfinite(values.sum(dtype=wide))) or bool(torch.isfinite(values).all())
