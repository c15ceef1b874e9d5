"""Turn a mergekit file into a recipe of `nufilt merge`, where that has the same result."""

from typing import Any, Literal, Required

from pydantic import ConfigDict, FiniteFloat, with_config
from typing_extensions import TypedDict

from fusion_bench_nufilt.storage.files import checked

_Parameters = TypedDict(
    "_Parameters", {"weight": FiniteFloat, "normalize": bool, "lambda": FiniteFloat, "int8_mask": bool}, total=False
)


class _Weight(TypedDict, total=False):
    weight: FiniteFloat


class _Model(TypedDict, total=False):
    model: Required[str]
    parameters: _Weight | None


class _Tokenizer(TypedDict):
    source: str


@with_config(ConfigDict(extra="forbid"))
class _File(TypedDict, total=False):
    merge_method: Required[Literal["linear", "task_arithmetic"]]
    models: Required[list[_Model]]
    base_model: str
    parameters: _Parameters | None
    dtype: str
    out_dtype: str
    tokenizer_source: str
    tokenizer: _Tokenizer


def from_mergekit(content: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe for the content of a mergekit file; a ValueError names the field that asks for something else.

    Either method adds a weighted sum of updates to the base. With weights times the number of tasks, that is a mean,
    which `nufilt merge` also takes of tensors outside the layers.
    """
    try:
        checked(content, _File)
    except ValueError as error:
        can = "nufilt merge can do linear and task_arithmetic of whole models with a number as weight"
        others = "fusion_bench has method=continual/ties_merging and others"
        raise ValueError(f"{error}; of a mergekit file, {can}; {others}") from None
    shared, linear = content.get("parameters") or {}, content["merge_method"] == "linear"
    base = content.get("base_model") or (content["models"][0]["model"] if linear and content["models"] else None)
    if base is None:
        raise ValueError("field 'base_model': field required")
    weights: list[tuple[str, float]] = []
    for number, each in enumerate(content["models"]):
        weight = (each.get("parameters") or {}).get("weight", shared.get("weight"))
        if weight is None and (linear or each["model"] != base):
            raise ValueError(f"field 'models.{number}.parameters.weight': field required")
        weights.append((each["model"], weight or 0.0))
    tasks = [(model, weight) for model, weight in weights if model != base]
    total = sum(weight for _, weight in (weights if linear else tasks)) if shared.get("normalize", linear) else 1.0
    if not tasks or not total or (linear and not shared.get("normalize", True)):
        raise ValueError("field 'models': there must be a model beside the base, and weights that can be normalised")
    strength = len(tasks) / total * (1.0 if linear else shared.get("lambda", 1.0))
    recipe = {
        "method": "sum",
        "base": base,
        "tasks": [model for model, _ in tasks],
        "weights": [weight * strength for _, weight in tasks],
        "scale": 1 / len(tasks),
        "target_modules": "all-linear",
        "other_params": "mean",
        "dtype": content.get("out_dtype") or content.get("dtype"),
        "tokenizer": content.get("tokenizer_source") or content.get("tokenizer", {}).get("source"),
    }
    return {key: value for key, value in recipe.items() if value is not None}
