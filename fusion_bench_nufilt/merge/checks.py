"""What a merge refuses before anything large is read, and what it warns of: of the model merged so
far, of the tasks, of the base that their weights suggest, and of models in memory.

A check changes nothing: it raises a ValueError, or returns its warnings.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from fusion_bench_nufilt.methods.base import block_of
from fusion_bench_nufilt.methods.options import Settings, TargetConfig
from fusion_bench_nufilt.models.layers import Layer, exclude_hint
from fusion_bench_nufilt.models.model import ModelWeights
from fusion_bench_nufilt.models.source import format_names
from fusion_bench_nufilt.nufilt.low_rank import LowRank
from fusion_bench_nufilt.utils.files import CARD, MANIFEST, Input
from fusion_bench_nufilt.utils.manifest import (
    STATE_FILE,
    Difference,
    base_of,
    differences,
    in_one_line,
    input_differences,
    is_made_from,
    is_same_model,
    is_same_task,
    tasks_of,
    verify_files,
)
from fusion_bench_nufilt.utils.options import with_scope

from .plan import Plan

_CHANGED = "merge or fetch it again; --no-verify goes on from it all the same"

# A fine-tuned weight has a cosine of nearly 1 with its pretrained value; unrelated weights have one
# of about 0.
_LEAST_COSINE = 0.9  # of a whole model
_MOST_CHANGE = 0.5  # of a whole model
_LEAST_COSINE_OF_A_LAYER = 0.1
# Of files, so much is read, of the base and of each model.
_SAMPLED_LAYERS = 8
_SAMPLED_ELEMENTS = 2**20  # of each layer


def check_merged_manifest(plan: Plan, merged: ModelWeights) -> list[str]:
    """Refuse a merged model of which nothing tells how many tasks it holds, and warn if it was made
    with other settings.
    """
    if plan.settings.step is None and "step" not in plan.merged_manifest:
        raise ValueError(
            f"'{merged.source.name}' has no {MANIFEST} that tells how many tasks it holds: say "
            "with --step which number the new one has"
        )
    return other_options(plan)


def options_warning(name: str, differing: Sequence[Difference]) -> str:
    """Say which options a merged model was made with otherwise."""
    listing = "; ".join(map(str, differing))
    return f"settings differ from those that '{name}' was made with: {listing}"


def other_options(plan: Plan, kind: type = Settings) -> list[str]:
    """Warn of options that are to last for a stream, and that the merged model was made with
    otherwise; those of a merge by itself are of a kind.
    """
    saved_options = plan.merged_manifest.get("settings", {})
    if "layer_method" in saved_options:  # as a run of a model pool has it
        saved_options = {**saved_options, "method": saved_options["layer_method"]}
    options = json.loads(json.dumps(plan.options()))  # as a manifest has them
    kinds = [type(plan.method.options), TargetConfig, kind]
    before = {}
    now = {}
    # What is for one merge, its tasks or its run may differ from one step to the next.
    for key in ("method", *with_scope(kinds, "stream")):
        if key in saved_options and key in options:
            before[key] = saved_options[key]
            now[key] = options[key]
    differing = differences(before, now)
    if not differing:
        return []
    assert plan.merged is not None
    return [options_warning(plan.merged.source.name, differing)]


def check_contents(plan: Plan) -> None:
    """Refuse by their contents another base than that of the merged model, and tasks that are
    merged already.

    Models that are still on the hub are looked at once more when they are on this disk.
    """
    if plan.settings.verify:
        _refuse_other_base(plan)
        _refuse_merged_tasks(plan)


def _refuse_other_base(plan: Plan) -> None:
    """Refuse a base that is not the one in the manifest of the merged model. Where nothing tells,
    their weights do (:func:`check_same_base`).
    """
    saved = base_of(plan.merged_manifest)
    if plan.merged is None or saved is None or plan.base.is_absent:
        return
    identity = plan.pretrained.checkpoint.identity()
    if is_same_model(saved, identity) is None:
        return
    differing = input_differences("base", saved, identity)
    if differing:
        raise ValueError(
            f"'{plan.base.name}' is not the base of '{plan.merged.source.name}': "
            f"{in_one_line(differing)}; name that one, or add --no-verify"
        )


def _refuse_merged_tasks(plan: Plan) -> None:
    """Refuse a task that is the model to merge into, is in it already, or comes twice, by one name
    or two.
    """
    earlier_tasks = tasks_of(plan.merged_manifest)
    first_step = plan.merged_manifest.get("step", len(earlier_tasks)) - len(earlier_tasks) + 1
    inputs = plan.inputs
    others: list[tuple[str, Input]] = []
    for number, task in enumerate(plan.tasks):
        name = task.source.name
        identity = inputs[f"task {number}"]
        if plan.merged is not None:
            if is_same_model(identity, inputs["merged"]):
                raise ValueError(f"task '{name}' is also --merged: leave the task out")
            for step, saved in enumerate(earlier_tasks, first_step):
                if is_same_task(saved, identity):
                    raise ValueError(
                        f"task '{name}' is in '{plan.merged.source.name}' already, as step {step} "
                        f"('{saved['name']}'): leave it out, or add --no-verify"
                    )
        for other_name, other in others:
            if is_same_task(other, identity):
                raise ValueError(
                    f"task '{name}' is also task '{other_name}': name it once, and set its "
                    "strength by --weights, or add --no-verify"
                )
        others.append((name, identity))


def verify_merged(plan: Plan) -> list[str]:
    """Refuse a merged model on this disk if a file of it is not what was saved; with ``verify``
    off, warn where that file is not read.
    """
    if plan.merged is None or plan.merged.source.remote:
        return []
    # A model that something else merged has no manifest.
    if not plan.merged_manifest:
        return []
    merged = plan.merged.checkpoint
    small_files = []
    for name in plan.merged_manifest.get("files", {}):
        # People edit a card; files of weights are checked below, by what was opened of them.
        if name != CARD and not name.endswith(".safetensors"):
            small_files.append(name)
    if plan.settings.verify:
        state_files = []
        if plan.state is not None:
            state_folder = Path(STATE_FILE).parent
            state_files = [f"{state_folder}/{name}" for name in plan.state.source.opened]
        # Configurations, too: the result has the base's, and an edit would be lost without a word.
        names = [*merged.opened, *state_files, *small_files]
        verify_files(merged.folder, plan.merged_manifest, _CHANGED, names)
        return []
    warnings = []
    for name in small_files:
        try:
            verify_files(
                merged.folder,
                plan.merged_manifest,
                "configurations in the result are the base's",
                [name],
            )
        except ValueError as error:
            warnings.append(str(error))
    return warnings


def check_module_files(plan: Plan, task: ModelWeights) -> list[str]:
    """Warn of a task's modules of sentence-transformers that differ from the base's, since modules
    are not merged.
    """
    base_files = plan.pretrained.checkpoint.module_files()
    other_files = []
    for name, content in task.checkpoint.module_files().items():
        if not _same_content(base_files.get(name), content):
            other_files.append(name)
    if not other_files:
        return []
    return [
        f"'{task.source.name}' has other modules than the base, whose are kept: "
        f"{format_names(other_files)}"
    ]


def _same_content(one: bytes | None, other: bytes) -> bool:
    """Compare two files; of weights, their tensors alone."""
    if one is None:
        return False
    if one == other:
        return True
    try:
        # Headers of equal weights may differ in their order and metadata.
        tensors = load(one)
        others = load(other)
    except SafetensorError:
        return False
    if tensors.keys() != others.keys():
        return False
    return all(torch.equal(value, others[name]) for name, value in tensors.items())


def kept_from_base(plan: Plan) -> list[str]:
    """Return the tensors outside the merged layers that some tasks have and that do not change."""
    kept: dict[str, None] = {}
    for task in plan.tasks:
        averaged = plan.averaged_of(task)
        for param, entry in task.entries.items():
            is_changed = param in averaged or param in plan.computed
            if entry.is_stored and param in plan.other_keys and not is_changed:
                kept[param] = None
    return list(kept)


def check_same_base(plan: Plan) -> list[str]:
    """Warn if the weights suggest another base or no training, and refuse a layer that was drawn at
    random.

    Each layer that is looked at is read once.
    """
    warnings: list[str] = []
    merged_params = {layer.param for layer in plan.layers}
    for task in plan.tasks:
        in_full = {param for param, entry in task.entries.items() if entry.is_stored}
        if merged_params.union(plan.averaged_of(task)).isdisjoint(in_full):
            warnings += _check_factors(plan, task)
    # Of files, a sample; of models in memory, all layers.
    layers = plan.layers if plan.base.in_memory else _sample(plan.layers)
    models = []
    # The state of the model merged so far is compared with that model as its layers are read.
    for model in plan.merged_and_tasks:
        if model.source.remote:
            continue
        # The layers that an adapter holds in full are no sample of a model.
        params = [layer.param for layer in layers if layer.param in model.entries]
        if not all(model.info(param) for param in params):
            continue
        # However far from it: a strong adapter may leave nothing of a layer.
        if not plan.base.in_memory:
            identity = plan.pretrained.checkpoint.identity()
            if is_made_from(model.checkpoint.folder, identity):
                continue
        models.append(model)
    # A plan downloads no weights; the merge looks at them once they are on this disk.
    if not models or plan.base.remote:
        return warnings
    products: list[dict[Layer, Tensor]] = [{} for _ in models]
    # Layer by layer, so that the base's sample is read once for all models.
    for layer in layers:
        count = min(math.prod(layer.view.shape), _SAMPLED_ELEMENTS)
        x = plan.base.elements(layer.keys[0], 0, count)
        for model, of_layers in zip(models, products, strict=True):
            if model.info(layer.param):
                y = model.entries[layer.param].elements(0, count, x)
                of_layers[layer] = _inner_products(x.double(), y.double())
    for model, of_layers in zip(models, products, strict=True):
        warning = _compare(plan, model, of_layers)
        if warning is not None:
            warnings.append(warning)
    return warnings


def _check_factors(plan: Plan, task: ModelWeights) -> list[str]:
    """Warn of an adapter that adds nothing to layers."""
    updated = _sample([layer for layer in plan.layers if task.entries[layer.param].rank])
    if not updated:
        return []
    nothing = torch.empty(0, dtype=torch.float32, device="cpu")
    for layer in updated:
        update = task.entries[layer.param].read(nothing)
        assert isinstance(update, LowRank)
        if update.left.any() and update.right.any():
            return []
    return [
        f"adapter '{task.source.name}' changes nothing in the {len(updated)} layers looked at: its "
        "factors are zero, as before any training, or the lora_alpha in its adapter_config.json is"
    ]


def _sample(layers: Sequence[Layer]) -> list[Layer]:
    """Return layers from all over the model, and some outside its blocks, such as a pooler or a
    head.
    """
    outside = [layer for layer in layers if block_of(layer.name) is None]
    step = max(1, len(layers) // _SAMPLED_LAYERS)
    spread = layers[::step][:_SAMPLED_LAYERS]
    # A dict has each of them once.
    return list(dict.fromkeys([*spread, *outside[:_SAMPLED_LAYERS]]))


def _inner_products(x: Tensor, y: Tensor) -> Tensor:
    """Return the inner products of the base's and a model's values: x x, y y, x y, and that of the
    difference with itself.
    """
    return torch.stack([x @ x, y @ y, x @ y, (y - x) @ (y - x)]).cpu()


def _compare(plan: Plan, model: ModelWeights, products: Mapping[Layer, Tensor]) -> str | None:
    """Return the warning about a model's weights, if they call for one."""
    name = model.source.name
    unrelated = []
    for layer, of_layer in products.items():
        xx, yy, xy, _ = of_layer.tolist()
        if _are_unrelated(xx, yy, xy):
            unrelated.append(layer)
    total = torch.zeros(4, dtype=torch.float64, device="cpu")
    for of_layer in products.values():
        total = total + of_layer
    xx, yy, xy, dd = total.tolist()
    if not xx * yy > 0:  # nothing to compare, or one that is zero: untrained
        return None
    # Where most layers are unrelated, the base is another one, which the warning below says.
    if 0 < len(unrelated) <= (len(products) + 1) // 2:
        layer = unrelated[0]
        raise ValueError(
            f"model '{name}', layer '{layer.name}' {layer.view.shape} has nothing to do with the "
            "pretrained model's: one of them was drawn at random"
            f"{exclude_hint([layer.name])}"
        )
    cosine = xy / (xx * yy) ** 0.5
    change = (dd / xx) ** 0.5
    if cosine < _LEAST_COSINE or change > _MOST_CHANGE:
        suspicion = (
            f"'{name}' looks as if it was made from another base than '{plan.base.name}': over "
            f"{len(products)} layers their weights have cosine {cosine:.3f}, "
            f"||tau|| / ||theta_0|| is {change:.2f}"
        )
        # Nothing but its weights tells what it was made from.
        if model is plan.merged and plan.settings.verify:
            advice = "name that one, or add --no-verify"
            if model.source.in_memory:
                advice = "name that one, or set method.verify=false"
            raise ValueError(f"{suspicion}; {advice}")
        return suspicion
    if not dd:
        return f"'{name}' does not differ from the base in the {len(products)} layers looked at"
    return None


def _are_unrelated(xx: float, yy: float, xy: float) -> bool:
    """Tell from their inner products whether two weights are unrelated; one that is zero counts as
    untrained.
    """
    return xx * yy > 0 and xy < _LEAST_COSINE_OF_A_LAYER * math.sqrt(xx * yy)
