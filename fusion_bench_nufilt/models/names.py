"""What the name of a layer or tensor says about its block: ``model.layers.3.mlp.up_proj`` is in
block 3.
"""

import re
from collections.abc import Iterable

from fusion_bench_nufilt.methods.base import block_of

# The dots are not consumed, so that of two numbers side by side both are found.
_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")


def layer_name(name: str) -> str:
    """Return the name of a layer, given that of its module: transformers 5 drops the prefix of CLIP
    vision towers.
    """
    # A layer's name seeds its A, so that it must be the same under both versions.
    return name.removeprefix("vision_model.")


def in_module_of_block(tensor: str) -> bool:
    """Return whether a tensor belongs to a module inside a block, and is not the block's own
    parameter.
    """
    block = block_of(tensor)
    return block is not None and "." in block.inside


def exclude_hint(layer: str) -> str:
    """Return the end of a message about a layer that only some of the models have."""
    return f"; exclude_modules=[{layer}] leaves it out"


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
