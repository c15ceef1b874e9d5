"""Load models from a pool, and find out which weights their checkpoints lack."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fusion_bench import BaseModelPool
from omegaconf import OmegaConf
from torch import nn
from transformers import PreTrainedModel


def load_model(modelpool: BaseModelPool, name: str) -> tuple[nn.Module, list[str]]:
    """Load a model of a pool, and tell which of its weights were drawn at random.

    transformers draws every weight that a checkpoint lacks, and says so in a warning only.

    Raises:
        ValueError: it is no torch module.
    """
    with _drawn_at_random() as drawn:
        model = modelpool.load_model(name)
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model pool must load torch modules, got {type(model).__name__} for '{name}'")
    # The pool may have returned a part of what was loaded, or have put it into something larger.
    keys = [key for key in model.state_dict() if any(_same(key, other) for other in drawn)] if drawn else []
    return model, keys


def refuse_drawn(name: str, keys: Sequence[str]) -> None:
    """Refuse a model whose weights ``keys``, which are to be merged, were drawn at random."""
    if keys:
        raise ValueError(
            f"model '{name}': its checkpoint lacks '{keys[0]}', one of {len(keys)} weights to be merged that "
            "transformers drew at random: it is damaged, or of another architecture"
        )


def describe_model(modelpool: BaseModelPool, name: str) -> Any:
    """Return where a model comes from: a hub name or folder, or the pool's config of it."""
    entry = modelpool._models[name]
    if isinstance(entry, str):
        return entry
    return type(entry).__name__ if isinstance(entry, nn.Module) else OmegaConf.to_container(entry, resolve=True)


def _same(key: str, other: str) -> bool:
    return f".{key}".endswith(f".{other}") or f".{other}".endswith(f".{key}")


@contextmanager
def _drawn_at_random() -> Iterator[set[str]]:
    """Collect the keys that are missing in the checkpoints that transformers loads meanwhile."""
    missing: set[str] = set()
    load: Any = vars(PreTrainedModel)["from_pretrained"]

    def from_pretrained(cls: type, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        model, info = load.__func__(cls, *args, output_loading_info=True, **kwargs)
        missing.update(info["missing_keys"])
        return (model, info) if output_loading_info else model

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[method-assign]
    try:
        yield missing
    finally:
        PreTrainedModel.from_pretrained = load  # type: ignore[method-assign]
