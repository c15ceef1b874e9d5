"""What an analysis finds, and the files of numbers that it leaves."""

import csv
import dataclasses
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusion_bench_nufilt.results import names
from fusion_bench_nufilt.storage.files import write_text

from .affinity import Floats
from .spectra import TaskVector

GROUPS = ("all", "attention", "MLP")


@dataclass(frozen=True)
class Layer:
    """A merged linear layer."""

    name: str
    shape: tuple[int, int]  # (d_o, d_i)
    module: str = ""  # whose inputs it gets, in a model that is loaded

    @property
    def kind(self) -> str:
        """One of :data:`GROUPS`: attention, or else MLP."""
        return names.kind(self.name)

    @property
    def depth(self) -> int:
        """Number of its block."""
        return names.depth(self.name)


@dataclass(frozen=True)
class VectorRow:
    """A task vector in a layer."""

    task: str
    layer: str
    norm: float
    relative_norm: float  # to the pretrained weight's
    effective_rank: float
    rank_90: int | None  # directions that hold 90 % of its energy; None: more than were looked at
    energy_in_top: float  # share of its energy in its top r_v directions

    @classmethod
    def of(cls, task: str, layer: Layer, vector: TaskVector, W_0: Tensor, rank: int) -> "VectorRow":
        """Of what was seen of a task vector, beside the pretrained weight."""
        relative = vector.norm / (float(torch.linalg.vector_norm(W_0)) or 1.0)
        top = float(vector.energy[:rank].sum())
        return cls(task, layer.name, vector.norm, relative, vector.effective_rank, vector.rank_for(0.9), top)


@dataclass(frozen=True)
class TheoremRow:
    """Theorem 1 for a task in a layer."""

    task: str
    layer: str
    r_d: int
    misalignment: float
    zeta: float
    zeta_spectral: float


@dataclass(frozen=True)
class LossRow:
    """A layer after a step of a method; see :mod:`fusion_bench_nufilt.analysis.surrogates`. None at the first step."""

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
    """All that tables, pictures and words are made of; what was not measured is None or empty."""

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
    theorem: list[TheoremRow] = field(default_factory=list)
    losses: list[LossRow] = field(default_factory=list)
    scores: dict[str, dict[str, float | None]] = field(default_factory=dict)  # ACC, BWT by method
    failures: dict[str, str] = field(default_factory=dict)

    def group(self, name: str) -> list[int]:
        """Numbers of the layers of a group."""
        return [number for number, layer in enumerate(self.layers) if name in ("all", layer.kind)]

    @property
    def methods(self) -> list[str]:
        """Those whose losses were measured."""
        return list(dict.fromkeys(row.method for row in self.losses))


def save_tables(analysis: Analysis, folder: Path) -> list[str]:
    """Write the numbers as CSV, one row a layer; returns the names of the files."""
    tables: dict[str, list[dict[str, Any]]] = {
        "task_vectors.csv": [dataclasses.asdict(row) for row in analysis.vectors],
        "overlaps.csv": _pairs(analysis, analysis.overlaps, ("vector", "other_vector"), "overlap"),
        "theorem.csv": [dataclasses.asdict(row) for row in analysis.theorem],
        "losses.csv": [dataclasses.asdict(row) for row in analysis.losses],
    }
    if analysis.affinity is not None:
        tables["affinity.csv"] = _pairs(analysis, analysis.affinity, ("data", "vector"), "affinity")
    written = []
    for name, rows in tables.items():
        if rows:
            write_text(folder / name, _csv(rows))
            written.append(name)
    return written


def save_json(folder: Path, content: dict[str, Any]) -> None:
    """Write ``analysis.json``."""
    write_text(folder / "analysis.json", json.dumps(content, indent=1, allow_nan=False))


def _pairs(analysis: Analysis, values: Floats, labels: Sequence[str], name: str) -> list[dict[str, Any]]:
    return [
        {
            "layer": analysis.layers[layer].name,
            "kind": analysis.layers[layer].kind,
            labels[0]: analysis.names[i],
            labels[1]: analysis.names[j],
            name: value,
        }
        for (layer, i, j), value in np.ndenumerate(values)
    ]


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
