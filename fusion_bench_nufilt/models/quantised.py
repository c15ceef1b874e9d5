"""Quantised weights: tensors that a file holds otherwise than as their values.

Either form is an :class:`Encoded` tensor, which joins the stored tensors that it is read from. FP8
has a scale for every block and is read as float32.

MXFP4, in which gpt-oss stores its experts, is read as bfloat16, which holds its values exactly or
overflows: a value is a code of four bits times a power of two, which 32 codes share.
``NAME_blocks`` are two codes a byte, the lower half first, ``(experts, outputs, blocks, 16)``;
``NAME_scales`` are exponents plus 127, ``(experts, outputs, blocks)``. The tensor ``NAME`` is
``(experts, inputs, outputs)``. See the OCP Microscaling formats specification.
"""

import math
import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field, PositiveInt
from torch import Tensor
from torch.nn.functional import embedding, pad
from typing_extensions import TypedDict

from fusion_bench_nufilt.utils.tensors import FLOATS, TensorFile, TensorInfo

#: What can be read, for messages.
READABLE = "FP8 and MXFP4"


@dataclass(frozen=True)
class Encoded(TensorInfo):
    """A tensor in a file that is decoded when it is read; ``shape`` and ``dtype`` are those in
    which it is read.
    """

    is_quantised: ClassVar[bool] = True

    @abstractmethod
    def around(self, start: int, stop: int) -> tuple["Encoded", int]:
        """Return the part that holds elements ``start`` to ``stop`` and can be decoded by itself,
        and the number of its first element.
        """

    def elements(self, files: Mapping[str, TensorFile], start: int, stop: int) -> Tensor:
        part, first = self.around(start, stop)
        return part.read(files).flatten()[start - first : stop - first]


_BlockSides = Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]


class _GroupWeights(TypedDict, total=False):
    block_structure: _BlockSides | str | None


class _ConfigGroup(TypedDict, total=False):
    weights: _GroupWeights | None


class Quantisation(TypedDict, total=False):
    """The fields of config.json's ``quantization_config`` that are read."""

    quant_method: str | None
    quant_algo: str | None  # of ModelOpt
    format: str | None
    weight_block_size: _BlockSides | None
    config_groups: dict[str, _ConfigGroup] | None


#: Files beside a config.json that say the same: of ModelOpt up to 0.29, of GPTQ and of AWQ.
DESCRIPTIONS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")


class ModelOptDescription(TypedDict, total=False):
    """What is read of ModelOpt's ``hf_quant_config.json``."""

    quantization: Quantisation


# Suffixes of tensor names in quantised checkpoints that can't be read.
_UNREADABLE = {
    ".g_idx": "GPTQ",
    ".qweight": "GPTQ or AWQ",
    ".absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".weight_packed": "compressed-tensors in a packed format",
}


def other_quantisation(names: Iterable[str], config: Quantisation) -> str | None:
    """Return the name of a quantisation that can't be read, if config.json or the tensors' names
    show one.
    """
    method = config.get("quant_method")
    form = config.get("format")
    if method == "compressed-tensors" and form != "float-quantized":
        return f"{method} in the format {form}"
    if method == "modelopt":
        # None where it has quantised no weights, but the cache of keys and values.
        algorithm = config.get("quant_algo") or "FP8"
        if not algorithm.startswith("FP8"):  # there is one with scales for rows, and one for blocks
            return f"ModelOpt's {algorithm}"
        method = "fp8"
    if method not in (None, "fp8", "fbgemm_fp8", "mxfp4", "compressed-tensors"):
        return str(method)
    for name in names:
        for suffix, quantisation in _UNREADABLE.items():
            if name.endswith(suffix):
                return quantisation
    return None


_FP8 = "F8_E4M3"
# Suffixes of a weight's key; the weight is multiplied by either.
_FP8_SCALES = ("_scale_inv", "_scale")
_INPUT_SCALES = ("input_scale", "activation_scale")
# Of queries, probabilities, and the keys and values that a server keeps.
_ATTENTION_SCALE = re.compile(r"(.+\.)?((q|k|v|kv|prob)_scale|[qkv]_proj\.output_scale)")
_USUAL_SIDES = (128, 128)  # of the blocks, where config.json does not give them


