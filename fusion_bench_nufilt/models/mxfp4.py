"""Weights in MXFP4, as gpt-oss stores its experts: read as bfloat16, which holds their values
exactly or overflows.

A value is a code of four bits times a power of two, which 32 codes share. ``NAME_blocks`` are two
codes a byte, the lower half first, ``(experts, outputs, blocks, 16)``; ``NAME_scales`` are
exponents plus 127, ``(experts, outputs, blocks)``. The tensor ``NAME`` is ``(experts, inputs,
outputs)``. See the OCP Microscaling formats specification.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import embedding

from fusion_bench_nufilt.utils.tensors import TensorFile, TensorInfo

from .encoded import Encoded
from .fp8 import Quantisation

_BLOCKS = "_blocks"
_SCALES = "_scales"
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CODES = torch.tensor(
    [*_POSITIVE, *(-value for value in _POSITIVE)], dtype=torch.bfloat16, device="cpu"
)
# Both values of each byte.
_PAIRS = torch.stack([_CODES.repeat(16), _CODES.repeat_interleave(16)], dim=1)


@dataclass(frozen=True)
class Packed(Encoded):
    """An MXFP4 tensor, whose place is that of the blocks."""

    spacing: ClassVar[float] = 0.5  # one bit after the point

    blocks: TensorInfo
    scales: TensorInfo

    def rows(self, first: int, last: int) -> "Packed":
        """Return these experts as a tensor of its own."""
        blocks = self.blocks.rows(first, last)
        scales = self.scales.rows(first, last)
        return replace(super().rows(first, last), blocks=blocks, scales=scales)

    @property
    def unit(self) -> int:
        """The number of elements of an expert, whose values are stored transposed."""
        _, inputs, outputs = self.shape
        return inputs * outputs

    def around(self, start: int, stop: int) -> tuple["Packed", int]:
        size = self.unit
        first = start // size
        return self.rows(first, -(-stop // size)), first * size

    def read(self, files: Mapping[str, TensorFile]) -> Tensor:
        blocks = files[self.blocks.file].read(self.blocks)
        scales = files[self.scales.file].read(self.scales)
        return decode(blocks, scales)


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the bfloat16 values ``(experts, inputs, outputs)`` of blocks and scales."""
    values = embedding(blocks.int(), _PAIRS).flatten(-2)
    values.ldexp_(scales.int().sub_(127).unsqueeze(-1))
    return values.flatten(-2).transpose(1, 2).contiguous()


def join_blocks(
    model: str, tensors: Mapping[str, TensorInfo], config: Quantisation
) -> dict[str, TensorInfo]:
    """Return a model's tensors, with blocks and scales of MXFP4 joined.

    Tensors of such names that are stored otherwise are tensors like others, unless config.json says
    that the model is in MXFP4.

    Raises:
        ValueError: blocks of a model in MXFP4 lack their scales, or these have another shape.
    """
    joined = dict(tensors)
    for key, blocks in tensors.items():
        if not key.endswith(_BLOCKS) or blocks.dtype != "U8":
            continue
        name = key.removesuffix(_BLOCKS)
        scales = tensors.get(name + _SCALES)
        if scales is None or not _fits(blocks, scales):
            if config.get("quant_method") != "mxfp4":
                continue
            given = f"no '{name + _SCALES}'"
            if scales is not None:
                given = f"'{name + _SCALES}' {scales.dtype} {scales.shape}"
            raise ValueError(
                f"model '{model}', tensor '{key}' {blocks.dtype} {blocks.shape} with {given}: "
                "MXFP4 has U8 blocks (experts, outputs, blocks, 16) and their scales"
            )
        del joined[key], joined[name + _SCALES]
        experts, outputs, count, _ = blocks.shape
        shape = (experts, 32 * count, outputs)
        joined[name] = Packed(blocks.file, "BF16", shape, blocks.start, blocks.stop, blocks, scales)
    return joined


def _fits(blocks: TensorInfo, scales: TensorInfo) -> bool:
    """Tell whether two tensors of bytes are blocks of MXFP4 and their scales."""
    return scales.dtype == "U8" and len(scales.shape) == 3 and blocks.shape == (*scales.shape, 16)
