"""The result of a comparison: all numbers, which are saved and given to trackers."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fusion_bench_nufilt.continual import METRICS
from fusion_bench_nufilt.continual.program import finish_trackers, log_picture
from fusion_bench_nufilt.pages.content import ComparisonContent, Json, Method, References, SeedRun
from fusion_bench_nufilt.pages.metrics import or_none
from fusion_bench_nufilt.pages.write import write_results
from fusion_bench_nufilt.utils.files import write_json

from .paper import SENSITIVITY, printed, printed_row, published
from .specs import NEED_DATA, RunSpec

_OVERHEAD_POOL = "clip-vit-base-patch32_TA8"  # the models that the paper's table of costs is for


class Comparison(ComparisonContent):
    """The methods of a comparison on all seeds, beside the numbers that the paper prints for
    them.
    """

    @classmethod
    def of(
        cls,
        settings: Json,
        tasks: list[str],
        seeds: list[int],
        references: References,
        runs: Mapping[RunSpec, Mapping[int, SeedRun]],
        preset: str | None = None,
    ) -> "Comparison":
        validation = settings.get("resolved", {}).get("validation")
        modelpool = settings["modelpool"]
        numbers, why_hidden = published(modelpool, settings["overrides"], seeds, validation)
        methods = {}
        for spec, by_seed in runs.items():
            form = next(
                (run.config["form"] for run in by_seed.values() if "form" in run.config), None
            )
            row = printed_row(spec, form, modelpool, numbers)
            data = NEED_DATA.get(spec.method, "none")
            methods[spec.label] = Method(list(spec.overrides), dict(by_seed), data, row)
        panels = [{**panel, "fixed": list(panel["fixed"])} for panel in SENSITIVITY]
        environments = pd.DataFrame(
            run.environment for by_seed in runs.values() for run in by_seed.values()
        )
        return cls(
            settings=settings,
            environment={
                name: " and ".join(environments[name].dropna().unique()) for name in environments
            },
            preset=preset,
            tasks=tasks,
            seeds=seeds,
            references=references,
            published_percent={label: numbers[label] for label in references if label in numbers},
            published_note=why_hidden,
            methods=methods,
            panels=panels if preset in ("sensitivity", "ranks") else None,
            published_overhead=(
                printed("overhead", _OVERHEAD_POOL) if preset == "overhead" else None
            ),
        )

    def save(self, folder: Path) -> list[str]:
        """Write ``results.json`` and its tables, pictures and page; return the files' names."""
        write_json(folder / "results.json", self.as_json())
        return ["results.json", *write_results(folder)]

    def log(self, loggers: Sequence[Any], pictures: Sequence[Path]) -> None:
        """Give trackers all scores by step, and with the last step means and pictures."""
        by_step: dict[int, dict[str, float | None]] = defaultdict(dict)
        for label, method in self.done.items():
            for seed, matrix in method.matrices.items():
                names = [f"{label}/seed {seed}/{task}" for task in matrix.tasks]
                for step, row in enumerate(matrix.rows(), 1):
                    by_step[step] |= zip(names, row, strict=True)
            by_step[len(self.tasks)] |= {
                f"{label}/{name}": or_none(method.mean(name).mean) for name in METRICS
            }
        for step, scores in by_step.items():
            known = {name: score for name, score in scores.items() if score is not None}
            for logger in loggers if known else ():
                logger.log_metrics(known, step=step)
        for picture in pictures:
            log_picture(loggers, picture.stem, picture, len(self.tasks))
        finish_trackers(loggers, "success")
