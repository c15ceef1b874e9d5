"""A plan in the making, as the models that are to be merged come to be known.

Folders are all open at once, and the models of a pool one after another, since memory may hold no
more. One that comes late may have a head of its own, or as two weights what was one until then. So
whoever plans a merge shows its models to a :class:`Draft`, which asks all of them the same, in the
same order: which names share a weight, which tensors are heads, and which layers that leaves.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fusion_bench_nufilt.methods.base import LayerMethod
from fusion_bench_nufilt.methods.options import Settings, TargetConfig
from fusion_bench_nufilt.models.architecture import Architecture
from fusion_bench_nufilt.models.heads import Heads
from fusion_bench_nufilt.models.model import ModelWeights, tie_weights
from fusion_bench_nufilt.models.source import Source
from fusion_bench_nufilt.utils.files import Head, Manifest
from fusion_bench_nufilt.utils.manifest import add_head
from fusion_bench_nufilt.utils.tensors import FLOATS

from .plan import Plan, Selection


class Draft:
    """What is merged of a base, as far as the models that were shown tell.

    Args:
        architecture: of the base.
        base: the base's tensors.
        targets: which layers are merged, and what happens to the rest.
    """

    heads: Heads  # those that are kept out of the merge
    selection: Selection

    def __init__(self, architecture: Architecture, base: Source, targets: TargetConfig) -> None:
        self.architecture = architecture
        self.base = base
        self.pretrained = ModelWeights(base, architecture)
        self.targets = targets

    def tie(
        self,
        lasting: Sequence[ModelWeights] = (),
        tasks: Sequence[ModelWeights] = (),
        first_step: int = 1,
    ) -> None:
        """Decide which names share a weight in the base and in these models, see
        :func:`.model.tie_weights`.
        """
        # Anew, since what was tied has a tensor for each weight, and no longer for each name.
        self.pretrained = ModelWeights(self.base, self.architecture)
        self.architecture = tie_weights(
            self.architecture, [self.pretrained, *lasting], tasks, self.targets, first_step
        )

    def keep_heads(
        self,
        merged_manifest: Manifest,
        rule: str | None = None,
        stored: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Begin with the heads that an earlier merge kept, as its manifest has them.

        ``rule`` is the targets' by default, and ``stored`` has the base's tensors, without those
        that a model in memory has and its checkpoint lacks.
        """
        if stored is None:
            stored = self.pretrained.params
        backbone = self.architecture.backbone
        embeddings = self.architecture.embeddings(stored)
        rule = rule or self.targets.heads
        self.heads = Heads(rule, stored, self.base.config, backbone, embeddings)
        # Without the heads of earlier tasks, this merge would choose other layers than theirs.
        self.heads.keep(merged_manifest.get("heads", {}).values())

    def find_heads(self, tasks: Sequence[ModelWeights]) -> bool:
        """Take the heads of tasks out of the merge; return whether some of the base's tensors
        belong to heads that did not before.
        """
        before = self.heads.of(self.pretrained.params)
        for task in tasks:
            add_own_head(self.heads, task)
        # All have been found: one task's head is no layer of another either.
        for task in tasks:
            take_head(self.heads, task)
        return self.heads.of(self.pretrained.params) != before

    def select(self) -> None:
        """Select the layers, without those of the heads that are known by now; a ValueError names
        what is wrong with the base, or with the targets.
        """
        layers = self.architecture.layers(self.base, self.targets, self.heads)
        self.selection = Selection.of(
            self.pretrained, self.architecture, self.targets, layers, self.heads
        )

    def method(self, kind: type[LayerMethod], options: Any, seed: int) -> LayerMethod:
        """Return the method that merges these layers."""
        shapes = {layer.name: layer.view.shape for layer in self.selection.layers}
        return kind(options, list(shapes), seed, self.architecture.last_blocks, shapes)

    def plan(
        self,
        tasks: Sequence[ModelWeights],
        method: LayerMethod,
        settings: Settings,
        merged_manifest: Manifest,
        *,
        merged: ModelWeights | None = None,
        state: ModelWeights | None = None,
        **files: Any,
    ) -> Plan:
        """Return the plan of a merge of these tasks; ``files`` has what a :class:`.Plan` says of
        those of the result.
        """
        return Plan(
            **vars(self.selection),
            tasks=list(tasks),
            method=method,
            settings=settings,
            merged_manifest=merged_manifest,
            merged=merged,
            state=state,
            heads=describe_heads(self.heads, self.pretrained, tasks, merged_manifest),
            **files,
        )


def add_own_head(heads: Heads, task: ModelWeights) -> None:
    """Add a task's head, if it has one of its own, to those that are kept out of the merge."""
    shapes = {param: task.params[param] for param in _float_params(task)}
    heads.add(task.source.name, shapes, task.source.config, task.trained_modules)


def take_head(heads: Heads, task: ModelWeights) -> None:
    """Take a task's head out of the merge."""
    task.take_head(heads.of(_float_params(task)))


def _float_params(task: ModelWeights) -> list[str]:
    params = []
    for param, key in task.keys.items():
        if task.source.tensors[key].dtype in FLOATS:
            params.append(param)
    return params


def describe_heads(
    heads: Heads, base: ModelWeights, tasks: Sequence[ModelWeights], merged_manifest: Manifest
) -> dict[str, Head]:
    """Return the manifest's entries for the heads of earlier tasks and of these, by task."""
    described = dict(merged_manifest.get("heads", {}))
    for task in tasks:
        if task.head:
            modules = heads.modules_of(task.head)
            config = task.head_config(base.source.config)
            add_head(described, task.source.label, modules, config)
    return described
