"""The mean of two order-free methods."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor

from .base import State
from .order_free import OrderFree, ScaleConfig, option
from .spectral import Spectral
from .sums import Sylvester, TsvStream

_MEMBERS: dict[str, type[OrderFree]] = {method.name: method for method in (Spectral, Sylvester, TsvStream)}


@dataclass(frozen=True)
class MixConfig(ScaleConfig):
    """The settings of a mixture, of two methods at their own defaults."""

    pair: Literal["spectral+sylvester", "tsv_stream+sylvester", "tsv_stream+spectral"] = option(
        "spectral+sylvester", "The two methods whose updates are averaged."
    )


class Mix(OrderFree):
    """The mean of the updates of two order-free methods, both of whose states are kept."""

    name = "mix"
    label = "mixture"
    citation = "the mean of two order-free methods, an unpublished method of fusion-bench-nufilt"
    Options = MixConfig

    options: MixConfig

    def sums(self, d_o: int, d_i: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{member.name}_{name}": shape for member in self._members for name, shape in member.sums(d_o, d_i).items()
        }

    def gather(self, state: State, tau: Tensor) -> State:
        for member in self._members:
            after = member.gather(_part_of(member, state), tau)
            state = {**state, **{f"{member.name}_{name}": value for name, value in after.items()}}
        return state

    def update(self, state: State, scale: float) -> Tensor:
        updates = [member.update(_part_of(member, state), scale * member.scale) for member in self._members]
        return sum(updates[1:], updates[0]) / len(updates)

    @cached_property
    def _members(self) -> list[OrderFree]:
        kinds = [_MEMBERS[name] for name in self.options.pair.split("+")]
        return [kind(kind.Options(), self.layers, self.seed) for kind in kinds]


def _part_of(member: OrderFree, state: State) -> State:
    prefix = f"{member.name}_"
    own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    return {**own, "count": state["count"]}
