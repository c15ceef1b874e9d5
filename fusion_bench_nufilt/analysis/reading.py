"""Put the findings of an analysis into the sentences of ``reading.md``."""

from itertools import combinations
from statistics import fmean
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fusion_bench_nufilt.storage.files import printable

Json = dict[str, Any]


def reading(content: Json) -> list[str]:
    """Return the template's paragraphs, each in one line."""
    overlap, scores = content["overlap"]["all"], content.get("affinity", {}).get("all", {})
    named = list(enumerate(content["names"]))
    ranked = sorted(((overlap[i][j], i, j, a, b) for (i, a), (j, b) in combinations(named, 2)), reverse=True)
    by_layer = content["layers_of"].get("overlap of two task vectors, mean over pairs", {})
    rows = content["vectors"].values()
    found = {
        "pairs": [(value, a, b) for value, _, _, a, b in ranked],
        "mean_overlap": fmean(value for value, *_ in ranked) if ranked else None,
        "layers": sorted(by_layer.items(), key=lambda row: -row[1]),
        "top": [100 * row["energy_in_top"] for row in rows],
        "ranks": [row["rank_90"] for row in rows],
        "dominance": scores.get("dominance"),
        "theorem": content.get("theorem"),
        "methods": {name: row for name, row in content.get("methods", {}).items() if "fixed" in row},
    }
    environment = Environment(
        loader=PackageLoader(__package__, ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if isinstance(value, str) else value,  # a name is part of a line
    )
    paragraphs = environment.get_template("reading.md").render({**content, **found}).split("\n\n")
    return [" ".join(paragraph.split("\n")).strip() for paragraph in paragraphs if paragraph.strip()]
