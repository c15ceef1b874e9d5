"""The page of a merge of folders, which shows what happened to the layers."""

from typing import Any, NotRequired

import pandas as pd
from typing_extensions import TypedDict

from fusion_bench_nufilt.utils.schemas import Count, Coverage, LayerStep, Share

from .layers import layer_charts, layer_means, strongest_layers
from .page import Outputs, Tables, render_page


class MergeContent(TypedDict):
    """The fields of a merge's manifest that the page shows."""

    method: str
    step: Count
    tasks: list[str]
    inputs: dict[str, Any]
    settings: dict[str, Any]
    versions: dict[str, str]
    coverage: Coverage
    warnings: NotRequired[list[str]]
    layers: NotRequired[dict[str, list[LayerStep]]]


def merge_outputs(content: MergeContent, _: Tables) -> Outputs:
    """Make the page; refuse a saved step of a run, whose layers are in the log directory."""
    if "layers" not in content:
        raise ValueError(
            "it is one step of a run: name the log directory of the run, in which checkpoints/ is"
        )
    tasks, coverage = content["tasks"], content["coverage"]
    rows = pd.DataFrame(
        [{"layer": name, **report} for name, steps in content["layers"].items() for report in steps]
    )
    steps = layer_means(rows, ["step"])
    # The last task is that of the last step; the first one's step may be any (--step).
    steps.insert(1, "task", [tasks[step - content["step"] - 1] for step in steps["step"]])
    strongest = strongest_layers(rows)
    shapes = {
        name: " x ".join(map(str, shape))
        for name, shape in zip(rows["layer"], rows["shape"], strict=True)
    }
    strongest.insert(1, "shape", strongest["layer"].map(shapes))
    page = render_page(
        "merge.html",
        content=content,
        begun_elsewhere=len(tasks) > content["step"] - rows["step"].min() + 1,
        steps=steps,
        strongest=strongest,
        layers=layer_charts(rows),
        coverage=_shares(coverage),
        remarks=[f"not merged: {name} ({count})" for name, count in coverage["left_out"].items()]
        + content.get("warnings", []),
    )
    return Outputs(page, {})


def _shares(coverage: Coverage) -> pd.DataFrame:
    shares: dict[str, Share] = {name: coverage[name] for name in ("merged", "averaged", "kept")}
    rows = [
        (name, share["parameters"], 100 * share["share"])
        for name, share in shares.items()
        if share["parameters"]
    ]
    return pd.DataFrame(rows, columns=["what", "tensors", "elements %"])
