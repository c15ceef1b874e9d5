"""Was a model fine-tuned from the base? Its weights tell: they are close to the base's."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fusion_bench_nufilt.models.architecture import Layer
from fusion_bench_nufilt.models.checkpoint import Checkpoint
from fusion_bench_nufilt.models.model import ModelWeights
from fusion_bench_nufilt.models.names import block_of
from fusion_bench_nufilt.models.targets import exclude_hint
from fusion_bench_nufilt.utils.manifest import read_manifest

from .plan import Plan

# A fine-tuned weight has a cosine of nearly 1 with its pretrained value; unrelated weights have one
# of about 0.
_LEAST_COSINE, _MOST_CHANGE = 0.9, 0.5  # of a whole model
_LEAST_COSINE_OF_A_LAYER = 0.1
_SAMPLED_LAYERS, _SAMPLED_ELEMENTS = 8, 2**20


def check_relation(plan: Plan) -> Iterator[str]:
    """Warn if the weights suggest another base or no training, and refuse a layer that was drawn at
    random.

    Of files, a sample of the layers is read, each layer once; of models in memory, all layers.
    """
    for task in plan.tasks:
        changed = {layer.param for layer in plan.layers} | plan.averaged_of(task)
        updated = _sample([layer for layer in plan.layers if task.is_update(layer.param)])
        yield from task.check_effect(changed, [layer.param for layer in updated])
    models = [
        model
        for model in plan.models.values()
        if model.is_complete and model is not plan.pretrained and not model.source.remote
    ]
    if not models or plan.base.remote:
        return
    layers = plan.layers if plan.base.in_memory else _sample(plan.layers)
    products: list[dict[Layer, Tensor]] = [{} for _ in models]
    for layer in layers:
        count = min(math.prod(layer.view.shape), _SAMPLED_ELEMENTS)
        x = plan.base.elements(layer.keys[0], 0, count)
        for model, of_layers in zip(models, products, strict=True):
            if model.has(layer.param):
                y = model.elements(layer.param, 0, count, x)
                of_layers[layer] = _inner_products(x.double(), y.double())
    for model, of_layers in zip(models, products, strict=True):
        yield from _compare(plan, model, of_layers)


def _sample(layers: Sequence[Layer]) -> list[Layer]:
    """Return layers from all over the model, and some outside its blocks, such as a pooler or a
    head.
    """
    outside = [layer for layer in layers if block_of(layer.name) is None]
    step = max(1, len(layers) // _SAMPLED_LAYERS)
    return list(dict.fromkeys([*layers[::step][:_SAMPLED_LAYERS], *outside[:_SAMPLED_LAYERS]]))


def _inner_products(x: Tensor, y: Tensor) -> Tensor:
    """Return the inner products of the base's and a model's values: x x, y y, x y, and that of the
    difference with itself.
    """
    return torch.stack([x @ x, y @ y, x @ y, (y - x) @ (y - x)]).cpu()


def _compare(plan: Plan, model: ModelWeights, products: Mapping[Layer, Tensor]) -> Iterator[str]:
    base, name = plan.base, model.source.name
    apart = [layer for layer, each in products.items() if _unrelated(*each[:3].tolist())]
    nothing = torch.zeros(4, dtype=torch.float64, device="cpu")
    xx, yy, xy, dd = sum(products.values(), nothing).tolist()
    if not xx * yy > 0:
        return
    if 0 < len(apart) <= (len(products) + 1) // 2:
        layer, why = (
            apart[0],
            "has nothing to do with the pretrained model's: one of them was drawn at random",
        )
        raise ValueError(
            f"model '{name}', layer '{layer.name}' {layer.view.shape} {why}"
            f"{exclude_hint(layer.name)}"
        )
    cosine, change = xy / (xx * yy) ** 0.5, (dd / xx) ** 0.5
    if _names_base(plan, model):  # that of another base is refused elsewhere
        return
    if cosine < _LEAST_COSINE or change > _MOST_CHANGE:
        evidence = f"their weights have cosine {cosine:.3f}, ||tau|| / ||theta_0|| is {change:.2f}"
        other = f"'{name}' looks as if it was made from another base than '{base.name}'"
        yield f"{other}: over {len(products)} layers {evidence}"
    elif not dd:
        yield f"'{name}' does not differ from the base in the {len(products)} layers looked at"


def _unrelated(xx: float, yy: float, xy: float) -> bool:
    """Tell from their inner products whether two weights are unrelated; one that is zero counts as
    untrained.
    """
    return xx * yy > 0 and xy < _LEAST_COSINE_OF_A_LAYER * math.sqrt(xx * yy)


def _names_base(plan: Plan, model: ModelWeights) -> bool:
    """Tell whether a model is a result, however far from the base, whose manifest names the
    base.
    """
    if not isinstance(model.source, Checkpoint):
        return False
    manifest = read_manifest(model.source.folder) or {}
    return manifest.get("inputs", {}).get("base", {}).get("name") == plan.base.label
