"""What the name of a layer says about its place in the model."""

import re

#: The kinds of layers, which have the same colours on all pages.
KINDS = ("attention", "MLP")


def kind(layer: str) -> str:
    """Return ``attention`` for a layer of an attention block, and ``MLP`` for any other."""
    return "attention" if re.search("attn|attention", layer, re.IGNORECASE) else "MLP"


def depth(layer: str) -> int:
    """Return the number of the layer's block, which is the first number in its name; 0 where there
    is none.
    """
    match = re.search(r"(?:^|\.)(\d+)\.", layer)
    return int(match[1]) if match else 0
