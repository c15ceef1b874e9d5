"""Put the findings of an analysis into sentences."""

from itertools import combinations
from statistics import fmean
from typing import Any

from fusion_bench_nufilt.pages.page import sentences

Json = dict[str, Any]


def reading(content: Json) -> list[str]:
    """Return sentences on which tasks collide and where, how many directions they take, and what the data shows."""
    named, overlap = list(enumerate(content["names"])), content["overlap"]["all"]
    pairs = sorted(((overlap[i][j], i, j, one, other) for (i, one), (j, other) in combinations(named, 2)), reverse=True)
    by_layer = content["layers_of"].get("overlap of two task vectors, mean over pairs", {})
    return sentences(
        "reading.txt",
        content=content,
        pairs=[(value, one, other) for value, _, _, one, other in pairs],
        mean_overlap=fmean(value for value, *_ in pairs) if pairs else None,
        layers=sorted(by_layer.items(), key=lambda row: -row[1]),
        dominance=content.get("affinity", {}).get("all", {}).get("dominance"),
        theorem=content.get("theorem"),
        methods={name: row for name, row in content.get("methods", {}).items() if "fixed" in row},
    )
