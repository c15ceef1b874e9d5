"""What the name of a layer says of its place in the model."""

import re


def kind(layer: str) -> str:
    """``attention``, or else ``MLP``."""
    return "attention" if re.search("attn|attention", layer, re.IGNORECASE) else "MLP"


def depth(layer: str) -> int:
    """The number of its block, which is the first in its name; 0 without one."""
    found = re.search(r"(?:^|\.)(\d+)\.", layer)
    return int(found[1]) if found else 0
