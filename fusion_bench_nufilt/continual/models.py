"""The models of a pool: where they come from, which weights their checkpoints lack, and what was
merged before.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fusion_bench import BaseModelPool
from omegaconf import OmegaConf
from torch import Tensor, nn
from transformers import PreTrainedModel

from fusion_bench_nufilt.models.checkpoint import Checkpoint
from fusion_bench_nufilt.models.layers import exclude_hint
from fusion_bench_nufilt.utils.files import Input, Manifest, expanded, message_in_one_line
from fusion_bench_nufilt.utils.fingerprint import fingerprint_tensors
from fusion_bench_nufilt.utils.manifest import read_manifest, verify_files

PRETRAINED = "_pretrained_"
MERGED = "_merged_"
#: What a report of FusionBench, or of a run, holds beside the scores of the tasks.
IN_REPORTS = ("average", "continual", "model_info")
#: What to do about a model that is not the one that was merged.
CHANGED = "merge or fetch it again; method.verify=false goes on from it all the same"


def as_pool(models: BaseModelPool | Mapping[str, nn.Module]) -> BaseModelPool:
    """Return models as a pool; for state dicts, raise a ValueError that says what to do."""
    if isinstance(models, BaseModelPool):
        return models
    for name, model in models.items():
        if not isinstance(model, Mapping):
            continue
        if any(isinstance(value, Tensor) for value in model.values()):
            raise ValueError(
                f"model '{name}' is a state dict, and run takes torch modules: load it into a "
                "model with load_state_dict, or merge matrices alone with fuse_layers"
            )
    return BaseModelPool(dict(models))


def check_pool(modelpool: BaseModelPool) -> None:
    """Raise a ValueError for a pool that lacks the pretrained model, has no fine-tuned one, or has
    one whose scores a report can't hold under its name.
    """
    if not modelpool.has_pretrained:
        raise ValueError(
            f"the model pool has no '{PRETRAINED}' model, only {modelpool.all_model_names}"
        )
    if not modelpool.model_names:
        raise ValueError("the model pool is empty: there is no fine-tuned model to merge")
    for name in IN_REPORTS:
        if name in modelpool.model_names:
            raise ValueError(
                f"model '{name}': a report has something else of this name beside the scores of "
                "the tasks; give the model another name in modelpool.models, and its task the same "
                "in the task pool"
            )


def load_model(modelpool: BaseModelPool, name: str) -> tuple[nn.Module, list[str]]:
    """Load a model of a pool, and tell which of its weights were drawn at random.

    transformers draws every weight that a checkpoint lacks at random, and only warns about it.
    """
    with _missing_in_checkpoints() as missing_keys:
        try:
            model = modelpool.load_model(name)
        except Exception as error:  # whatever a pool or transformers raises
            raise ValueError(f"model '{name}' can't be loaded: {reason(error)}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"the model pool must load torch modules, got {type(model).__name__} for '{name}'"
        )
    if not missing_keys:
        return model, []
    # The pool may have returned a part of what was loaded, or have put it into something larger.
    keys = []
    for key in model.state_dict():
        if any(_same_tensor(key, missing_key) for missing_key in missing_keys):
            keys.append(key)
    return model, keys


def fingerprint_of_stored(model: nn.Module, missing_keys: Collection[str]) -> str:
    """Return the fingerprint of a model's weights except those drawn at random, which differ from
    run to run.
    """
    state = model.state_dict()
    return fingerprint_tensors({key: state[key] for key in state if key not in missing_keys})


def reason(error: Exception) -> str:
    """Return the reason of a failure in one line."""
    text = message_in_one_line(error)
    if isinstance(error, ValueError):
        return text
    return f"{type(error).__name__}: {text}"


def refuse_missing_keys(name: str, keys: Sequence[str], *, can_exclude: bool) -> None:
    """Raise a ValueError if weights to be merged were drawn at random; it names the model and a
    weight.
    """
    if not keys:
        return
    hint = ""
    if can_exclude:
        hint = exclude_hint([keys[0].rpartition(".")[0]])
    raise ValueError(
        f"model '{name}': its checkpoint lacks '{keys[0]}', one of {len(keys)} weights to be "
        f"merged that transformers drew at random: is it damaged?{hint}"
    )


def load_stored(
    modelpool: BaseModelPool, name: str, merged: Collection[str] | None = None
) -> nn.Module:
    """Load a model; refuse one whose weights to be merged (by default all) were drawn at random."""
    model, missing_keys = load_model(modelpool, name)
    if merged is not None:
        missing_keys = [key for key in missing_keys if key in merged]
    refuse_missing_keys(name, missing_keys, can_exclude=False)
    return model


def _same_tensor(key: str, other: str) -> bool:
    """Tell whether two keys may be of one tensor: one may have the name of a larger module before
    it.
    """
    return f".{key}".endswith(f".{other}") or f".{other}".endswith(f".{key}")


@contextmanager
def _missing_in_checkpoints() -> Iterator[set[str]]:
    """Collect the keys missing in the checkpoints that transformers loads within the block."""
    missing_keys: set[str] = set()
    load: Any = vars(PreTrainedModel)["from_pretrained"]  # the class method itself

    def from_pretrained(
        cls: type, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        model, info = load.__func__(cls, *args, output_loading_info=True, **kwargs)
        missing_keys.update(info["missing_keys"])
        if output_loading_info:
            return model, info
        return model

    # A FusionBench pool returns the model alone, and transformers only warns of missing keys.
    with patch.object(PreTrainedModel, "from_pretrained", classmethod(from_pretrained)):
        yield missing_keys


def source_of(modelpool: BaseModelPool, name: str) -> Any:
    """Return where a model comes from: a hub name, a folder, or its configuration in the pool."""
    entry = modelpool._models[name]
    if isinstance(entry, str):
        return entry
    if isinstance(entry, nn.Module):
        return type(entry).__name__
    if not OmegaConf.is_dict(entry):
        raise ValueError(
            f"model '{name}' of the pool must be a folder, a hub name or have a _target_, got "
            f"{entry!r}"
        )
    return OmegaConf.to_container(entry, resolve=True)


def merged_before(
    modelpool: BaseModelPool, num_merged: int | None, *, verify: bool
) -> tuple[Path | None, Manifest, int]:
    """Return the folder of the pool's ``_merged_`` model, if there is one, its manifest, which is
    empty otherwise, and the next model's number.

    The number comes from the manifest, too; ``num_merged`` overrides it.
    """
    check_pool(modelpool)
    if MERGED not in modelpool.all_model_names:
        if num_merged is not None:
            raise ValueError(f"num_merged={num_merged}, but the model pool has no '{MERGED}' model")
        return None, Manifest(), 1
    folder = None
    manifest = Manifest()
    path = _path_of(modelpool, MERGED)
    if path is not None:
        folder = expanded(path)
        manifest = read_manifest(folder)
        if manifest and verify:
            verify_files(folder, manifest, CHANGED)
    num_merged = num_merged or manifest.get("step")
    if num_merged is None:
        raise ValueError(
            f"how many models are in '{MERGED}'? Its checkpoint does not say: set num_merged"
        )
    return folder, manifest, num_merged + 1


def _path_of(modelpool: BaseModelPool, name: str) -> str | None:
    """Return the folder or hub name in the entry of a model; None if it is given in another way."""
    entry = modelpool._models[name]
    if isinstance(entry, str):
        return entry
    # A configuration has it as an argument, and a model in memory has none.
    return getattr(entry, "pretrained_model_name_or_path", None)


def identify(
    modelpool: BaseModelPool, name: str, model: nn.Module, missing_keys: Collection[str]
) -> Input:
    """Return what a model of a pool is known by, given the model and the keys of weights that were
    drawn at random, which differ from run to run.
    """
    identity = Input(loaded=fingerprint_of_stored(model, missing_keys))
    path = _path_of(modelpool, name)
    if path is not None and expanded(path).is_dir():
        with suppress(ValueError):  # without safetensors
            identity["fingerprint"] = Checkpoint.open(path).fingerprint
    return identity
