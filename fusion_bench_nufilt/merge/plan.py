"""The plan of a merge."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from fusion_bench_nufilt.methods import LayerMethod
from fusion_bench_nufilt.methods.options import Settings, TargetConfig
from fusion_bench_nufilt.models import Coverage, Heads
from fusion_bench_nufilt.models.architecture import Architecture, Layer
from fusion_bench_nufilt.models.checkpoint import Checkpoint
from fusion_bench_nufilt.models.coverage import coverage
from fusion_bench_nufilt.models.model import ModelWeights
from fusion_bench_nufilt.models.source import Source
from fusion_bench_nufilt.models.vocabulary import Vocabulary
from fusion_bench_nufilt.utils.files import Head, Manifest
from fusion_bench_nufilt.utils.manifest import package_versions
from fusion_bench_nufilt.utils.options import with_scope
from fusion_bench_nufilt.utils.tensors import FLOATS, TensorInfo

from .layout import Files, arrange, as_written, find_places, is_rounded, make_headers


@dataclass(frozen=True)
class Selection:
    """What is merged of a base, and what happens to its other tensors."""

    pretrained: ModelWeights
    targets: TargetConfig
    layers: list[Layer]  # merged by the method, in the base's order
    others: dict[str, tuple[str, ...]]  # the base's keys of every other tensor, by param
    head_params: set[str]  # tensors of heads that tasks have for themselves: the base's stay
    computed: set[str]  # the base's other tensors that are computed, and not trained
    coverage: Coverage  # how much of the model the layers cover
    origin: str  # where the layers are known from

    @property
    def base(self) -> Source:
        """The base's tensors, all of which the result has."""
        return self.pretrained.source

    def averaged_at(self, step: int) -> set[str]:
        """The params of ``others`` that the task of a step (from 1) changes."""
        if not self.targets.changes_others(step):
            return set()
        floats = set()
        for param, keys in self.others.items():
            if self.base.tensors[keys[0]].dtype in FLOATS:
                floats.add(param)
        return floats - self.head_params - self.computed


def select(
    pretrained: ModelWeights, architecture: Architecture, targets: TargetConfig, heads: Heads
) -> Selection:
    """Select what is merged of a base; a ValueError names what is wrong with the base, or with the
    targets.
    """
    source = pretrained.source
    layers = architecture.layers(source, targets, heads)
    others = architecture.others(source, layers)
    views = {layer.name: layer.view for layer in layers}
    return Selection(
        pretrained=pretrained,
        targets=targets,
        layers=layers,
        others=others,
        head_params=set(heads.of(pretrained.params)),
        computed=set(filter(architecture.is_computed, others)),
        coverage=coverage(architecture.model, views, targets),
        origin=architecture.origin,
    )


