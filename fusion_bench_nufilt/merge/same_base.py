"""Was a model fine-tuned from the base? Its weights tell: they are close to the base's."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fusion_bench_nufilt.methods.base import block_of
from fusion_bench_nufilt.models.architecture import Layer
from fusion_bench_nufilt.models.checkpoint import Checkpoint
from fusion_bench_nufilt.models.model import ModelWeights
from fusion_bench_nufilt.models.names import exclude_hint
from fusion_bench_nufilt.utils.manifest import read_manifest

from .plan import Plan

# A fine-tuned weight has a cosine of nearly 1 with its pretrained value; unrelated weights have one
# of about 0.
_LEAST_COSINE = 0.9  # of a whole model
_MOST_CHANGE = 0.5  # of a whole model
_LEAST_COSINE_OF_A_LAYER = 0.1
_SAMPLED_LAYERS = 8
_SAMPLED_ELEMENTS = 2**20


def check_same_base(plan: Plan) -> list[str]:
    """Warn if the weights suggest another base or no training, and refuse a layer that was drawn at
    random.

    Of files, a sample of the layers is read, each layer once; of models in memory, all layers.
    """
    warnings: list[str] = []
    merged_params = {layer.param for layer in plan.layers}
    for task in plan.tasks:
        changed = merged_params | plan.averaged_of(task)
        updated = _sample([layer for layer in plan.layers if task.is_update(layer.param)])
        warnings += task.check_effect(changed, [layer.param for layer in updated])
    models = []
    for model in plan.models.values():
        if model.is_complete and model is not plan.pretrained and not model.source.remote:
            models.append(model)
    # A plan downloads no weights; the merge looks at them once they are on this disk.
    if not models or plan.base.remote:
        return warnings
    layers = plan.layers
    if not plan.base.in_memory:
        layers = _sample(plan.layers)
    products: list[dict[Layer, Tensor]] = [{} for _ in models]
    # Layer by layer, so that the base's sample is read once for all models.
    for layer in layers:
        count = min(math.prod(layer.view.shape), _SAMPLED_ELEMENTS)
        x = plan.base.elements(layer.keys[0], 0, count)
        for model, of_layers in zip(models, products, strict=True):
            if model.has(layer.param):
                y = model.elements(layer.param, 0, count, x)
                of_layers[layer] = _inner_products(x.double(), y.double())
    for model, of_layers in zip(models, products, strict=True):
        warning = _compare(plan, model, of_layers)
        if warning is not None:
            warnings.append(warning)
    return warnings


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


def _compare(plan: Plan, model: ModelWeights, products: Mapping[Layer, Tensor]) -> str | None:
    """Return the warning about a model's weights, if they call for one."""
    name = model.source.name
    apart = []
    for layer, of_layer in products.items():
        xx, yy, xy, _ = of_layer.tolist()
        if _unrelated(xx, yy, xy):
            apart.append(layer)
    nothing = torch.zeros(4, dtype=torch.float64, device="cpu")
    xx, yy, xy, dd = sum(products.values(), nothing).tolist()
    if not xx * yy > 0:  # nothing to compare, or one that is zero: untrained
        return None
    # Where most layers are unrelated, the base is another one, which the warning below says.
    if 0 < len(apart) <= (len(products) + 1) // 2:
        layer = apart[0]
        raise ValueError(
            f"model '{name}', layer '{layer.name}' {layer.view.shape} has nothing to do with the "
            "pretrained model's: one of them was drawn at random"
            f"{exclude_hint(layer.name)}"
        )
    if _names_base(plan, model):  # that of another base is refused elsewhere
        return None
    cosine = xy / (xx * yy) ** 0.5
    change = (dd / xx) ** 0.5
    if cosine < _LEAST_COSINE or change > _MOST_CHANGE:
        return (
            f"'{name}' looks as if it was made from another base than '{plan.base.name}': over "
            f"{len(products)} layers their weights have cosine {cosine:.3f}, "
            f"||tau|| / ||theta_0|| is {change:.2f}"
        )
    if not dd:
        return f"'{name}' does not differ from the base in the {len(products)} layers looked at"
    return None


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
