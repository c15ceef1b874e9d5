"""The page of a merge of folders, which shows what happened to the layers."""

from typing import Any, NotRequired

import numpy as np
import pandas as pd
from typing_extensions import TypedDict

from fusion_bench_nufilt.storage.schemas import Count, Coverage, Fate, LayerStep

from .page import Files, Page, Tables, Value
from .run import layer_charts

_STRONGEST = 20
_SHOWN = {"filtered_share": "share filtered", "overlap": "overlap of subspaces"}
_NORM = "norm of task vectors"


class Merge(TypedDict):
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


def merge_files(content: Merge, _: Tables) -> Files:
    """Make the page; refuse a saved step of a run, whose layers are in the log directory."""
    if "layers" not in content:
        raise ValueError("it is one step of a run: name the log directory of the run")
    return Files(_page(content), {})


def _page(content: Merge) -> Page:
    tasks, coverage = content["tasks"], content["coverage"]
    reports: list[dict[str, Any]] = [
        {"layer": layer, **report} for layer, steps in content["layers"].items() for report in steps
    ]
    rows = pd.DataFrame(reports)
    covered = f"{len(content['layers'])} layers, {coverage['merged']['share']:.1%} of all elements"
    page = Page(f"{content['method']}: {len(tasks)} models merged", covered)
    page.heading("Steps")
    last, first = content["step"], rows["step"].min()
    if len(tasks) > last - first + 1:
        page.words(f"Made here from step {first} on; the steps before are on the page of the model it went on from.")
    steps = _summary(rows, "step")
    # The last task is that of the last step; the first one's step may be any (--step).
    cells = ([step, tasks[step - last - 1], *values] for step, *values in steps.itertuples())
    page.table(["step", "task", *steps.columns], cells, digits=3)
    page.heading("Layers by strength")
    layers = _summary(rows, "layer").sort_values(_NORM, ascending=False).head(_STRONGEST)
    page.words(f"The {len(layers)} layers that the tasks change most:")
    shapes = {row["layer"]: " x ".join(map(str, row["shape"])) for row in reports}
    cells = ([layer, shapes[layer], *values] for layer, *values in layers.itertuples())
    page.table(["layer", "shape", *layers.columns], cells, digits=3)
    layer_charts(page, rows)
    page.heading("Coverage")
    fates: dict[str, Fate] = {name: coverage[name] for name in ("merged", "averaged", "kept")}
    counts: list[list[Value]] = [
        [name, fate["parameters"], 100 * fate["share"]] for name, fate in fates.items() if fate["parameters"]
    ]
    page.table(["what", "tensors", "elements %"], counts)
    left_out = (f"not merged: {name} ({count})" for name, count in coverage["left_out"].items())
    page.bullets([*left_out, *content.get("warnings", [])])
    page.configuration({key: content[key] for key in ("settings", "inputs", "versions")})
    return page


def _summary(rows: pd.DataFrame, by: str) -> pd.DataFrame:
    """Return, for every step or layer, the norm of its task vectors and the means of what the method measured."""
    groups = rows.groupby(by)
    norms = groups["task_norm"].agg(lambda norms: float(np.linalg.norm(norms))).rename(_NORM)
    known = {key: title for key, title in _SHOWN.items() if key in rows}
    return pd.concat([norms, groups[list(known)].mean().rename(columns=known)], axis=1)