@dataclass(frozen=True)
class Plan(Selection):
    """A merge whose models have passed all checks that need no more than headers and samples.

    It is made once and does not change. What is found later, such as warnings of downloaded weights
    and the strengths of tasks, is handed on beside it.
    """

    tasks: list[ModelWeights]
    method: LayerMethod
    settings: Settings
    before: Manifest  # that of `merged`; empty if it has none
    merged: ModelWeights | None = None  # the result to merge into; None means the base
    state: ModelWeights | None = None  # what was kept beside `merged` to go on from
    #: Of all tasks in the result that have a head of their own, by task.
    heads: dict[str, Head] = field(default_factory=dict)
    #: All files of the result but weights, card and manifest, by path.
    small_files: dict[str, bytes] = field(default_factory=dict)
    files: Files = field(default_factory=dict)  # the tensors in each file of the result
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    warnings: list[str] = field(default_factory=list)  # of the checks

    @cached_property
    def averaged(self) -> set[str]:
        """The params of ``others`` that the tasks change."""
        return self.averaged_at(self.first_step)

    def averaged_of(self, task: ModelWeights) -> set[str]:
        """The params of ``others`` that a task changes."""
        if self.targets.other_params == "mean" or task is self.tasks[0]:
            return self.averaged
        return set()

    def models_in_mean(self, param: str) -> int:
        """Return the number of models in the mean of a tensor before this merge, without the
        base.
        """
        count: int = self.before.get("mean_counts", {}).get(param, self.first_step - 1)
        return count

    def joining(self, param: str) -> dict[str, ModelWeights]:
        """Return the tasks that join the mean of a tensor in this merge, by their role."""
        joining = {}
        for number, task in enumerate(self.tasks):
            if param in self.averaged_of(task) and task.has(param):
                joining[f"task {number}"] = task
        return joining

    @cached_property
    def headers(self) -> dict[str, bytes]:
        """The header of each file of the result, once the base is on this disk."""
        return make_headers(self.pretrained.checkpoint, self.files)

    @cached_property
    def places(self) -> dict[str, TensorInfo]:
        """Where the result has each tensor, by its key in the base."""
        return find_places(self.pretrained.checkpoint, self.headers)

    @property
    def models(self) -> dict[str, ModelWeights]:
        """All models by their role in the merge (base, merged, state, task 0, ...)."""
        return models_by_role(self.pretrained, self.merged, self.state, self.tasks)

    @property
    def checkpoints(self) -> list[Checkpoint]:
        return [model.checkpoint for model in self.models.values()]

    def changed(self) -> list[str]:
        """Return the names of the models whose weights were written to since they were opened."""
        names = []
        for checkpoint in self.checkpoints:
            if any(file.changed() for file in checkpoint.opened.values()):
                names.append(checkpoint.name)
        return names

    @property
    def names(self) -> list[str]:
        """The names of all tasks in the result, in merging order."""
        labels = [task.source.label for task in self.tasks]
        return [*self.before.get("tasks", []), *labels]

    @property
    def first_step(self) -> int:
        """The number of the first task in the stream, from 1."""
        return self.settings.step or self.before.get("step", 0) + 1

    @property
    def last_step(self) -> int:
        return self.first_step + len(self.tasks) - 1

    @property
    def keeps_state(self) -> bool:
        """Whether the result has what the next merge needs beside its model."""
        if self.settings.state is None:
            return not self.method.is_stateless
        return self.settings.state

    def rounds(self, key: str) -> bool:
        """Return whether the result has a tensor of the base in fewer digits than float32."""
        return is_rounded(as_written(self.base.tensors[key], self.settings.dtype))

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor between tasks: the wider one of the base's and the
        result's.
        """
        info = self.base.tensors[key]
        written = as_written(info, self.settings.dtype)
        # A float32 result of a bfloat16 base must not be rounded after each of its tasks.
        return torch.promote_types(FLOATS[info.dtype], FLOATS[written.dtype])

    def options(self) -> dict[str, Any]:
        """Return the options of the merge that its result records, by name, including the
        method's.
        """
        recorded = with_scope([Settings], "stream", "merge", "tasks")
        return {
            "method": self.method.name,
            **dataclasses.asdict(self.method.options),
            **dataclasses.asdict(self.targets),
            **{key: getattr(self.settings, key) for key in recorded},
        }

    @cached_property
    def description(self) -> dict[str, Any]:
        """All that the result depends on, as its manifest and the journal have it."""
        inputs = {role: model.checkpoint.identity() for role, model in self.models.items()}
        digests = {
            name: hashlib.sha256(content).hexdigest() for name, content in self.small_files.items()
        }
        description = {
            "step": self.last_step,
            "tasks": self.names,
            "inputs": inputs,
            "settings": self.options(),
            # The kind alone: two GPUs give the same bits, and a CPU gives others.
            "device": self.settings.devices[0].type,
            "heads": self.heads,
            "vocabulary": self.vocabulary.as_dict(),
            "small_files": digests,
            "versions": package_versions(),
        }
        return dict(json.loads(json.dumps(description)))  # as it will be read


def models_by_role(
    base: ModelWeights,
    merged: ModelWeights | None,
    state: ModelWeights | None,
    tasks: Sequence[ModelWeights],
) -> dict[str, ModelWeights]:
    """Return the models of a merge by their role in it (base, merged, state, task 0, ...)."""
    models = {"base": base}
    if merged is not None:
        models["merged"] = merged
    if state is not None:
        models["state"] = state
    for number, task in enumerate(tasks):
        models[f"task {number}"] = task
    return models


def arrange_files(selection: Selection, vocabulary: Vocabulary, settings: Settings) -> Files:
    """Return the tensors in each file of the result."""
    keys_by_param = dict(selection.others)
    for layer in selection.layers:
        keys_by_param[layer.param] = layer.keys
    rows = {}
    for param in vocabulary.params:
        for key in keys_by_param[param]:
            rows[key] = vocabulary.rows
    base = selection.pretrained.checkpoint
    return arrange(base, rows, settings.dtype, settings.max_shard_size)
