r"""Rules that make a method continual which merges many models at once.

A batch method turns a model :math:`\theta` and task vectors into a model :math:`M(\theta; \tau, …)`. Step t has the
pretrained model :math:`\theta_0`, the model merged so far :math:`\theta` with its update :math:`\tilde\tau = \theta -
\theta_0`, and the new model :math:`\theta_t` with its task vector :math:`\tau_t`. The method scales its result by
:math:`\lambda`, which is 1 for methods without such a factor.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fusion_bench_nufilt.core.options import check_choices, is_number, option
from fusion_bench_nufilt.core.weights import wide_dtype

RuleName = Literal["at_once", "add", "add_running", "restart", "on_top"]

ONE_FORM = (
    "form=released is for methods that the authors' released code runs by another formula than the paper prints; this "
    "method has one form"
)


@dataclass(frozen=True)
class RuleConfig:
    """The formula by which a batch method is run continually.

    Raises:
        ValueError: a value is out of its range, or the method does not have the form; the message names the key.
    """

    form: Literal["paper", "released"] = option(
        "paper",
        "Which of two formulas, for methods that have two: the one printed in the paper (rule), or that of its "
        "authors' released code (released_rule).",
    )
    rule: RuleName = option(
        "at_once",
        "What the method merges, and how its result is used: at_once M(θ0; τ̃/λ, τ), add θ + M(θ0; τ̃, τ) - θ0, "
        "add_running the same with the method's own last result in place of τ̃, restart M(θ0; τ), on_top M(θ; τ).",
    )
    released_rule: RuleName | None = option(None, "The rule of form=released; null if the method has one form.")
    merged_scale: float = option(1.0, "The factor λ by which the method scales its result.", symbol="λ")
    merge_first: bool = option(
        False, "Whether the method merges the first model, too, by itself; otherwise that enters as θ0 + λ τ."
    )

    def __post_init__(self) -> None:
        check_choices(self)
        if not is_number(self.merged_scale) or self.merged_scale <= 0:
            raise ValueError(f"merged_scale must be above 0, got {self.merged_scale!r}")
        if self.form == "released" and self.released_rule is None:
            raise ValueError(ONE_FORM)

    @property
    def chosen(self) -> RuleName:
        """Return the rule of the chosen form."""
        return self.released_rule if self.form == "released" and self.released_rule is not None else self.rule


@dataclass(frozen=True)
class Step:
    """The models that a rule combines."""

    merge: Callable[..., nn.Module]  # M(θ; τ, …) of the model to start from and the models to merge
    theta_0: nn.Module  # pretrained
    before: nn.Module  # merged before the last step; the pretrained model at steps 1 and 2
    theta: nn.Module  # merged so far
    theta_t: nn.Module  # the new model
    scale: float  # lambda


@torch.no_grad()
def shifted(theta: nn.Module, to: nn.Module, base: nn.Module, scale: float = 1) -> nn.Module:
    r"""Return a new model :math:`\theta + s (\theta_{to} - \theta_{base})`, rounded once to the weights' dtype."""
    if theta is base and scale == 1:
        return deepcopy(to)
    model, above, below = deepcopy(theta), to.state_dict(), base.state_dict()
    values = {}
    for key, value in model.state_dict().items():
        if value.is_floating_point():
            wide = wide_dtype(value)
            difference = above[key].to(value.device, wide) - below[key].to(value.device, wide)
            values[key] = value.to(wide) + scale * difference
    model.load_state_dict(values, strict=False)
    return model


RULES: dict[RuleName, Callable[[Step], nn.Module]] = {
    "at_once": lambda s: s.merge(s.theta_0, shifted(s.theta_0, s.theta, s.theta_0, 1 / s.scale), s.theta_t),
    "add": lambda s: shifted(s.theta, s.merge(s.theta_0, s.theta, s.theta_t), s.theta_0),
    # The method's own last result is the difference of the last two merged models, so that nothing else is kept.
    "add_running": lambda s: shifted(
        s.theta, s.merge(s.theta_0, shifted(s.theta_0, s.theta, s.before, 1 / s.scale), s.theta_t), s.theta_0
    ),
    "restart": lambda s: s.merge(s.theta_0, s.theta_t),
    "on_top": lambda s: s.merge(s.theta, shifted(s.theta, s.theta_t, s.theta_0)),
}
"""The formulas of :class:`RuleConfig`."""
