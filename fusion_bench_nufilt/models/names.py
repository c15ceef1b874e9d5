"""What transformers calls the tensors of a checkpoint, where its file calls them otherwise."""

from functools import cache
from typing import Any


@cache
def modern_name(key: str) -> str:
    """Return the name under which transformers loads a tensor that a checkpoint stores by a name of
    before, such as ``LayerNorm.gamma``; any other name stays as it is.
    """
    changes = _legacy_changes()
    if changes is None:
        from transformers import PreTrainedModel

        name, _ = PreTrainedModel._fix_state_dict_key_on_load(key)
        return str(name)
    from transformers.core_model_loading import rename_source_key

    name, _ = rename_source_key(key, changes, [])
    return str(name)


@cache
def _legacy_changes() -> list[Any] | None:
    """Return what transformers 5 renames in checkpoints of all models, or None for version 4."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ModuleNotFoundError:
        return None
    changes: list[Any] = get_checkpoint_conversion_mapping("legacy")
    return changes
