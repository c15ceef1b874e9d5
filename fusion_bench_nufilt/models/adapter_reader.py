"""The reader of an adapter: a model of the class that the adapter is for, on PyTorch's meta device,
as peft wraps it.

What a new adapter's tensors are called, which of them there must be, and what follows the weight
that it is tied to, is asked of the installed peft and transformers before any weight is merged.
"""

import warnings
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import nn

from fusion_bench_nufilt.utils.files import message_in_one_line
from fusion_bench_nufilt.utils.garbage import garbage_left
from fusion_bench_nufilt.utils.tensors import TensorInfo

from .architecture import Architecture, settings_of
from .checkpoint import Checkpoint
from .model import ModelWeights
from .peft_layers import PREFIX, auto_class
from .source import format_names

INTO_A_MODEL = "leave --adapter out, and name the base with --base, for a full model"


class AdapterReader:
    """A model that reads adapters.

    Args:
        model: on the meta device; it is wrapped in place.
        architecture: that of the base, to which the model's parameters belong.
    """

    def __init__(self, model: nn.Module, architecture: Architecture) -> None:
        self.model = model
        self._architecture = architecture
        #: The names of the model's parameters by param; a weight that is tied has several.
        self.names: dict[str, list[str]] = defaultdict(list)
        for name in model.state_dict():
            self.names[self.param(name)].append(name)
        self._all_names = {*chain(*self.names.values())}

    @property
    def class_name(self) -> str:
        return type(self.model).__name__

    def param(self, name: str) -> str:
        """Return the base's param for the name of a parameter in this model."""
        return self._architecture.param(self._architecture.prefix_of(self.class_name) + name)

    @property
    def class_of_model(self) -> dict[str, str] | None:
        """What peft notes of the class for which an adapter is, None for no class of its own."""
        kind = type(self.model)
        if kind is nn.Module:
            return None
        return {"base_model_class": kind.__name__, "parent_library": kind.__module__}

    def name(self, param: str) -> str:
        """Return the name of a parameter in this model, of a tied one that of its source."""
        names = self.names.get(param, ())
        if not names:
            raise ValueError(
                f"the adapter would be for {self.class_name}, which has no '{param}': "
                f"{INTO_A_MODEL}"
            )
        return self._architecture.first(names)

    def wrap(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Wrap the model for an adapter of a configuration, and return the shapes of what such an
        adapter has, by key.
        """
        from peft import (
            MODEL_TYPE_TO_PEFT_MODEL_MAPPING,
            LoraConfig,
            PeftModel,
            get_peft_model_state_dict,
        )

        kind: Any = PeftModel
        if self.class_of_model is not None:
            kind = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config["task_type"], PeftModel)
        fields = {name: value for name, value in config.items() if name != "peft_type"}
        try:
            with warnings.catch_warnings(action="ignore"):  # for those who train
                self._wrapped = kind(self.model, LoraConfig(**fields), low_cpu_mem_usage=True)
                state = get_peft_model_state_dict(self._wrapped, save_embedding_layers=False)
        except Exception as error:  # whatever peft finds wrong with it
            self.refuse(message_in_one_line(error), error)
        return {key: tuple(tensor.shape) for key, tensor in state.items()}

    def check(self, tensors: Mapping[str, TensorInfo], changed: Collection[str]) -> None:
        """Refuse an adapter of which peft would read another one than was meant.

        Args:
            tensors: all that it has, by key.
            changed: the params that it is to change.
        """
        from peft import set_peft_model_state_dict

        state = {}
        for key, info in tensors.items():
            state[key] = torch.empty(info.shape, dtype=torch.float32, device="meta")
        try:
            with warnings.catch_warnings(action="ignore"):
                result: Any = set_peft_model_state_dict(
                    self._wrapped, state, low_cpu_mem_usage=True
                )
        except (KeyError, RuntimeError) as error:
            self.refuse(message_in_one_line(error), error)
        wrong_keys = [*result.unexpected_keys]
        wrong_keys += [key for key in result.missing_keys if ".lora_" in key]
        if wrong_keys:
            self.refuse(f"it takes other tensors: {format_names(wrong_keys)}")
        expected = set()
        for param in changed:
            expected.update(self.names[param])
        apart = {name for name in expected ^ self._wrapped_names() if not name.endswith("bias")}
        if apart:
            self.refuse(f"it changes others of the names {format_names(sorted(apart))}")

    def _wrapped_names(self) -> set[str]:
        """Return the names of the parameters that peft's modules change, but for biases."""
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

        names: set[str] = set()
        for path, module in self._wrapped.named_modules(remove_duplicate=False):
            name = path.removeprefix(PREFIX)
            if isinstance(module, ModulesToSaveWrapper):
                names.update(full for full in self._all_names if full.startswith(f"{name}."))
            elif isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
                names.add(f"{name}.weight")
        return names & self._all_names

    def refuse(self, problem: str, cause: Exception | None = None) -> NoReturn:
        """Raise a ValueError about an adapter that peft would read as another one."""
        import peft

        raise ValueError(
            f"the adapter can't be one that peft {peft.__version__} reads for {self.class_name}: "
            f"{problem}; {INTO_A_MODEL}"
        ) from cause


def reader_of(
    adapters: Sequence[ModelWeights], base: Checkpoint, architecture: Architecture
) -> AdapterReader | None:
    """Return what reads an adapter that is merged from others: a model of the class that all of
    them are for, else of the base's; None if transformers does not know the latter.
    """
    import transformers

    own = getattr(transformers, architecture.known_from, None)
    if own is None:
        return None
    with garbage_left():
        config = settings_of(base.folder)
    kinds = {class_of(adapter.checkpoint.adapter_config, config) or own for adapter in adapters}
    kind = kinds.pop() if len(kinds) == 1 else own
    with torch.device("meta"):
        model = kind._from_config(_config_for(kind, config) or config)
    return AdapterReader(model, architecture)


def class_of(adapter_config: Mapping[str, Any], config: Any) -> Any:
    """Return the class of transformers that an adapter is for, given the base's configuration, or
    None if the adapter does not tell.
    """
    import transformers

    name = (adapter_config.get("auto_mapping") or {}).get("base_model_class")
    kind = getattr(transformers, str(name), None)
    if kind is None:
        mapping = getattr(auto_class(adapter_config), "_model_mapping", {})
        kind = mapping.get(type(config), None)
    if kind is None or _config_for(kind, config) is None:
        return None
    return kind


def _config_for(kind: Any, config: Any) -> Any:
    """Return the configuration of a class: that of a model, or of a part of it."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    for candidate in (config, *parts):
        if isinstance(candidate, getattr(kind, "config_class", ())):
            return candidate
    return None
