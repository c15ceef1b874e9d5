"""The door of a merge of folders: behind it, all models go by the base's names and rows, with one
tensor for each weight, and fit each other; their entries do not change any more, and none but a
merge into an adapter asks which of them are adapters.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fusion_bench_nufilt.methods.options import Settings, TargetConfig
from fusion_bench_nufilt.utils.files import Head, Input, Manifest

from .checkpoint import Checkpoint
from .configurations import check_configuration
from .fit import check_base, check_merged, check_task
from .into_adapter import open_adapters, refuse_what_no_adapter_holds, select_for_adapter
from .layers import Layer
from .model import ModelWeights
from .opened import name_models, open_folders
from .selection import Selection, describe_heads, heads_of_base, take_heads
from .vocabulary import Vocabulary, join_vocabularies


@dataclass(frozen=True, kw_only=True)
class Models(Selection):
    """The models of a merge, and what is merged of them."""

    tasks: list[ModelWeights]
    settings: Settings
    merged_manifest: Manifest  # that of `merged`, empty if there is none
    merged: ModelWeights | None = None  # the result to merge into; None means the base
    state: ModelWeights | None = None  # what was kept beside `merged` to go on from
    #: Of all tasks in the result that have a head of their own, by task.
    heads: dict[str, Head] = field(default_factory=dict)
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    #: All layers of the model that an adapter is for, of which it may change a part.
    layers_of_model: list[Layer] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # of the checks

    @property
    def is_adapter(self) -> bool:
        """Whether the result is an adapter, whose layers are merged without the base's weights."""
        return self.settings.adapter

    @cached_property
    def averaged(self) -> set[str]:
        """The params of ``other_keys`` that the tasks may change."""
        return self.averaged_at(self.first_step)

    def averaged_of(self, task: ModelWeights) -> set[str]:
        """The params of ``other_keys`` that a task changes."""
        if self.targets.other_params == "mean" or task is self.tasks[0]:
            return self.averaged
        return set()

    def models_in_mean(self, param: str) -> int:
        """Return the number of models in the mean of a tensor before this merge, without the
        base.
        """
        count: int = self.merged_manifest.get("mean_counts", {}).get(param, self.first_step - 1)
        return count

    def joining(self, param: str) -> list[ModelWeights]:
        """Return the tasks that join the mean of a tensor in this merge."""
        joining = []
        for task in self.tasks:
            if param in self.averaged_of(task) and param in task.entries:
                joining.append(task)
        return joining

    @property
    def first_step(self) -> int:
        """The number of the first task in the stream, from 1."""
        return self.settings.first_step(self.merged_manifest)

    @property
    def models(self) -> dict[str, ModelWeights]:
        """All models by their role in the merge (base, merged, state, task 0, ...)."""
        models = {}
        if not self.base.is_absent:
            models["base"] = self.pretrained
        if self.merged is not None:
            models["merged"] = self.merged
        if self.state is not None:
            models["state"] = self.state
        for number, task in enumerate(self.tasks):
            models[f"task {number}"] = task
        return models

    @property
    def merged_and_tasks(self) -> list[ModelWeights]:
        """The models that were made of the base, in merging order."""
        return [*self.tasks] if self.merged is None else [self.merged, *self.tasks]

    @property
    def checkpoints(self) -> list[Checkpoint]:
        return [model.checkpoint for model in self.models.values()]

    @property
    def inputs(self) -> dict[str, Input]:
        """What the models are known by, by their role.

        Models that are still on the hub are known by what the hub says of them, and by their
        fingerprints after their download.
        """
        return {role: model.checkpoint.identity() for role, model in self.models.items()}


