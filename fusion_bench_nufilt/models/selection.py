"""What is merged of a base: its layers, the heads that tasks have for themselves, and the rest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_bench_nufilt.methods.options import TargetConfig
from fusion_bench_nufilt.utils.files import Head, Manifest
from fusion_bench_nufilt.utils.manifest import add_head
from fusion_bench_nufilt.utils.tensors import FLOATS

from .architecture import Architecture
from .heads import Heads
from .layers import Coverage, Layer
from .model import ModelWeights
from .source import Source


@dataclass(frozen=True)
class Selection:
    """What is merged of a base, and what happens to its other tensors."""

    architecture: Architecture
    pretrained: ModelWeights
    targets: TargetConfig
    layers: list[Layer]  # merged by the method, in the base's order
    other_keys: dict[str, tuple[str, ...]]  # the base's keys of the result's others, by param
    head_params: set[str]  # tensors of heads that tasks have for themselves: the base's stay
    computed: set[str]  # the base's other tensors that are computed, and not trained
    coverage: Coverage  # how much of the model the layers cover
    layers_known_from: str  # a class, the modules, or the names of the tensors

    def __getstate__(self) -> dict[str, Any]:
        """Leave the architecture out of what is sent to other processes: they choose nothing, and
        its modules are the library's, which need not be made to be sent.
        """
        return {**vars(self), "architecture": None}

    @classmethod
    def of(
        cls,
        architecture: Architecture,
        pretrained: ModelWeights,
        targets: TargetConfig,
        heads: Heads,
        layers: Sequence[Layer] | None = None,
    ) -> "Selection":
        """Return what a merge of some layers of a base makes of all its tensors, by default of
        those that the targets choose; the heads stay as they are.
        """
        if layers is None:
            layers = architecture.layers(pretrained.source, targets, heads)
        other_keys = architecture.other_keys(pretrained.source, layers)
        return cls(
            architecture=architecture,
            pretrained=pretrained,
            targets=targets,
            layers=list(layers),
            other_keys=other_keys,
            head_params=set(heads.of(pretrained.entries)),
            computed=set(filter(architecture.is_computed, other_keys)),
            coverage=architecture.coverage(layers, targets),
            layers_known_from=architecture.known_from,
        )

    @property
    def base(self) -> Source:
        """The source of the base's tensors."""
        return self.pretrained.source

    def averaged_at(self, step: int) -> set[str]:
        """The params of ``other_keys`` that the task of a step (from 1) changes."""
        if not self.targets.changes_other_params(step):
            return set()
        floats = set()
        for param, keys in self.other_keys.items():
            if self.base.tensors[keys[0]].dtype in FLOATS:
                floats.add(param)
        return floats - self.head_params - self.computed


def heads_of_base(
    architecture: Architecture,
    pretrained: ModelWeights,
    rule: str,
    merged_manifest: Manifest,
    stored: Mapping[str, tuple[int, ...]] | None = None,
) -> Heads:
    """Return the heads that are kept out of a merge before any task is looked at: those that an
    earlier merge kept, as its manifest has them.

    ``stored`` has the base's tensors, without those that a model in memory has and its checkpoint
    lacks.
    """
    if stored is None:
        stored = pretrained.shapes
    config = pretrained.source.config
    embeddings = architecture.embeddings(stored)
    heads = Heads(rule, stored, config, architecture.backbone, embeddings)
    # Without the heads of earlier tasks, this merge would choose other layers than theirs.
    heads.keep(merged_manifest.get("heads", {}).values())
    return heads


def add_head_of(heads: Heads, task: ModelWeights) -> None:
    """Add a task's head, if it has one of its own, to those that are kept out of the merge."""
    shapes = {param: task.entries[param].shape for param in task.float_params}
    heads.add(task.source.name, shapes, task.source.config, task.trained_modules)


def take_heads(heads: Heads, tasks: Sequence[ModelWeights]) -> None:
    """Take the heads that tasks have for themselves out of the merge."""
    for task in tasks:
        add_head_of(heads, task)
    # All have been found: one task's head is no layer of another either.
    for task in tasks:
        task.take_head(heads.of(task.float_params))


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
