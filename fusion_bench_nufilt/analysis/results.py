"""What an analysis finds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusion_bench_nufilt.results import names

from .affinity import Floats
from .spectra import TaskVector, overlap


@dataclass(frozen=True)
class Layer:
    """A merged linear layer."""

    name: str
    shape: tuple[int, int]  # (d_o, d_i)
    module: str = ""  # the module whose inputs it gets, in a model that is loaded

    @property
    def kind(self) -> str:
        """Either attention or MLP."""
        return names.kind(self.name)

    @property
    def depth(self) -> int:
        """The number of its block."""
        return names.depth(self.name)


@dataclass(frozen=True)
class VectorRow:
    """A task vector in a layer."""

    task: str
    layer: str
    norm: float
    relative_norm: float  # to the pretrained weight's
    effective_rank: float
    rank_90: int | None  # directions that hold 90 % of its energy; None: more than were solved for
    energy_in_top: float  # share of its energy in its top r_v directions


class LayerVectors(NamedTuple):
    """What the task vectors of a layer are like, and how they compare."""

    rows: list[VectorRow]
    overlaps: Floats  # (vectors, vectors)
    energy: Tensor  # of each direction of each vector, (vectors, directions)

    @classmethod
    def of(
        cls, names: Sequence[str], layer: Layer, vectors: Sequence[TaskVector], W_0: Tensor, rank: int
    ) -> "LayerVectors":
        """Describe task vectors, by their names, beside the pretrained weight, and compare their top directions."""
        size = float(torch.linalg.vector_norm(W_0)) or 1.0
        rows = [
            VectorRow(
                task=name,
                layer=layer.name,
                norm=vector.norm,
                relative_norm=vector.norm / size,
                effective_rank=vector.effective_rank,
                rank_90=vector.rank_for(0.9),
                energy_in_top=float(vector.energy[:rank].sum()),
            )
            for name, vector in zip(names, vectors, strict=True)
        ]
        overlaps = np.array([[overlap(a, b, rank) for b in vectors] for a in vectors])
        return cls(rows, overlaps, torch.stack([vector.energy for vector in vectors]))


@dataclass(frozen=True)
class LossRow:
    """A layer after a step of a method; see :mod:`fusion_bench_nufilt.analysis.surrogates`.

    There are no old tasks at the first step, so that every stability loss is None there.
    """

    method: str
    step: int
    task: str
    layer: str
    stability: float | None
    plasticity: float
    relative_stability: float | None
    relative_plasticity: float | None
    data_free_stability: float | None
    data_free_plasticity: float
    stability_bound: float | None = None  # right side of Corollary 1, for one method
    plasticity_bound: float | None = None
    propagated_stability: float | None = None
    propagated_plasticity: float | None = None


@dataclass
class Analysis:
    """All that tables, pictures and sentences are made of; what was not measured is None or empty."""

    about: dict[str, Any]  # where it comes from, for people
    tasks: list[str]
    layers: list[Layer]
    task_rank: int
    vectors: list[VectorRow]
    names: list[str]  # of the task vectors: the tasks, and what is merged where it is known
    overlaps: Floats  # (layers, names, names)
    energy: dict[str, list[float]]  # share of a task vector's energy in its first 1, 2, … directions, mean over layers
    ranks: list[int] = field(default_factory=list)
    affinity: Floats | None = None  # (layers, data, vectors)
    affinity_by_rank: Floats | None = None  # (layers, data, vectors, ranks)
    theorem: list[dict[str, Any]] = field(default_factory=list)  # a TheoremCheck for each task, layer and r_d
    losses: list[LossRow] = field(default_factory=list)
    scores: dict[str, dict[str, float | None]] = field(default_factory=dict)  # ACC and BWT by method
    failures: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_vectors(
        cls,
        about: dict[str, Any],
        tasks: list[str],
        names: list[str],
        layers: list[Layer],
        found: Sequence[LayerVectors],
        task_rank: int,
    ) -> "Analysis":
        """Make the part of an analysis that needs no data, given what the task vectors are like in each layer."""
        directions = min(layer.energy.shape[1] for layer in found)
        energy = torch.stack([layer.energy[:, :directions].cumsum(-1) for layer in found]).mean(dim=0)
        return cls(
            about=about,
            tasks=tasks,
            layers=layers,
            task_rank=task_rank,
            vectors=[row for layer in found for row in layer.rows],
            names=names,
            overlaps=np.stack([layer.overlaps for layer in found]),
            energy=dict(zip(names, energy.tolist(), strict=True)),
        )
