"""Numbers printed in the paper (Qiu et al., ICLR 2026, arXiv 2509.21413), in per cent: means over ten orders.

They are shown beside what is measured only for the same models and the setting they were printed for.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Published(NamedTuple):
    """ACC, and BWT where it is printed; in per cent."""

    acc: float
    bwt: float | None = None


_CLIP_POOLS = [
    f"clip-vit-{model}_{tasks}"
    for model in ("base-patch32", "base-patch16", "large-patch14")
    for tasks in ("TA8", "TALL14", "TALL20")
]

# ACC by the nine settings above: ViT-B/32, B/16 and L/14, each on 8, 14 and 20 tasks
_CLIP_ACC = {
    "pretrained": (48.1, 56.9, 55.6, 55.4, 62.0, 59.8, 64.9, 69.1, 65.6),
    "individual": (90.4, 89.3, 89.8, 92.4, 91.3, 91.6, 94.3, 93.4, 93.5),
    "weight_average": (66.3, 65.4, 61.1, 72.3, 69.7, 64.8, 80.0, 77.5, 71.1),
    "task_arithmetic": (67.5, 66.5, 60.0, 77.1, 70.9, 64.2, 82.1, 77.9, 70.3),
    "ties_merging": (49.0, 66.2, 59.9, 66.8, 70.5, 63.0, 64.3, 78.0, 68.3),
    "magmax": (70.7, 67.0, 61.2, 76.7, 67.0, 62.5, 83.4, 71.2, 71.2),
    "adamerging": (53.4, 59.8, 59.7, 59.9, 64.3, 61.5, 68.8, 73.1, 66.9),
    "wudi": (74.7, 67.0, 63.7, 81.0, 75.0, 69.6, 87.5, 84.2, 78.1),
    "iso_c": (71.7, 73.2, 67.6, 78.5, 79.7, 73.0, 86.9, 86.9, 80.9),
    "knots_ties": (54.4, 67.8, 60.5, 57.9, 71.6, 62.7, 68.3, 78.8, 69.7),
    "tsvm": (68.2, 63.3, 58.8, 75.4, 69.2, 63.1, 82.2, 78.1, 70.5),
    "opcm": (75.5, 71.9, 65.7, 81.8, 77.1, 70.3, 87.0, 83.5, 76.0),
    "nufilt": (83.6, 78.0, 71.0, 87.3, 83.1, 78.1, 91.6, 89.2, 84.7),
}
_CLIP_BWT = {"nufilt": (-2.7, -5.7, -8.9, -1.6, -3.5, -7.1, -1.1, -2.0, -4.6)}

# The ablation is printed for ViT-B/32 only.
_ABLATION_ACC = {
    "nufilt/naive": (62.1, 46.5, 34.3),
    "nufilt/filter_only": (80.0, 76.7, 67.0),
    "nufilt/adapter_only": (75.8, 63.7, 51.7),
}

# One order, the alphabetical one: `method.shuffle_order=false`.
_FLAN_T5 = {
    "pretrained": Published(75.7),
    "individual": Published(86.4),
    "nufilt": Published(83.7, -1.5),
    "wudi": Published(82.2, -3.9),
    "opcm": Published(80.6, -2.5),
    "task_arithmetic": Published(77.6, -4.6),
    "ties_merging": Published(75.6, -6.1),
}

_IN_ORDER = "method.shuffle_order=false"


def published(modelpool: str, overrides: Sequence[str]) -> dict[str, Published]:
    """The paper's numbers for a model pool, by method; empty where it has none, or for another setting than its.

    Args:
        modelpool: name of the model pool.
        overrides: those of `fusion_bench` for all methods. Numbers, and thus settings, do not depend on the device.
    """
    changing = [override for override in overrides if not override.startswith("fabric.accelerator=")]
    if modelpool == "flan-t5-base_glue":
        return _FLAN_T5 if changing == [_IN_ORDER] else {}
    if modelpool not in _CLIP_POOLS or changing:
        return {}
    column = _CLIP_POOLS.index(modelpool)
    rows = {
        name: Published(values[column], _CLIP_BWT[name][column] if name in _CLIP_BWT else None)
        for name, values in _CLIP_ACC.items()
    }
    if column < 3:
        rows |= {name: Published(values[column]) for name, values in _ABLATION_ACC.items()}
    return rows


def paper_settings(modelpool: str) -> dict[str, tuple[str, ...]]:
    """What the paper sets differently for a model pool than our configs do, by method."""
    smaller = ("scaling_factor=0.1",)  # its lambda for 14 and 20 tasks
    more_tasks = modelpool.endswith(("TALL14", "TALL20"))
    return dict.fromkeys(("task_arithmetic", "ties_merging", "knots_ties"), smaller) if more_tasks else {}
