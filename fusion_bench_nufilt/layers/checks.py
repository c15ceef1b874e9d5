"""Which models are refused."""

from collections.abc import Sequence

from torch import nn

from fusion_bench_nufilt.core.checks import check_layers, is_finite


def check_model(pretrained: nn.Module, model: nn.Module, keys: Sequence[str], *, name: str) -> None:
    """Refuse a model that cannot be merged with the pretrained one.

    Args:
        pretrained: the reference.
        model: the model to check.
        keys: state-dict keys of the merged layers.
        name: the model's name in the pool, for the message.

    Raises:
        ValueError: a merged layer is missing, of another shape or not finite, or another parameter of the model
            is of another shape or not finite.
    """
    reference, state = pretrained.state_dict(), model.state_dict()
    layers = {key: state[key] for key in keys if key in state}
    check_layers({key: reference[key] for key in keys}, layers, model=name)
    for key, value in state.items():
        if key in layers or key not in reference or not value.is_floating_point():
            continue
        if value.shape != reference[key].shape:
            raise ValueError(
                f"model '{name}', parameter '{key}': shape {tuple(value.shape)} differs from the pretrained "
                f"model's {tuple(reference[key].shape)}"
            )
        if not is_finite(value):
            raise ValueError(f"model '{name}', parameter '{key}' has NaN or infinite values")
