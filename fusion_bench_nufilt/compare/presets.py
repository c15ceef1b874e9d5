"""Comparisons of the paper by name."""

from collections.abc import Sequence

from .configs import NEED_DATA, Methods, compose_run
from .paper import paper_settings
from .specs import RunSpec, parse_methods

ABLATION = ("nufilt/naive", "nufilt/filter_only", "nufilt/adapter_only", "nufilt")
PAPER = (
    *("sequential_finetuning", "weight_average", "task_arithmetic", "ties_merging", "magmax", "adamerging"),
    *("lora_wemoe", "wudi", "iso_c", "knots_ties", "tsvm", "opcm", "nufilt"),
)
SENSITIVITY = {"null_rank": "r_p", "lora_rank": "r_l", "task_rank": "r_v", "max_steps": "steps"}
"""What the sensitivity curves vary, one at a time, and its symbol in the paper."""
_FACTORS = (0.25, 0.5, 2, 4)


def preset_specs(name: str, modelpool: str, overrides: Sequence[str], *, with_data: bool = False) -> list[RunSpec]:
    """The rows of a comparison of the paper.

    ``ablation`` has the four rows of the paper's ablation; ``paper`` the methods of its main table, as it sets them,
    those that need data only ``with_data``; ``sensitivity`` NUFILT, and NUFILT with each of its ranks and its steps at
    a quarter to four times the value it has.

    Raises:
        ValueError: no such preset, or one in which no method needs data.
    """
    methods = Methods(overrides)
    if with_data and name != "paper":
        raise ValueError(f"--with-data goes with --preset paper: no method of '{name}' needs data")
    if name == "ablation":
        return parse_methods(",".join(ABLATION), methods)
    if name == "paper":
        settings = paper_settings(modelpool)
        rows = [method for method in PAPER if with_data or method not in NEED_DATA]
        texts = [":".join([f"{method}={method}", *settings.get(method, ())]) for method in rows]
        return parse_methods(",".join(texts), methods)
    if name == "sensitivity":
        (default,) = parse_methods("nufilt", methods)
        config = compose_run([*default.overrides, *overrides]).method
        varied = [f"{key}={max(1, round(factor * config[key]))}" for key in SENSITIVITY for factor in _FACTORS]
        return [default, *(RunSpec(s, (*default.overrides, f"method.{s}"), "nufilt", (s,)) for s in varied)]
    raise ValueError(f"there is no preset '{name}'; there are: ablation, paper, sensitivity")
