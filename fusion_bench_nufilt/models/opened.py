"""Models as they are opened, by the names of the base, with one tensor for each weight."""

from collections.abc import Sequence
from typing import NamedTuple

from fusion_bench_nufilt.methods.options import Settings, TargetConfig
from fusion_bench_nufilt.utils.files import Manifest
from fusion_bench_nufilt.utils.manifest import STATE_FILE, read_manifest, state_key

from .adapters import LoraAdapter, refuse_adapter_of_others
from .architecture import Architecture
from .checkpoint import Checkpoint, is_adapter
from .model import ModelWeights, carry_over, complete_base, tie_weights, weights_in


class Checkpoints(NamedTuple):
    """What a merge is given."""

    base: Checkpoint
    tasks: Sequence[Checkpoint]
    merged: Checkpoint | None = None  # the result to merge into; None means the base


class NamedModels(NamedTuple):
    """The models of a merge by the names of the base."""

    architecture: Architecture
    pretrained: ModelWeights
    tasks: list[ModelWeights]
    merged_manifest: Manifest  # that of `merged`, empty if there is none
    merged: ModelWeights | None
    state: ModelWeights | None  # what was kept beside `merged` to go on from

    @property
    def adapters(self) -> list[LoraAdapter]:
        """Those that are adapters, the merged one first."""
        return [model for model in (self.merged, *self.tasks) if isinstance(model, LoraAdapter)]


def open_folders(base: str | None, tasks: Sequence[str], merged: str | None) -> Checkpoints:
    """Open the models of a merge into a model; the arguments are those of
    :func:`.door.open_models`.
    """
    if base is None:
        raise ValueError("the base must be named, unless adapters are merged into an adapter")
    checkpoint = Checkpoint.open(base)
    _refuse_adapter("base", checkpoint, "name the model that it was trained on")
    merged_checkpoint = None
    if merged is not None:
        merged_checkpoint = Checkpoint.open(merged)
        advice = "give it as a --task, or add --adapter for one more adapter"
        _refuse_adapter("merged model", merged_checkpoint, advice)
    checkpoints = [Checkpoint.open(name) for name in tasks]
    for task in checkpoints:
        if not is_adapter(task.folder):
            refuse_adapter_of_others(task)
    return Checkpoints(checkpoint, checkpoints, merged_checkpoint)


def _refuse_adapter(role: str, checkpoint: Checkpoint, advice: str) -> None:
    if is_adapter(checkpoint.folder):
        raise ValueError(f"the {role} '{checkpoint.name}' is an adapter: {advice}")


def name_models(checkpoints: Checkpoints, targets: TargetConfig, settings: Settings) -> NamedModels:
    """Return the models of a merge by the names of the base.

    ``targets`` tell which weights of the tasks count, where these have two and the others one.
    """
    base, tasks, merged = checkpoints
    architecture = Architecture.of_checkpoint(base)
    merged_manifest = Manifest()
    merged_model = None
    state = None
    lasting: list[ModelWeights] = []
    earlier = architecture
    if merged is not None:
        merged_manifest = read_manifest(merged.folder)
        merged_model = _open_model(merged, architecture)
        state = _open_kept(merged, merged_manifest, architecture)
        lasting.append(merged_model)
        earlier = architecture.apart(weights_in(architecture, merged_model))
    opened = []
    for checkpoint, coefficient in zip(tasks, settings.coefficients(len(tasks)), strict=True):
        task = _open_model(checkpoint, architecture)
        task.coefficient = coefficient
        opened.append(task)
    # Which weights are one, before anything is selected by its name; what is known of them from
    # earlier merges goes by that.
    pretrained = ModelWeights(base, architecture)
    first_step = settings.first_step(merged_manifest)
    architecture = tie_weights(architecture, [pretrained, *lasting], opened, targets, first_step)
    complete_base(architecture, pretrained, [pretrained, *lasting, *opened])
    if "mean_counts" in merged_manifest:
        carry_over(architecture, merged_manifest["mean_counts"], earlier)
    if state is not None:
        carry_over(architecture, state.entries, earlier, state_key)
    models = NamedModels(architecture, pretrained, opened, merged_manifest, merged_model, state)
    for adapter in models.adapters:
        adapter.leave_unchanged(pretrained)
    return models


def _open_model(checkpoint: Checkpoint, architecture: Architecture) -> ModelWeights:
    if is_adapter(checkpoint.folder):
        return LoraAdapter(checkpoint, architecture)
    return ModelWeights(checkpoint, architecture)


def _open_kept(
    merged: Checkpoint, merged_manifest: Manifest, architecture: Architecture
) -> ModelWeights | None:
    """Open what is kept beside a merged model, or return None if that is nothing."""
    # The manifest lists all files, so that the hub is not asked for one that it lacks.
    if merged.revision is not None and STATE_FILE not in merged_manifest.get("files", {}):
        return None
    state = merged.open_inside(STATE_FILE)
    if state is None:
        return None
    return ModelWeights(state, architecture)
