"""What the name of a layer or tensor says about its block: ``model.layers.3.mlp.up_proj`` is in
block 3.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

# Lazy, so that the outermost number is the block's: experts inside it have numbers, too.
_BLOCK = re.compile(r"(.*?\.)??(\d+)\.(.+)")
# The dots are not consumed, so that of two numbers side by side both are found.
_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")


def layer_name(name: str) -> str:
    """Return the name of a layer, given that of its module: transformers 5 drops the prefix of CLIP
    vision towers.
    """
    # A layer's name seeds its A, so that it must be the same under both versions.
    return name.removeprefix("vision_model.")


class Block(NamedTuple):
    """The outermost numbered block around a layer."""

    # The name of what holds the blocks, with a dot, which tells stacks apart; None at the top.
    stack: str | None
    number: int
    inside: str  # the rest of the layer's name


def block_of(name: str) -> Block | None:
    """Return the block of a layer, or None for a layer outside all blocks."""
    match = _BLOCK.fullmatch(name)
    if match is None:
        return None
    return Block(match[1], int(match[2]), match[3])


def last_block_numbers(names: Iterable[str]) -> dict[str | None, int]:
    """Return the number of the last block of each stack that holds one of these layers or
    tensors.
    """
    last: dict[str | None, int] = {}
    for name in names:
        block = block_of(name)
        if block is not None:
            last[block.stack] = max(last.get(block.stack, 0), block.number)
    return last


def in_module_of_block(tensor: str) -> bool:
    """Return whether a tensor belongs to a module inside a block, and is not the block's own
    parameter.
    """
    block = block_of(tensor)
    return block is not None and "." in block.inside


def without_numbers(name: str) -> str:
    """Return a name with ``*`` for the numbers of blocks, so that the same layers of all blocks
    have one name.
    """
    return _NUMBER.sub("*", name)


def with_same_ending(name: str, others: Iterable[str]) -> list[str]:
    """Return the names that are the same as this one from its block on, as in ``layers.0.mlp``."""
    in_block = re.search(r"[^.]+\.\d+\..*", name)
    if in_block is None:
        return []
    ending = f".{in_block[0]}"
    return sorted(other for other in others if f".{other}".endswith(ending))