@dataclass(frozen=True)
class Fp8Tensor(Encoded):
    """An FP8 tensor in a file, and the place of its scales."""

    eps: ClassVar[float] = torch.finfo(torch.float8_e4m3fn).eps

    label: str  # the model and the tensor, for errors
    scale: TensorInfo
    block: tuple[int, ...]  # the sides of the blocks, each of which has a scale

    def rows(self, first: int, last: int) -> "Fp8Tensor":
        """Return these entries of the first dimension as a tensor of its own; they must not cut a
        block.
        """
        height = self.block[0]
        cut = super().rows(first, last)
        if height >= self.shape[0]:  # one scale for all
            return replace(cut, block=(last - first, *self.block[1:]))
        if first % height or (last % height and last != self.shape[0]):
            raise ValueError(
                f"{self.label}: rows {first} to {last} of {self.shape} cut its blocks of "
                f"{self.block}"
            )
        return replace(cut, scale=self.scale.rows(first // height, -(-last // height)))

    @property
    def _height(self) -> int:
        """The number of rows that are read together: those of a block, or one if all rows share
        their scales.
        """
        height = self.block[0]
        return height if height < self.shape[0] else 1

    @property
    def unit(self) -> int:
        return self._height * math.prod(self.shape[1:])

    def around(self, start: int, stop: int) -> tuple["Fp8Tensor", int]:
        width = math.prod(self.shape[1:])
        height = self._height
        first_row = start // width // height * height
        end_row = -(-stop // (width * height)) * height
        return self.rows(first_row, min(end_row, self.shape[0])), first_row * width

    def read(self, files: Mapping[str, TensorFile]) -> Tensor:
        """Return the values in float32."""
        stored = TensorInfo(self.file, _FP8, self.shape, self.start, self.stop)
        tiles = _to_tiles(files[self.file].read(stored).float(), self.block)
        scale = files[self.scale.file].read(self.scale).float()
        sides_of_scale = []
        for count in tiles.shape[::2]:
            sides_of_scale += [count, 1]
        # In place, since a second copy in float32 would be four times what is stored.
        return _from_tiles(tiles.mul_(scale.reshape(sides_of_scale)), self.shape)


def _to_tiles(values: Tensor, block: Sequence[int]) -> Tensor:
    """Return values ``(n, m, ...)`` as ``(n / b, b, m / c, c, ...)``, padded with zeros to whole
    blocks.
    """
    padding: list[int] = []  # from the last dimension to the first, before and after it
    for size, side in zip(reversed(values.shape), reversed(block), strict=True):
        padding += [0, -size % side]
    if any(padding):
        values = pad(values, padding)
    sides = []
    for size, side in zip(values.shape, block, strict=True):
        sides += [size // side, side]
    return values.reshape(sides)


def _from_tiles(tiles: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the values of :func:`_to_tiles` in their original shape."""
    padded = [count * side for count, side in zip(tiles.shape[::2], tiles.shape[1::2], strict=True)]
    return tiles.reshape(padded)[tuple(map(slice, shape))].contiguous()


def join_fp8(
    model: str, tensors: Mapping[str, TensorInfo], config: Quantisation
) -> dict[str, TensorInfo]:
    """Return a model's tensors, with FP8 weights and their scales joined, and without the scales of
    its activations.

    An FP8 weight without a scale stays as it is, and is refused where it is needed.
    """
    joined = dict(tensors)
    for key, info in tensors.items():
        scale_keys = [key + suffix for suffix in _FP8_SCALES if key + suffix in tensors]
        if info.dtype != _FP8 or not scale_keys:
            continue
        scale_key = scale_keys[0]
        scale = tensors[scale_key]
        label = f"model '{model}', tensor '{key}'"
        if scale.dtype not in FLOATS:
            raise ValueError(
                f"{label}: its scales '{scale_key}' are stored as {scale.dtype}, only "
                f"{', '.join(FLOATS)}"
            )
        block = _block_sides(label, info.shape, scale.shape, config)
        joined[key] = Fp8Tensor(
            info.file, "F32", info.shape, info.start, info.stop, label, scale, block
        )
        # The result is in bfloat16, whose model has no place for scales of activations.
        for name in _INPUT_SCALES:
            joined.pop(key.removesuffix("weight") + name, None)
            joined.pop(f"{key}_{name}", None)
        del joined[scale_key]
    if config or len(joined) < len(tensors):
        for key in tensors:
            if _ATTENTION_SCALE.fullmatch(key):
                del joined[key]
    return joined


def _block_sides(
    label: str, shape: tuple[int, ...], scale: tuple[int, ...], config: Quantisation
) -> tuple[int, ...]:
    """Return the sides of the blocks, on which the shapes and config.json must agree."""
    ones = (1,) * len(shape)
    counts = scale  # of blocks along each dimension
    # The one scale of a whole tensor may be a scalar, whatever dimensions the tensor has.
    if math.prod(scale) == 1:
        counts = ones
    elif scale == shape[: len(scale)]:  # one for each row, or for each expert
        counts = (scale + ones)[: len(shape)]
    sides = (*ones[:-2], *_configured_sides(config))
    block = []
    if len(counts) == len(shape) >= 2:
        for size, count, side in zip(shape, counts, sides, strict=True):
            if count in (1, size):
                block.append(size // count)
            elif count == -(-size // side):
                block.append(side)
    if len(block) != len(shape):
        raise ValueError(
            f"{label} of shape {shape}: no blocks of {sides} have scales of shape {scale}"
        )
    return tuple(block)


def _configured_sides(config: Quantisation) -> Sequence[int]:
    """Return the sides of the blocks that config.json gives, or else the usual ones."""
    given: list[Sequence[int] | str | None] = [config.get("weight_block_size")]
    for group in (config.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        given.append(weights.get("block_structure"))
    for sides in given:
        if sides and not isinstance(sides, str):
            return sides
    return _USUAL_SIDES


_MXFP4_BLOCKS = "_blocks"
_MXFP4_SCALES = "_scales"
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CODES = torch.tensor(
    [*_POSITIVE, *(-value for value in _POSITIVE)], dtype=torch.bfloat16, device="cpu"
)
# Both values of each byte.
_PAIRS = torch.stack([_CODES.repeat(16), _CODES.repeat_interleave(16)], dim=1)


@dataclass(frozen=True)
class Mxfp4Tensor(Encoded):
    """An MXFP4 tensor, whose place is that of the blocks."""

    eps: ClassVar[float] = 0.5  # one bit after the point

    blocks: TensorInfo
    scales: TensorInfo

    def rows(self, first: int, last: int) -> "Mxfp4Tensor":
        """Return these experts as a tensor of its own."""
        blocks = self.blocks.rows(first, last)
        scales = self.scales.rows(first, last)
        return replace(super().rows(first, last), blocks=blocks, scales=scales)

    @property
    def unit(self) -> int:
        """The number of elements of an expert, whose values are stored transposed."""
        _, inputs, outputs = self.shape
        return inputs * outputs

    def around(self, start: int, stop: int) -> tuple["Mxfp4Tensor", int]:
        size = self.unit
        first = start // size
        return self.rows(first, -(-stop // size)), first * size

    def read(self, files: Mapping[str, TensorFile]) -> Tensor:
        blocks = files[self.blocks.file].read(self.blocks)
        scales = files[self.scales.file].read(self.scales)
        return decode_mxfp4(blocks, scales)


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the bfloat16 values ``(experts, inputs, outputs)`` of blocks and scales."""
    values = embedding(blocks.int(), _PAIRS).flatten(-2)
    values.ldexp_(scales.int().sub_(127).unsqueeze(-1))
    return values.flatten(-2).transpose(1, 2).contiguous()


def join_mxfp4(
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
        if not key.endswith(_MXFP4_BLOCKS) or blocks.dtype != "U8":
            continue
        name = key.removesuffix(_MXFP4_BLOCKS)
        scales = tensors.get(name + _MXFP4_SCALES)
        if scales is None or not _are_mxfp4(blocks, scales):
            if config.get("quant_method") != "mxfp4":
                continue
            given = f"no '{name + _MXFP4_SCALES}'"
            if scales is not None:
                given = f"'{name + _MXFP4_SCALES}' {scales.dtype} {scales.shape}"
            raise ValueError(
                f"model '{model}', tensor '{key}' {blocks.dtype} {blocks.shape} with {given}: "
                "MXFP4 has U8 blocks (experts, outputs, blocks, 16) and their scales"
            )
        del joined[key], joined[name + _MXFP4_SCALES]
        experts, outputs, count, _ = blocks.shape
        shape = (experts, 32 * count, outputs)
        joined[name] = Mxfp4Tensor(
            blocks.file, "BF16", shape, blocks.start, blocks.stop, blocks, scales
        )
    return joined


def _are_mxfp4(blocks: TensorInfo, scales: TensorInfo) -> bool:
    """Tell whether two tensors of bytes are blocks of MXFP4 and their scales."""
    return scales.dtype == "U8" and len(scales.shape) == 3 and blocks.shape == (*scales.shape, 16)


def join_encoded(
    model: str, tensors: Mapping[str, TensorInfo], config: Quantisation
) -> dict[str, TensorInfo]:
    """Return a model's tensors, each that is quantised joined of those in which it is stored."""
    return join_fp8(model, join_mxfp4(model, tensors, config), config)
