"""`nufilt mergekit`, mergekit with the methods of this package; and its files as recipes of `nufilt
merge`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Required

import typer
import yaml
from pydantic import ConfigDict, FiniteFloat, ValidationError, with_config
from typing_extensions import TypedDict

from fusion_bench_nufilt.core.options import unknown
from fusion_bench_nufilt.methods import METHODS
from fusion_bench_nufilt.storage.files import checked

from .terminal import Quiet, terminal


def mergekit(
    config: Annotated[
        Path,
        typer.Argument(help="File of mergekit, with a merge_method of mergekit or nufilt merge."),
    ],
    out: Annotated[Path, typer.Argument(help="Folder of the result.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(help="Options of mergekit-yaml, such as --cuda or --out-shard-size 1B."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Run mergekit with the methods of `nufilt merge`, such as merge_method: best.

    Their options are parameters of the file, with seed, target_modules and exclude_modules (regular
    expressions), other_params, and for each model a weight, the strength of its update. Models are
    merged in the order of the file.
    """
    with terminal(quiet):
        try:
            from mergekit.scripts.run_yaml import main

            from fusion_bench_nufilt.merge.in_mergekit import register_methods
        except ImportError as error:
            raise ValueError(f"{error}: pip install 'fusion-bench-nufilt[mergekit]'") from None
        register_methods()
        try:
            content = checked(yaml.safe_load(config.read_text()), dict[str, Any])
        except (yaml.YAMLError, ValueError, OSError, RecursionError) as error:
            raise ValueError(f"'{config}' can't be read: {' '.join(str(error).split())}") from None
        _check_names(content)
        words = [str(config), str(out), *(options or ()), *(["--quiet"] if quiet else [])]
        try:
            main(words, prog_name="nufilt mergekit")
        except ValidationError as error:
            raise ValueError("; ".join(each["msg"] for each in error.errors())) from None


def _check_names(content: dict[str, Any]) -> None:
    """Refuse an unknown method, and for a method of this package an unknown parameter, which
    mergekit would ignore.
    """
    from mergekit.merge_methods import registered_methods

    methods = {method.spec.name: method.spec for method in registered_methods()}
    if (name := content.get("merge_method")) not in methods:
        raise ValueError(unknown("merge_method", str(name), methods))
    known = [parameter.name for parameter in methods[name].parameters]
    for strange in (each for each in _parameters(content) if name in METHODS and each not in known):
        raise ValueError(unknown(f"parameter of merge_method {name}", strange, known))


def _parameters(content: Any) -> Iterator[str]:
    """Yield the names of the parameters that are set anywhere in a file of mergekit."""
    if isinstance(content, dict):
        yield from content.get("parameters") or ()
    for part in (
        content.values()
        if isinstance(content, dict)
        else content
        if isinstance(content, list)
        else ()
    ):
        yield from _parameters(part)


_Parameters = TypedDict(
    "_Parameters",
    {"weight": FiniteFloat, "normalize": bool, "lambda": FiniteFloat, "int8_mask": bool},
    total=False,
)


class _Weight(TypedDict, total=False):
    weight: FiniteFloat


class _Model(TypedDict, total=False):
    model: Required[str]
    parameters: _Weight | None


class _Tokenizer(TypedDict):
    source: str


class _AnyFile(TypedDict, total=False):
    models: Required[list[_Model]]
    base_model: str
    dtype: str
    out_dtype: str
    tokenizer_source: str
    tokenizer: _Tokenizer


@with_config(ConfigDict(extra="forbid"))
class _File(_AnyFile, total=False):
    merge_method: Required[Literal["linear", "task_arithmetic"]]
    parameters: _Parameters | None


@with_config(ConfigDict(extra="forbid"))
class _OwnFile(_AnyFile, total=False):
    merge_method: Required[str]
    parameters: dict[str, Any] | None


def from_mergekit(content: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe for the content of a mergekit file; a ValueError names the field that asks
    for something else.

    mergekit's two methods add a weighted sum of updates to the base. With weights times the number
    of tasks, that is a mean, which `nufilt merge` also takes of tensors outside the layers.
    """
    own = content["merge_method"] in METHODS
    try:
        checked(content, _OwnFile if own else _File)
    except ValueError as error:
        can = (
            "nufilt merge can do linear, task_arithmetic and its own of whole models with a number "
            "as weight"
        )
        others = "fusion_bench has method=continual/ties_merging and others"
        raise ValueError(f"{error}; of a mergekit file, {can}; {others}") from None
    shared, linear = content.get("parameters") or {}, content["merge_method"] == "linear"
    base = content.get("base_model") or (
        content["models"][0]["model"] if linear and content["models"] else None
    )
    if base is None:
        raise ValueError("field 'base_model': field required")
    weights: list[tuple[str, float]] = []
    default = 1.0 if own else None
    for number, each in enumerate(content["models"]):
        weight = (each.get("parameters") or {}).get("weight", shared.get("weight", default))
        if weight is None and (linear or each["model"] != base):
            raise ValueError(f"field 'models.{number}.parameters.weight': field required")
        weights.append((each["model"], weight or 0.0))
    tasks = [(model, weight) for model, weight in weights if model != base]
    recipe = {
        "base": base,
        "tasks": [model for model, _ in tasks],
        "dtype": content.get("out_dtype") or content.get("dtype"),
        "tokenizer": content.get("tokenizer_source") or content.get("tokenizer", {}).get("source"),
    }
    if own:
        options = {key: value for key, value in shared.items() if key != "weight"}
        recipe |= {
            "method": content["merge_method"],
            "weights": [weight for _, weight in tasks],
            **options,
        }
    else:
        recipe |= _sum(
            tasks, sum(weight for _, weight in (weights if linear else tasks)), shared, linear
        )
    return {key: value for key, value in recipe.items() if value is not None}


def _sum(tasks: list[tuple[str, float]], total: float, shared: Any, linear: bool) -> dict[str, Any]:
    """Return the settings that make mergekit's `linear` or `task_arithmetic`, given the sum of all
    weights.
    """
    total = total if shared.get("normalize", linear) else 1.0
    if not tasks or not total or (linear and not shared.get("normalize", True)):
        raise ValueError(
            "field 'models': there must be a model beside the base, and weights that can be "
            "normalised"
        )
    strength = len(tasks) / total * (1.0 if linear else shared.get("lambda", 1.0))
    return {
        "method": "sum",
        "weights": [weight * strength for _, weight in tasks],
        "scale": 1 / len(tasks),
        "target_modules": "all-linear",
        "other_params": "mean",
    }
