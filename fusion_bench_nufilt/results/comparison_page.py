"""The page of a comparison: table, plane of stability and plasticity, matrices."""

from pathlib import Path
from typing import Any

from .charts import bars_by_step, heat_maps, lines, points
from .page import Page, Value
from .run_page import percent

Json = dict[str, Any]


def comparison_page(folder: Path, content: Json) -> Page:
    """From ``results.json``."""
    tasks, methods, seeds = content["tasks"], content["methods"], content["seeds"]
    orders = "one task order" if len(seeds) == 1 else f"{len(seeds)} task orders"
    page = Page(
        f"{content['settings']['modelpool']}: {len(methods)} methods",
        f"{len(tasks)} models merged one after another, {orders} ({', '.join(map(str, seeds))})",
    )
    page.heading("Methods (%)")
    header = ["method", "ACC", "±", "BWT", "±", "right after its step"]
    header += ["extra parameters", "data", "merging s", "runs", "paper's ACC"]
    page.table(header, _rows(content), digits=1)
    printed = {name: row["published_percent"].get("ACC", {}).get("note") for name, row in methods.items()}
    if noted := {name: note for name, note in printed.items() if note}:
        page.bullets(f"the paper's {name}: {note}" for name, note in noted.items())
    failed = {
        f"{name}, seed {seed}": run["error"]
        for name, row in methods.items()
        for seed, run in row["runs"].items()
        if run["error"]
    }
    if failed:
        page.bullets(f"{what} failed: {reason}" for what, reason in failed.items())
    done = {name: row for name, row in methods.items() if row["ACC"]["mean"] is not None}
    plane = {name: _point(row) for name, row in done.items() if row["BWT"]["mean"] is not None}
    if plane:
        page.heading("Stability against plasticity")
        page.chart(points(plane, "score right after its own step (%)", "BWT (%)"))
    if done:
        _matrices(page, done, str(seeds[0]))
    page.heading("Each task after the last step (%)")
    single = [[name, *(_percent(scores[task]) for task in tasks)] for name, scores in content["references"].items()]
    merged = [[name, *(_percent(row["final"][task]["mean"]) for task in tasks)] for name, row in methods.items()]
    page.table(["method", *tasks], [*single, *merged], digits=1)
    page.heading("Configuration")
    page.details("settings", content["settings"])
    page.details("methods", {name: row["overrides"] for name, row in methods.items()})
    page.details("versions", content["environment"])
    return page


def _rows(content: Json) -> list[list[Value]]:
    rows: list[list[Value]] = []
    for name, scores in content["references"].items():
        known = [score for score in scores.values() if score is not None]
        rows.append([name, _percent(sum(known) / len(known)) if known else None, *[None] * 9])
    for name, row in content["methods"].items():
        finished = sum(run["error"] is None for run in row["runs"].values())
        printed = row["published_percent"]
        rows.append(
            [
                name,
                _percent(row["ACC"]["mean"]),
                _percent(row["ACC"]["std"]),
                _percent(row["BWT"]["mean"]),
                _percent(row["BWT"]["std"]),
                _percent(row["plasticity"]["mean"]),
                row.get("extra_parameters"),
                row.get("data"),
                row["merging_seconds"]["mean"],
                f"{finished}/{len(row['runs'])}",
                printed["ACC"]["value"] if "ACC" in printed else None,
            ]
        )
    return rows


def _point(row: Json) -> Json:
    acc, bwt, own = (_percent(row[key]["mean"]) for key in ("ACC", "BWT", "plasticity"))
    return {
        "x": own,
        "y": bwt,
        "x_std": _percent(row["plasticity"]["std"]),
        "y_std": _percent(row["BWT"]["std"]),
        "words": {"ACC": f"{acc:.1f}", "BWT": f"{bwt:+.1f}", "right after its step": f"{own:.1f}"},
    }


def _matrices(page: Page, methods: Json, seed: str) -> None:
    """Those of the first seed, whose order all its runs share."""
    runs = {name: row["runs"][seed] for name, row in methods.items() if row["runs"][seed]["accuracy_matrix"]}
    if not runs:
        return
    order = next(iter(runs.values()))["tasks"]
    matrices = {name: percent(run["accuracy_matrix"]) for name, run in runs.items()}
    steps = [f"{number} + {task}" for number, task in enumerate(order, 1)]
    page.heading(f"Scores after each step (%), seed {seed}")
    page.chart(heat_maps(matrices, steps, order, ("after", "task")))
    page.words("Side by side, after the step that the slider chooses:")
    page.chart(bars_by_step(matrices, order))
    seen = {
        name: [_mean_seen(matrix[: step + 1][-1][: step + 1]) for step in range(len(order))]
        for name, matrix in matrices.items()
    }
    if any(value is not None for curve in seen.values() for value in curve[:-1]):
        page.words("Mean score of the tasks seen so far:")
        page.chart(lines({"mean": seen}, range(1, len(order) + 1), "models merged"))


def _mean_seen(row: list[float | None]) -> float | None:
    known = [value for value in row if value is not None]
    return sum(known) / len(known) if len(known) == len(row) else None


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value
