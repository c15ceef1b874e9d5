"""The comparisons of the paper, by name."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from .configs import compose_run, quiet
from .experiment import Experiment
from .overrides import without_method
from .paper import paper_settings
from .specs import NEED_DATA, RunSpec, parse_methods

Preset = Literal["ablation", "sensitivity", "paper", "overhead"]

ABLATION = ("nufilt/naive", "nufilt/filter_only", "nufilt/adapter_only", "nufilt")
PAPER = (
    *("sequential_finetuning", "weight_average", "task_arithmetic", "ties_merging", "magmax", "adamerging"),
    *("lora_wemoe", "wudi", "iso_c", "knots_ties", "tsvm", "opcm", "nufilt"),
)
OTHER_FORM = {"ties_merging": "released", "magmax": "paper", "adamerging": "released"}
"""The form that is not the default, of methods whose formula in the paper is not that of their released code."""
OVERHEAD = ("task_arithmetic", "opcm", "wudi", *(f"nufilt:max_steps={steps}" for steps in (25, 50, 100)))


class Panel(NamedTuple):
    """One curve of the paper's sensitivity figure, which varies one setting and holds the others fixed."""

    symbol: str
    key: str
    values: tuple[int, ...]
    fixed: Mapping[str, int]


_WIDTH = 768  # of the models that the ranks below are for
SENSITIVITY = (
    Panel("r_p", "null_rank", (0, 8, 16, 32, 64, 128, 256, 512, _WIDTH), {"lora_rank": 0, "task_rank": 0}),
    Panel("r_l", "lora_rank", (0, 4, 8, 16, 32, 64, 128), {"null_rank": 128, "task_rank": 8}),
    Panel("r_v", "task_rank", (0, 1, 2, 4, 8, 16, 32, 64, 128), {"null_rank": 128, "lora_rank": 16}),
    Panel("steps", "max_steps", (25, 50, 100), {"null_rank": 128, "lora_rank": 64, "task_rank": 8}),
)
"""Section 5.3 of the paper; the grids are ours, since it prints none."""


def preset_specs(name: str, modelpool: str, overrides: Sequence[str], *, with_data: bool = False) -> list[RunSpec]:
    """Return the methods of a comparison of the paper.

    ``ablation`` has the four rows of the paper's ablation; ``paper`` the methods of its main table, as it sets them,
    by both formulas where there are two, those that need data only ``with_data``; ``sensitivity`` the panels of
    :data:`SENSITIVITY`, their ranks in proportion to the width of the models; ``overhead`` the data-free rows of its
    table of costs.

    Raises:
        ValueError: there is no such preset, or ``with_data`` is for one in which no method needs data.
    """
    if with_data and name != "paper":
        raise ValueError(f"--with-data goes with --preset paper: no method of '{name}' needs data")
    if name == "ablation":
        return parse_methods(",".join(ABLATION), overrides)
    if name == "paper":
        settings, rows = paper_settings(modelpool), []
        for method in PAPER:
            if with_data or method not in NEED_DATA:
                rows.append([f"{method}={method}", *settings.get(method, ())])
                if other := OTHER_FORM.get(method):
                    rows.append([f"{method} ({other})={method}", f"form={other}", *settings.get(method, ())])
        return parse_methods(",".join(":".join(row) for row in rows), overrides)
    if name == "sensitivity":
        with quiet():
            width = Experiment(compose_run(without_method([f"modelpool={modelpool}", *overrides]))).width
        return [spec for panel in SENSITIVITY for spec in panel_specs(panel, width)]
    if name == "overhead":
        return parse_methods(",".join(OVERHEAD), overrides)
    raise ValueError(f"there is no preset '{name}'; there are: {', '.join(sorted(get_args(Preset)))}")


def panel_specs(panel: Panel, width: int) -> list[RunSpec]:
    """Return the methods of a panel, for models of a width; below 768, r_p and r_l are in proportion to it."""
    values = sorted({rank_for_width(panel.key, value, width) for value in panel.values})
    fixed = {key: rank_for_width(key, value, width) for key, value in panel.fixed.items()}
    rows = []
    for value in values:
        settings = tuple(f"{key}={number}" for key, number in {**fixed, panel.key: value}.items())
        overrides = ("method=nufilt", *(f"method.{setting}" for setting in settings))
        rows.append(RunSpec(f"{panel.symbol} {value}", overrides, "nufilt", settings))
    return rows


def rank_for_width(key: str, value: int, width: int) -> int:
    """Return an option, ``value`` in the paper at width 768, for models whose narrowest layer has d_i = ``width``.

    Below 768, r_p and r_l are in proportion to the width, rounded down; no rank is above it.
    """
    if key in ("null_rank", "lora_rank") and value:
        return width if value == _WIDTH else max(1, value * min(width, _WIDTH) // _WIDTH)
    return min(value, width) if key == "task_rank" else value
