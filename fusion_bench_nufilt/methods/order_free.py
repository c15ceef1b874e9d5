"""What order-free methods share: a state of sums over the tasks, and an update whose strength may
grow with depth. Here are also those whose state is a plain sum; the others are in
:mod:`.spectral`.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusion_bench_nufilt.nufilt.bases import leading_basis
from fusion_bench_nufilt.nufilt.blocks import row_blocks
from fusion_bench_nufilt.nufilt.eigenvectors import gram_matrix
from fusion_bench_nufilt.utils.tensors import compute_dtype, stack, to_compute_dtype

from .base import LayerMethod, Measures, State, block_bytes, block_of
from .options import METHOD_TABLE, ORDER_FREE_DEFAULTS, RampConfig, ScaleConfig
from .task_vector import RTOL, TaskVector

# Products in float32 know directions down to this share of the strongest, 840 eps of float32: they
# are wrong by a few eps of the strongest one.
RTOL_OF_FLOAT32 = 1e-4


class OrderFree(LayerMethod):
    """A method whose result does not depend on the tasks' order, nor the size of its state on their
    number.

    The state holds the tensors of :attr:`state_axes`, in float32 at least but for those of
    :attr:`direction_names`, and the ``count`` of the tasks that moved the layer. A task that did
    not change the layer has no effect.
    """

    Options: ClassVar[type] = ScaleConfig
    defaults: ClassVar[Mapping[str, Any]] = ORDER_FREE_DEFAULTS
    itemsize = 8
    sides_in_basis = "oi"
    direction_names: tuple[str, ...] = ()
    """Names of tensors in the state whose columns are of length 1 or 0, which are kept in float16
    unless the sums are in float64: no value is above 1, so it beats bfloat16.
    """
    scale_option: ClassVar[str] = "scale"
    """The name of the option that is the strength of the update, in the middle of the model."""

    options: RampConfig

    @abstractmethod
    def accumulate(self, state: State, task: TaskVector) -> State:
        """Return the sums with one more task, number ``state["count"]``, which are then rounded to
        the state's dtypes. A sum may be added to in place.

        Sums are given in float32 at least, directions as they are kept.
        """

    @abstractmethod
    def merged_update(self, state: State, scale: float, shape: tuple[int, int]) -> Tensor:
        """Return the merged update ``(d_o, d_i)`` of at least one task; the state is that of
        :meth:`accumulate`, and ``shape`` that of the layer, of which all may be given in a basis.
        """

    def rows_of_update(
        self, state: State, scale: float, shape: tuple[int, int]
    ) -> Callable[[slice], Tensor]:
        """Return the function that gives some rows of :meth:`merged_update`, which is computed
        once.
        """
        return self.merged_update(state, scale, shape).__getitem__

    def init_state(self, base: Tensor) -> State:
        state = {}
        wide = compute_dtype(base)
        d_o, d_i = base.shape[1:]
        layer_shape = self.layer_shape(base)
        # The state is much smaller in a basis, where directions need not be rounded.
        is_rounded = layer_shape == (d_o, d_i) and wide == torch.float32
        lengths = {"o": d_o, "i": d_i, "k": min(layer_shape)}
        for name, axes in self.state_axes.items():
            shape = [lengths[axis] for axis in axes]
            # Single numbers cost nothing in float64.
            dtype = wide if shape else torch.float64
            if name in self.direction_names and is_rounded:
                dtype = torch.float16
            state[name] = base.new_zeros((len(base), *shape), dtype=dtype)
        return {**state, "count": base.new_zeros(len(base), dtype=torch.int64)}

    def update(
        self, state: State, base: Tensor, task: TaskVector, step: int
    ) -> tuple[State, Measures]:
        states = []
        task_norms = []
        for row in range(len(base)):
            tau = task.layer(row, self.layer_shape(base))
            before = {key: value[row] for key, value in state.items()}
            after = before
            if not tau.is_zero:
                after = self.accumulate({**before, "count": before["count"] + 1}, tau)
            states.append({key: after[key].to(value.dtype) for key, value in before.items()})
            task_norms.append(tau.norm)
        new_state = {key: stack([row_state[key] for row_state in states]) for key in state}
        measures = {"task_norm": stack(task_norms)}
        for key, value in new_state.items():
            if value.ndim == 1:
                measures[key] = value
        return new_state, measures

    def merged_weight(self, state: State, base: Tensor) -> Tensor:
        weights = []
        shape = self.layer_shape(base)
        for row, (name, theta_0) in enumerate(zip(self.names, base, strict=True)):
            layer_state = {key: value[row] for key, value in state.items()}
            if layer_state["count"] == 0:
                weights.append(theta_0.clone())
            else:
                update = self.rows_of_update(layer_state, self.scale_of(name), shape)
                weight = torch.empty_like(theta_0)
                for rows in row_blocks(weight):
                    weight[rows] = to_compute_dtype(theta_0[rows]) + update(rows)
                weights.append(weight)
        return stack(weights)

    @property
    def scale(self) -> float:
        """The strength of the update in the middle of the model."""
        scale: float = getattr(self.options, self.scale_option)
        return scale

    def scale_of(self, name: str) -> float:
        r"""Return the strength λ of the update of a layer: :math:`\lambda\,(1 + \text{ramp}\,(2 l /
        (L - 1) - 1))` in block l of the L blocks that the model has, merged or not.

        A layer outside all blocks, or in the only one of its stack, has :math:`\lambda`.
        """
        block = block_of(name)
        if block is None or self.last_blocks[block.stack] == 0:
            return self.scale
        depth = 2 * block.number / self.last_blocks[block.stack] - 1
        return self.scale * (1 + self.options.ramp * depth)

    def working_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        numel = math.prod(shape)
        gram = min(shape) ** 2
        # Solvers of a single layer, and those of its task vector, of which these are the most:
        # the task vector; its directions in float64 with those of what is solved and of its
        # rest; and the Gram matrix, its eigenvectors and the solver's workspace; and, as measured,
        # a third for what lies unused between the blocks of one heap. A solver that fails, and is
        # followed by float64, takes more.
        wide_sums = itemsize * numel + 8 * (7 * numel + 7 * gram)
        return wide_sums + block_bytes(shape, itemsize)


class Sum(OrderFree):
    r"""Task arithmetic, :math:`X = \lambda \sum_t \tau_t`, with a strength that may grow with
    depth.
    """

    name = "sum"
    label = "task arithmetic (running sum)"
    citation = (
        "task arithmetic ([Ilharco et al., ICLR 2023](https://arxiv.org/abs/2212.04089)) on the "
        "running sum"
    )
    Options = METHOD_TABLE[name].Options
    defaults = METHOD_TABLE[name].defaults
    itemsize = 4

    state_axes: ClassVar[Mapping[str, str]] = {"sum": "oi"}

    def accumulate(self, state: State, task: TaskVector) -> State:
        task.add_to(state["sum"])
        return state

    def merged_update(self, state: State, scale: float, shape: tuple[int, int]) -> Tensor:
        return scale * state["sum"]

    def rows_of_update(
        self, state: State, scale: float, shape: tuple[int, int]
    ) -> Callable[[slice], Tensor]:
        # Some rows after the others: the update as a whole has the size of the sum.
        def rows_of_update(rows: slice) -> Tensor:
            return scale * state["sum"][rows]

        return rows_of_update

    def working_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        # The merged weight; differences and updates are of some rows at a time.
        return itemsize * math.prod(shape) + block_bytes(shape, itemsize)


def map_spectrum(
    X: Tensor,
    f: Callable[[Tensor], Tensor],
    faintest: float = RTOL,
    directions: Tensor | None = None,
) -> Tensor:
    r"""Return :math:`U f(s) V^\top` for :math:`X = U s V^\top`, ``(d_o, d_i)``, from a Gram matrix
    in float64.

    Directions up to this share of the strongest are left out; by default, those that are rounding
    error. ``f`` takes all ``min(d_o, d_i)`` singular values. ``directions`` ``(min(d_o, d_i), n)``,
    where they are known, are about those of the shorter side that X has beside what is left out.
    """
    if X.shape[0] < X.shape[1]:
        return map_spectrum(X.mT, f, faintest, directions).mT
    products = X
    if faintest < RTOL_OF_FLOAT32:
        products = X.double()
    d = X.shape[1]
    # Sums of low-rank updates have all that counts in a few directions, so few are tried first.
    ranks = [d // 16, d // 4, d // 2, d]
    while True:
        rank = ranks.pop(0)
        if directions is not None:
            # Exact, however they were rounded, where X has no others.
            outputs = torch.linalg.qr(products @ directions).Q
            Q = torch.linalg.qr(products.mT @ outputs).Q
            B = products @ Q
        elif 0 < rank < d:
            Q = leading_basis(products, rank, rounds=2)
            B = products @ Q
        else:
            Q = None
            B = X.double()
        squares, V = torch.linalg.eigh(gram_matrix(B.double()))
        weakest = (squares[0].clamp_min(0) / squares[-1]).sqrt()
        # A quarter, since subspace iteration finds the weakest directions of a basis too weak.
        has_all_that_count = weakest <= faintest / 4
        if Q is None or has_all_that_count or directions is not None:
            break
        is_flat = weakest > faintest**0.5
        if len(ranks) == 2 and is_flat:  # half of the directions is not enough either
            ranks = [d]
    # The directions that were not computed have singular values of 0.
    s = pad(squares.clamp_min(0).sqrt(), (d - len(squares), 0))
    gain = torch.where(s > faintest * s.amax(), f(s) / s, 0)[-len(squares) :]
    left = (B @ V.to(B)) * gain.to(B)
    right = V
    if Q is not None:
        right = Q @ V.to(Q)
    return left.to(X.dtype) @ right.to(X.dtype).mT
