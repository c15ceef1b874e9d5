"""The check that refuses a model which cannot be merged."""

import logging
from collections.abc import Collection

from torch import nn

from fusion_bench_nufilt.core.weights import is_finite
from fusion_bench_nufilt.layers.targets import OnShapeMismatch, OtherParams

log = logging.getLogger(__name__)


def check_model(
    pretrained: nn.Module,
    model: nn.Module,
    merged: Collection[str] | None = None,
    *,
    name: str,
    other_params: OtherParams = "mean",
    on_shape_mismatch: OnShapeMismatch = "error",
) -> None:
    """Refuse a model that cannot be merged with the pretrained one.

    Args:
        pretrained: the pretrained model.
        model: the model to check.
        merged: state-dict keys of the parameters that hold merged layers; None means all matrices.
        name: the model's name in the pool, for the message.
        other_params: with ``pretrained``, the values of other parameters do not matter, since they are not taken.
        on_shape_mismatch: with ``keep-base``, other parameters may differ in shape, which is logged as a warning.

    Raises:
        ValueError: a parameter with merged layers is missing or not floating point, or any parameter has another shape
            or is not finite; the message names the model, the parameter and the shapes.
    """
    reference, state = pretrained.state_dict(), model.state_dict()
    if merged is None:
        merged = [key for key, parameter in pretrained.named_parameters() if parameter.ndim == 2]

    def what(key: str) -> str:
        return f"model '{name}', {'layer' if key in merged else 'parameter'} '{key}'"

    for key in merged:
        if key not in state:
            raise ValueError(
                f"model '{name}' lacks layer '{key}' {tuple(reference[key].shape)} of the pretrained model"
            )
        if not state[key].is_floating_point():
            raise ValueError(f"{what(key)}: expected floating-point values, got {state[key].dtype}")
    kept = []
    for key, value in state.items():
        if key not in reference or not value.is_floating_point():
            continue
        if value.shape != reference[key].shape:
            if key in merged or on_shape_mismatch == "error":
                hint = "" if key in merged else "; on_shape_mismatch=keep-base leaves it as it is there"
                raise ValueError(
                    f"{what(key)}: shape {tuple(value.shape)} differs from the pretrained model's "
                    f"{tuple(reference[key].shape)}{hint}"
                )
            kept.append(key)
        elif (key in merged or other_params != "pretrained") and not is_finite(value):
            raise ValueError(f"{what(key)} has NaN or infinite values")
    if kept:
        log.warning("model '%s': kept from the pretrained model because of their shape: %s", name, ", ".join(kept))
