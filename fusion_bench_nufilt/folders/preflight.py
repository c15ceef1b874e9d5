"""Planning a merge: the models are opened, and must pass all checks before anything large is read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusion_bench_nufilt.layers import TargetConfig, coverage
from fusion_bench_nufilt.methods import find_method
from fusion_bench_nufilt.storage.files import MANIFEST
from fusion_bench_nufilt.storage.manifest import STATE_FILE, Manifest, read_manifest
from fusion_bench_nufilt.storage.tensors import FLOATS

from . import hub
from .architecture import Architecture, Layer, by_slot
from .checkpoint import Checkpoint, is_adapter
from .checks import check_memory, check_merged, check_relation, check_tasks
from .models import FullModel, open_task
from .plan import Models, Plan, Selection
from .settings import Settings
from .state import check_state_tensors


def plan_merge(
    base: str,
    tasks: Sequence[str],
    merged: str | None = None,
    options: Any = None,
    targets: TargetConfig | None = None,
    settings: Settings | None = None,
    *,
    method: str = "nufilt",
) -> Plan:
    """Check all that headers tell, and a few samples of the weights where they are on this disk.

    Args:
        base: folder or hub name of the pretrained model.
        tasks: folders or hub names of fine-tuned models or peft LoRA adapters, in merging order.
        merged: folder or hub name of what is merged so far; by default nothing is.
        options: the method's options; by default its own defaults.
        targets: which layers are merged, and what happens to the rest; by default as the method has them.
        settings: how folders are merged.
        method: the method's name in :data:`fusion_bench_nufilt.methods.METHODS`.

    Raises:
        ValueError: There is no such method, or a model does not fit; the message names the model and the tensor, and
            says what to do.
    """
    kind, settings = find_method(method), settings or Settings()
    options, targets = options or kind.Options(), targets or TargetConfig(**kind.targets)
    if not isinstance(options, kind.Options):
        raise ValueError(f"the options of method {method} are {kind.Options.__name__}, got {type(options).__name__}")
    if not tasks:
        raise ValueError("there is no task to merge")
    if settings.step not in (None, 1) and merged is None:
        raise ValueError(f"step {settings.step} needs the merged model that holds the tasks before it: name it")
    architecture, theta_0 = _open_base(base)
    layers = architecture.layers(theta_0.checkpoint, targets.target_modules, targets.exclude_modules)
    so_far = None if merged is None else _open_merged(merged, architecture)
    before = (so_far and read_manifest(so_far.checkpoint.folder)) or Manifest()
    first_step = _first_step(settings, so_far, before)
    found = kind(options, [layer.name for layer in layers], settings.seed)
    exact = not kind.state_is_weight or settings.accumulate == "float32"
    state = _open_state(so_far, architecture) if so_far is not None and exact else None
    plan = Plan(
        models=Models(theta_0, so_far, state, [open_task(task, architecture) for task in tasks]),
        selection=_select(architecture, theta_0.checkpoint, layers, targets, first_step),
        method=found,
        targets=targets,
        settings=settings,
        before=before,
        first_step=first_step,
        warnings=[],
    )
    plan.warnings += [
        *check_merged(plan),
        *check_tasks(plan, architecture),
        *check_state_tensors(plan),
        *check_relation(plan),
    ]
    check_memory(plan)
    return plan


def _open_base(name: str) -> tuple[Architecture, FullModel]:
    """Open the base, and tell its architecture."""
    checkpoint = Checkpoint.open(name)
    if is_adapter(checkpoint.folder):
        raise ValueError(f"the base '{name}' is an adapter: name the model that it was trained on")
    checkpoint.small_files()
    architecture = Architecture(checkpoint)
    return architecture, FullModel(checkpoint, architecture)


def _open_merged(name: str, architecture: Architecture) -> FullModel:
    """Open what is merged so far."""
    checkpoint = Checkpoint.open(name)
    if is_adapter(checkpoint.folder):
        raise ValueError(f"the merged model '{name}' is an adapter: give it as a --task")
    return FullModel(checkpoint, architecture)


def _open_state(merged: FullModel, architecture: Architecture) -> FullModel | None:
    """Open what the method kept beside the merged model, if it kept anything; one of the hub is downloaded."""
    name, folder = merged.checkpoint.name, merged.checkpoint.folder
    if not Path(name).expanduser().is_dir():
        folder = hub.download(name, folder, [STATE_FILE])
    kept = (folder / STATE_FILE).parent
    return FullModel(Checkpoint.from_folder(str(kept), kept), architecture) if kept.is_dir() else None


def _first_step(settings: Settings, merged: FullModel | None, before: Manifest) -> int:
    """Return the number of the first task in the stream."""
    if settings.step is not None or merged is None:
        return settings.step or 1
    if "step" not in before:
        raise ValueError(
            f"'{merged.checkpoint.name}' has no {MANIFEST} that tells how many tasks it holds: say with --step which "
            "number the new one has"
        )
    return before["step"] + 1


def _select(
    architecture: Architecture, base: Checkpoint, layers: list[Layer], targets: TargetConfig, first_step: int
) -> Selection:
    """Decide what becomes of each of the base's tensors."""
    base.check_floats(key for layer in layers for key in layer.keys)
    chosen = {layer.slot for layer in layers}
    others = {slot: tuple(keys) for slot, keys in by_slot(architecture, base).items() if slot not in chosen}
    changed = targets.other_params == "mean" or (targets.other_params == "first" and first_step == 1)
    averaged = {slot for slot, keys in others.items() if changed and base.tensors[keys[0]].dtype in FLOATS}
    covered = coverage(architecture.model, {layer.name: layer.view for layer in layers}, targets)
    return Selection(layers, others, averaged, covered, architecture.origin)
