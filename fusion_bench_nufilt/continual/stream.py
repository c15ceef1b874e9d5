"""The order in which models arrive."""

import random
from collections.abc import Sequence


def task_order(names: Sequence[str], *, shuffle: bool, seed: int) -> list[str]:
    """Names in the order of the run: as given, or shuffled as in the paper (its ten orders are seeds 42 to 51).

    FusionBench's continual methods use the same order for the same seed.
    """
    order = list(names)
    if shuffle:
        random.Random(seed).shuffle(order)
    return order