def open_models(
    base: str | None,
    tasks: Sequence[str],
    merged: str | None,
    targets: TargetConfig,
    settings: Settings,
) -> Models:
    """Open the models of a merge, by their headers, and return them as they fit each other.

    Args:
        base: folder or hub name of the pretrained model; None for adapters that are merged into an
            adapter.
        tasks: folders or hub names of the task models, in merging order.
        merged: folder or hub name of the result to merge into; None means the base.
        targets: which layers are merged, and what happens to the rest.
        settings: how folders are merged.

    Raises:
        ValueError: a model can't be read, does not fit the base in its names, shapes or dtypes,
            holds nothing but placeholders, or is of another type; the message names it and says
            what to do.
    """
    if settings.adapter:
        checkpoints = open_adapters(base, tasks, merged, targets, settings)
    else:
        checkpoints = open_folders(base, tasks, merged)
    named = name_models(checkpoints, targets, settings)
    architecture = named.architecture
    pretrained = named.pretrained
    rule = targets.heads
    if settings.adapter:
        refuse_what_no_adapter_holds(named, targets)
        rule = "none"  # of which there is none left
    # A task's own head is no layer, although the base may have one of that name.
    heads = heads_of_base(architecture, pretrained, rule, named.merged_manifest)
    take_heads(heads, named.tasks)
    of_model = Selection.of(architecture, pretrained, targets, heads)
    check_base(of_model)
    selection = of_model
    if settings.adapter:
        selection = select_for_adapter(of_model, named, settings)
    models = Models(
        **vars(selection),
        tasks=named.tasks,
        settings=settings,
        merged_manifest=named.merged_manifest,
        merged=named.merged,
        state=named.state,
        heads=describe_heads(heads, pretrained, named.tasks, named.merged_manifest),
        layers_of_model=of_model.layers,
    )
    if not settings.adapter:
        models = _with_rows_of_result(models)
    return dataclasses.replace(models, warnings=[*models.vocabulary.warnings, *_check(models)])


def _with_rows_of_result(models: Models) -> Models:
    """Have all models present the rows of the result, by its tokens."""
    settings = models.settings
    checkpoint = models.pretrained.checkpoint
    earlier_vocabulary = models.merged_manifest.get("vocabulary", {})
    vocabulary = join_vocabularies(
        {role: model for role, model in models.models.items() if role != "state"},
        models.architecture.embeddings(models.pretrained.shapes),
        settings.tokenizer or "union",
        checkpoint.small_files() | checkpoint.module_files(),
        earlier_vocabulary.get("token_weights", {}),
        layers=[layer.param for layer in models.layers],
        first_alone=models.targets.other_params == "first",
        kept=models.state,
    )
    if settings.tokenizer is not None:
        # It may be a path, which manifests do not record.
        settings = dataclasses.replace(settings, tokenizer=vocabulary.tokenizer)
    return dataclasses.replace(models, settings=settings, vocabulary=vocabulary)


def _check(models: Models) -> list[str]:
    """Refuse models that do not fit the base, and return warnings about what is doubtful."""
    warnings = []
    for model in models.merged_and_tasks:
        warnings += check_configuration(
            model.source.name,
            model.trained_config,
            models.base.config,
            verify=models.settings.verify,
            remedy="add --no-verify",
        )
    if models.merged is not None:
        optional = models.computed | _other_parts(models, models.merged)
        check_merged(models, models.merged, optional)
        # A run that merges a part of a model saves no more than that.
        models.merged.leave_unchanged(models.pretrained)
    for task in models.tasks:
        warnings += check_task(models, task, models.averaged)
    return warnings


def _other_parts(models: Models, merged: ModelWeights) -> set[str]:
    """Return what is in parts of the base that a merged model lacks and no task changes: a run that
    merges the vision towers of CLIPs saves a tower. One without any layer to merge is no part.
    """
    if all(layer.param not in merged.entries for layer in models.layers):
        return set()
    parts = {param.partition(".")[0] for param in merged.entries}
    others = set()
    for param in models.pretrained.entries:
        if param.partition(".")[0] not in parts and not models.joining(param):
            others.add(param)
    return others
