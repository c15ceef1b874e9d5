"""What an analysis finds, as the rows of its tables."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from fusion_bench_nufilt.results.names import kind

from .subspaces import TaskVector, overlap

Row = dict[str, Any]


@dataclass
class Analysis:
    """All that tables, pictures and sentences are made of; what was not measured is empty or None.

    The tables leave out ``energy``, the share of each direction of a task vector, and ``by_rank``, the affinities for
    each r = r_d = r_v.
    """

    about: Row  # where it comes from, for people
    tasks: list[str]
    layers: dict[str, tuple[int, int]]  # (d_o, d_i) by name
    task_rank: int
    vectors: list[Row] = field(default_factory=list)  # one for each task vector and layer
    overlaps: list[Row] = field(default_factory=list)  # one for each layer and two task vectors
    affinity: list[Row] = field(default_factory=list)  # one for each layer, task's data and task vector
    theorem: list[Row] = field(default_factory=list)  # a TheoremCheck for each task, layer and r_d
    losses: list[Row] = field(default_factory=list)  # one for each method, step and layer
    scores: dict[str, dict[str, float | None]] = field(default_factory=dict)  # ACC and BWT by method
    failures: dict[str, str] = field(default_factory=dict)

    def add_vectors(self, layer: str, size: float, vectors: Mapping[str, TaskVector]) -> None:
        """Describe a layer's task vectors beside the norm of its pretrained weight, and compare their directions."""
        rank = self.task_rank
        for task, vector in vectors.items():
            row = {"task": task, "layer": layer, "norm": vector.norm, "relative_norm": vector.norm / (size or 1)}
            row |= {"effective_rank": vector.effective_rank, "rank_90": vector.rank_for(0.9)}
            self.vectors.append(row | {"energy_in_top": float(vector.energy[:rank].sum()), "energy": vector.energy})
        for (one, a), (other, b) in product(vectors.items(), repeat=2):
            row = {"layer": layer, "kind": kind(layer), "vector": one, "other_vector": other}
            self.overlaps.append(row | {"overlap": overlap(a, b, rank)})
