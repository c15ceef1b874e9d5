"""What merges the layers of folders: NUFILT, or spectral accumulation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import Field, FiniteFloat
from torch import Tensor

from fusion_bench_nufilt.core import FusionConfig, fuse_layers
from fusion_bench_nufilt.core.checks import Layers, TaskLayers
from fusion_bench_nufilt.core.spectral import SpectralConfig, Votes, accumulate_each, accumulate_layer, strengths
from fusion_bench_nufilt.storage.files import MANIFEST

from .forecast import layer_flops, spectral_flops

# On an accelerator, layers of equal shape are solved together; about this much memory of it.
BATCH_BYTES = 4 * 2**30

Reports = Mapping[str, Sequence[Mapping[str, Any]]]  # of the steps of this merge so far, by layer
#: Votes of each layer, as a manifest has them.
SavedVotes = dict[str, Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]]


class Method(Protocol):
    """How layers are merged."""

    name: ClassVar[str]  # on the command line
    label: ClassVar[str]  # in the manifest
    about: ClassVar[str]  # on the model card
    shown: ClassVar[tuple[str, ...]]  # the settings on it
    exact: ClassVar[bool]  # reads what it must know off the merged weights, and computes in float64

    def fuse(
        self, theta_0: Layers, merged: Layers, task: TaskLayers, before: Reports, *, step: int, device: str
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Merge one more task into layers: new weights and reports (dataclasses)."""

    def state(self, reports: Reports) -> dict[str, Any]:
        """What the manifest keeps for the next merge, after the steps that are reported."""

    def flops(self, shape: tuple[int, ...], rank: int | None) -> float:
        """Of a step on a layer ``(d_o, d_i)``, into which a whole model is merged, or a LoRA of this rank."""

    def work_off(self, theta_0: Tensor, theta: Tensor, theta_t: Tensor) -> object:
        """Merge a sample, of which nothing counts but its time."""

    @property
    def config(self) -> Any:
        """The settings, a dataclass."""

    @property
    def takes_first_whole(self) -> bool:
        """Whether the first task is taken as it is, which costs next to nothing."""


@dataclass(frozen=True)
class Nufilt:
    """Null-space filtering."""

    name: ClassVar[str] = "nufilt"
    label: ClassVar[str] = "NUFILT, arXiv 2509.21413"
    about: ClassVar[str] = "null-space filtering ([Qiu et al., ICLR 2026](https://arxiv.org/abs/2509.21413))"
    shown: ClassVar[tuple[str, ...]] = ("null_rank", "lora_rank", "task_rank", "seed")
    exact: ClassVar[bool] = False

    config: FusionConfig
    seed: int

    def fuse(
        self, theta_0: Layers, merged: Layers, task: TaskLayers, before: Reports, *, step: int, device: str
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        options: dict[str, Any] = {"seed": self.seed, "step": step, "device": device, "batch_bytes": BATCH_BYTES}
        return fuse_layers(theta_0, merged, task, self.config, **options)

    def state(self, reports: Reports) -> dict[str, Any]:
        return {}

    def flops(self, shape: tuple[int, ...], rank: int | None) -> float:
        return layer_flops(shape, rank, self.config)

    def work_off(self, theta_0: Tensor, theta: Tensor, theta_t: Tensor) -> object:
        return fuse_layers({"": theta_0}, {"": theta}, {"": theta_t}, self.config)

    @property
    def takes_first_whole(self) -> bool:
        return self.config.first_task == "paper"


@dataclass(frozen=True)
class Spectral:
    """Spectral accumulation, ours and not the paper's.

    Args:
        config: its settings.
        layers: names of all layers that are merged, whose depth the strength may depend on.
        votes: of the layers in what was merged so far.
    """

    name: ClassVar[str] = "spectral"
    label: ClassVar[str] = "spectral accumulation, of fusion-bench-nufilt"
    about: ClassVar[str] = "spectral accumulation, an unpublished method of fusion-bench-nufilt"
    shown: ClassVar[tuple[str, ...]] = ("kappa", "damp", "ramp")
    exact: ClassVar[bool] = True

    config: SpectralConfig
    layers: Sequence[str]
    votes: Mapping[str, Votes]

    def fuse(
        self, theta_0: Layers, merged: Layers, task: TaskLayers, before: Reports, *, step: int, device: str
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        votes = {name: self._votes(name, before) for name in merged}
        each = list(accumulate_each(theta_0, merged, task, votes, self._kappas, self.config.damp, device=device))
        return {name: weight for name, weight, _ in each}, {name: report for name, _, report in each}

    @cached_property
    def _kappas(self) -> dict[str, float]:
        return strengths(self.layers, self.config)

    def _votes(self, name: str, reports: Reports) -> Votes:
        if reports.get(name):
            last = reports[name][-1]
            return Votes(last["mean"], last["count"])
        return self.votes.get(name, Votes())

    def state(self, reports: Reports) -> dict[str, Any]:
        votes = {name: self._votes(name, reports) for name in self.layers}
        return {"votes": {name: [each.mean, each.count] for name, each in votes.items()}}

    def flops(self, shape: tuple[int, ...], rank: int | None) -> float:
        return spectral_flops(shape)

    def work_off(self, theta_0: Tensor, theta: Tensor, theta_t: Tensor) -> object:
        any_weights = Votes(mean=1e9, count=2)  # of so large a mean there is hardly anything in what was merged
        return accumulate_layer(theta_0, theta, theta_t, any_weights, self.config.kappa, self.config.damp)

    @property
    def takes_first_whole(self) -> bool:
        return True


def make_method(
    config: FusionConfig | SpectralConfig, seed: int, layers: Sequence[str], merged: str | None, votes: SavedVotes
) -> Method:
    """The method that the settings are of.

    Args:
        config: settings of NUFILT or of spectral accumulation.
        seed: of NUFILT's adapters.
        layers: names of all layers that are merged.
        merged: what is merged so far, if anything.
        votes: what its manifest has of them.

    Raises:
        ValueError: ``merged`` has layers without votes, and the method needs them; names both.
    """
    if isinstance(config, FusionConfig):
        return Nufilt(config, seed)
    if merged is not None and (absent := [name for name in layers if name not in votes]):
        raise ValueError(
            f"the merged model '{merged}' has no votes in its {MANIFEST} for '{absent[0]}', one of {len(absent)} "
            "layers: spectral accumulation goes on from its own merges of the same layers only"
        )
    return Spectral(config, layers, {name: Votes(mean, int(count)) for name, (mean, count) in votes.items()})
