"""Hooks that hand out what the layers of a model get and give while it runs, padding left out."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


class PaddingMask:
    """The ``attention_mask`` of the transformer that is running: 1 for a token, 0 for padding."""

    def __init__(self) -> None:
        self._mask: Tensor | None = None

    def note(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Remember the mask that a transformer is called with. This is a forward pre-hook with keyword arguments."""
        if "attention_mask" in kwargs:
            given = kwargs["attention_mask"]
            self._mask = given if isinstance(given, Tensor) and given.dim() == 2 else None

    def tokens(self, X: Tensor) -> Tensor:
        """The rows ``(n, d)`` of ``X``, ``(..., d)``, that are no padding."""
        if self._mask is not None and self._mask.shape == X.shape[:-1]:
            return X[self._mask.bool()]
        return X.flatten(0, -2)


@contextmanager
def padding_mask(model: nn.Module) -> Iterator[PaddingMask]:
    """Keep up with the mask of the transformer that is running, in a model that may hold several."""
    mask = PaddingMask()
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                stack.callback(module.register_forward_pre_hook(mask.note, with_kwargs=True).remove)
        yield mask


@contextmanager
def layer_inputs(model: nn.Module, names: Sequence[str], receive: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call ``receive`` with the name and the very input of each of these layers whenever the model runs."""
    with ExitStack() as stack:
        for name in names:

            def hook(module: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
                receive(name, args[0])

            stack.callback(model.get_submodule(name).register_forward_pre_hook(hook).remove)
        yield


@contextmanager
def layer_outputs(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Yield a dictionary that holds, after each forward pass, the outputs ``(n, d_o)`` of the layers."""
    outputs: dict[str, Tensor] = {}
    with padding_mask(model) as mask, ExitStack() as stack:
        for name in names:

            def hook(module: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
                outputs[name] = mask.tokens(output)

            stack.callback(model.get_submodule(name).register_forward_hook(hook).remove)
        yield outputs
