"""Load a merged model with the head of one of its tasks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load
from torch import nn

from fusion_bench_nufilt.models.architecture import (
    settings_of,
    shared_names,
    without_implementations,
)
from fusion_bench_nufilt.models.checkpoint import Checkpoint
from fusion_bench_nufilt.models.names import modern_name
from fusion_bench_nufilt.models.source import format_names
from fusion_bench_nufilt.utils.manifest import read_heads, read_manifest


def load_task(folder: str | Path, task: str) -> nn.Module:
    """Return a merged model with the head of one of its tasks, in eval mode.

    Args:
        folder: a merged folder, a saved step of a run, or the hub name of either.
        task: the name of the task, as in the manifest under ``heads``.

    Raises:
        ValueError: the task has no head, a file is damaged, or transformers has no class for the
            model.
    """
    checkpoint = Checkpoint.open(str(folder))
    manifest = read_manifest(checkpoint.folder)
    heads = manifest.get("heads", {})
    if task not in heads:
        tasks_with_heads = "its tasks have no heads of their own"
        if heads:
            tasks_with_heads = f"there are those of {format_names(heads)}"
        raise ValueError(f"'{folder}' has no head of '{task}': {tasks_with_heads}")
    file = heads[task]["file"]
    config = heads[task]["config"]
    local = checkpoint.folder_with(*checkpoint.files, file)  # not the state, which is larger
    tensors = {}
    for key, value in load(read_heads(local, manifest, task)[file]).items():
        tensors[modern_name(key)] = value
    model, unset_keys = _by_transformers(local, config)
    head = f"'{folder}', head of '{task}': for {type(model).__name__} there is"
    for names in shared_names(model):
        if not tensors.keys().isdisjoint(names):  # one of them stands for all
            unset_keys.difference_update(names)
    missing_keys = sorted(unset_keys - tensors.keys())
    if missing_keys:
        raise ValueError(f"{head} no {format_names(missing_keys)}")
    unknown_keys = sorted(tensors.keys() - model.state_dict().keys())
    if unknown_keys:
        raise ValueError(f"{head} {format_names(unknown_keys)} more")
    model.load_state_dict(tensors, strict=False)
    return model.eval()


def _by_transformers(folder: Path, config: Mapping[str, Any]) -> tuple[nn.Module, set[str]]:
    """Return a model with the folder's weights, and the keys that it has no weights for."""
    import transformers

    name = (config.get("architectures") or ["None"])[0]
    kind: Any = getattr(transformers, str(name), None)
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    # Of an adapter's head, the kind of task is known alone.
    is_kind_of_task = kind is not None and str(name).startswith("AutoModelFor")
    if not is_model and not is_kind_of_task:
        raise ValueError(f"'{folder}': transformers has no class '{name}' for the head")
    settings = without_implementations(transformers.AutoConfig.for_model(**config))
    if hasattr(settings, "vocab_size"):
        # The config is the task's, and the merged model may have more tokens.
        settings.vocab_size = settings_of(folder).vocab_size
    # The folder may have the base's head, for another number of labels.
    options = {"dtype": "auto", "ignore_mismatched_sizes": True, "output_loading_info": True}
    verbosity = transformers.logging.get_verbosity()
    # It would advise training the head, which it does not know.
    transformers.logging.set_verbosity_error()
    try:
        model, info = kind.from_pretrained(folder, config=settings, **options)
    finally:
        transformers.logging.set_verbosity(verbosity)
    unset_keys = set(info["missing_keys"])
    for mismatched in info["mismatched_keys"]:
        # Some versions of transformers give the two shapes along with the key.
        key = mismatched if isinstance(mismatched, str) else mismatched[0]
        unset_keys.add(key)
    return model, unset_keys
