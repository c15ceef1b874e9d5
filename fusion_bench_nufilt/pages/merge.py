"""The page of a merge of folders, which shows what happened to the layers."""

from typing import Any, NotRequired

import pandas as pd
from typing_extensions import TypedDict

from fusion_bench_nufilt.utils.files import Count, CoverageShares, LayerStep, Share

from .layers import layer_charts, layer_means, strongest_layers
from .page import Layers, Outputs, render_page
from .pictures import draw
from .results import layer_rows


class MergeContent(TypedDict):
    """The fields of a merge's manifest that the page shows."""

    method: str
    step: Count
    tasks: list[str]
    inputs: dict[str, Any]
    settings: dict[str, Any]
    versions: dict[str, str]
    coverage: CoverageShares
    warnings: NotRequired[list[str]]
    layers: NotRequired[dict[str, list[LayerStep]]]


def merge_outputs(content: MergeContent, _: Layers) -> Outputs:
    """Make the page; refuse a saved step of a run, whose layers are in the log directory."""
    if "layers" not in content:
        raise ValueError(
            "it is one step of a run: name the log directory of the run, in which checkpoints/ is"
        )
    reports = []
    for layer, steps in content["layers"].items():
        for report in steps:
            reports.append({"layer": layer, **report})
    measured = pd.DataFrame(reports)
    rows = layer_rows(measured)
    tasks = content["tasks"]
    steps = layer_means(rows, ["step"])
    first_step = steps["step"][0]
    # The last task is that of the last step; the first one's step may be any (--step).
    steps["step"] = [f"{step} + {tasks[step - content['step'] - 1]}" for step in steps["step"]]
    strongest = strongest_layers(rows)
    shapes = {}
    for layer, shape in zip(measured["layer"], measured["shape"], strict=True):
        shapes[layer] = " x ".join(map(str, shape))
    strongest.insert(1, "shape", strongest["layer"].map(shapes))
    steps_made_here = content["step"] - measured["step"].min() + 1
    coverage = content["coverage"]
    remarks = [f"not merged: {name} ({count})" for name, count in coverage["left_out"].items()]
    remarks += content.get("warnings", [])
    page = render_page(
        "merge.html",
        content=content,
        begun_elsewhere=len(tasks) > steps_made_here,
        first_step=first_step,
        steps=steps,
        strongest=strongest,
        layers={name: draw(chart) for name, chart in layer_charts(rows).items()},
        coverage=_shares(coverage),
        remarks=remarks,
    )
    return Outputs(page, {})


def _shares(coverage: CoverageShares) -> pd.DataFrame:
    shares: dict[str, Share] = {name: coverage[name] for name in ("merged", "averaged", "kept")}
    rows = []
    for name, share in shares.items():
        if share["parameters"]:
            rows.append((name, share["parameters"], 100 * share["share"]))
    return pd.DataFrame(rows, columns=["what", "tensors", "elements %"])
