"""Base, merged and task models, addressed by slot whatever their files call a tensor."""

import math
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from fusion_bench_nufilt.core import LowRank
from fusion_bench_nufilt.core.dtypes import wide_dtype
from fusion_bench_nufilt.layers.patterns import matches

from .architecture import Architecture, by_slot
from .checkpoint import Checkpoint, is_adapter, some

_PREFIX = "base_model.model."
# What changes the base's own weights or adds other terms than B A.
_REFUSED = {
    "use_dora": "DoRA, whose update is no B A but rescales the whole weight",
    "lora_bias": "lora_bias",
    "use_qalora": "QALoRA",
    "kasa_config": "KaSA, which truncates the base",
    "arrow_config": "Arrow, which mixes several adapters by the input",
    "layer_replication": "layer_replication, which adds layers",
    "target_parameters": "target_parameters",
    "trainable_token_indices": "trainable_token_indices",
    "alora_invocation_tokens": "activated LoRA, which acts on some tokens only",
}
_REFUSED_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


class Task(Protocol):
    """A fine-tuned model, in whatever form it comes."""

    checkpoint: Checkpoint
    slots: dict[str, tuple[int, ...]]  # shapes of the full tensors that it changes or brings
    keys: dict[str, str]  # of its checkpoint, for the slots that it has in full

    def weight(self, slot: str) -> tuple[Tensor | LowRank, str]:
        """What a slot with a layer holds, or the factors of the layer's update, and the digest of what was read."""

    def rank(self, slot: str) -> int | None:
        """Of the layer's update, where it is given by factors."""

    def has(self, slot: str) -> bool:
        """Return whether the model says what a tensor of the base is; an adapter does of all but ignored ones."""

    def elements(self, slot: str, start: int, stop: int, theta_0: Tensor) -> Tensor:
        """Return some elements of a flattened tensor that the model has, given the base's."""

    def ignore(self, slot: str) -> None:
        """Take a tensor outside the merged layers as if it were not there."""


class FullModel:
    """A whole checkpoint."""

    def __init__(self, checkpoint: Checkpoint, architecture: Architecture) -> None:
        self.checkpoint = checkpoint
        architecture.split(checkpoint)
        # Where a model that the base ties is stored untied, the slot's own name wins: the embedding, not the head.
        self.keys = {
            slot: next((key for key in keys if architecture.module_name(key) == slot), keys[0])
            for slot, keys in by_slot(architecture, checkpoint).items()
        }
        self.slots = {slot: checkpoint.tensors[key].shape for slot, key in self.keys.items()}

    def weight(self, slot: str) -> tuple[Tensor, str]:
        return self.checkpoint.read(self.keys[slot])

    def rank(self, slot: str) -> None:
        return None

    def has(self, slot: str) -> bool:
        return slot in self.keys

    def elements(self, slot: str, start: int, stop: int, theta_0: Tensor) -> Tensor:
        key = self.keys[slot]
        return self.checkpoint.file(key).elements(self.checkpoint.tensors[key], start, stop)

    def ignore(self, slot: str) -> None:
        del self.keys[slot], self.slots[slot]


class LoraAdapter:
    r"""A peft LoRA adapter: :math:`\theta_t = \theta_0 + s\,B A` for its targets, whole tensors for `modules_to_save`.

    Args:
        checkpoint: of the adapter's folder.
        architecture: of the base.

    Raises:
        ValueError: the adapter is no LoRA, or of a kind that is not B A added to the weight; names it.
    """

    def __init__(self, checkpoint: Checkpoint, architecture: Architecture) -> None:
        self.checkpoint = checkpoint
        self.config: Mapping[str, Any] = checkpoint.adapter_config
        self._check_kind()
        architecture.split(checkpoint)
        self._transposed = {slot for slot, view in architecture.views.items() if view.transposed}
        self.pairs: dict[str, tuple[str, str, float]] = {}  # key of A, key of B, scaling
        self.keys: dict[str, str] = {}  # keys of whole tensors
        self.slots: dict[str, tuple[int, ...]] = {}
        self._ignored: set[str] = set()
        unknown = []
        for key, info in checkpoint.tensors.items():
            name = key.removeprefix(_PREFIX).replace(".base_layer.bias", ".bias")  # biases that were trained as well
            module, is_a, _ = name.partition(".lora_A.weight")
            if is_a and len(info.shape) == 2:
                key_b = key.replace(".lora_A.weight", ".lora_B.weight")
                if key_b not in checkpoint.tensors:
                    raise ValueError(f"adapter '{checkpoint.name}' has '{key}' and no '{key_b}'")
                checkpoint.check_floats((key, key_b))
                slot = architecture.slot(f"{module}.weight")
                (rank, d_i), shape_b = info.shape, checkpoint.tensors[key_b].shape
                expected = self._pattern("rank_pattern", module, self.config.get("r", rank))
                if len(shape_b) != 2 or not rank == shape_b[1] == expected:
                    raise ValueError(
                        f"adapter '{checkpoint.name}', '{module}': A is {info.shape}, B {shape_b}, and the rank in its "
                        f"config {expected}: they do not belong together"
                    )
                d_o = shape_b[0]
                self.pairs[slot] = key, key_b, self._scaling(module, rank)
                self.slots[slot] = (d_i, d_o) if slot in self._transposed else (d_o, d_i)
                if self.config.get("fan_in_fan_out") and slot not in self._transposed:
                    raise ValueError(
                        f"adapter '{checkpoint.name}' is for transposed layers (fan_in_fan_out), and '{slot}' of the "
                        "base is none"
                    )
            elif ".base_layer." in name:
                continue  # the base's own weight, which peft saves along with an adapted embedding or head
            elif ".lora_" not in name:
                slot = architecture.slot(name)
                self.keys[slot] = key
                self.slots[slot] = info.shape
            elif not name.endswith(".lora_B.weight") or key.replace(".lora_B.", ".lora_A.") not in checkpoint.tensors:
                unknown.append(key)
        if unknown:
            raise ValueError(f"adapter '{checkpoint.name}': {some(unknown)}: no LoRA of a linear layer")

    def _check_kind(self) -> None:
        config, name = self.config, self.checkpoint.name
        if config.get("peft_type") != "LORA":
            raise ValueError(f"adapter '{name}' is of type {config.get('peft_type')}: only LORA can be merged")
        for key, kind in _REFUSED.items():
            if config.get(key):
                raise ValueError(f"adapter '{name}' uses {kind}: merge it into its base with peft, give that folder")
        if str(config.get("init_lora_weights", True)).startswith(_REFUSED_INITS):
            raise ValueError(
                f"adapter '{name}' was initialised with {config['init_lora_weights']}, which changes the base as well: "
                "save it with peft's path_initial_model_for_weight_conversion"
            )

    def _scaling(self, module: str, rank: int) -> float:
        alpha = self._pattern("alpha_pattern", module, self.config.get("lora_alpha", 8))
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _pattern(self, field: str, module: str, default: Any) -> Any:
        """The value of the first expression of a field that matches the end of a module's name, as peft finds it."""
        of = f"adapter '{self.checkpoint.name}', {field}"
        values = self.config.get(field) or {}
        return next((values[key] for key in values if matches(rf"(.*\.)?({key})", module, of=of)), default)

    def weight(self, slot: str) -> tuple[Tensor | LowRank, str]:
        if slot in self.keys:
            return self.checkpoint.read(self.keys[slot])
        key_a, key_b, scaling = self.pairs[slot]
        (a, digest_a), (b, digest_b) = self.checkpoint.read(key_a), self.checkpoint.read(key_b)
        wide = wide_dtype(a)
        return LowRank(b.to(wide) * scaling, a.to(wide)), digest_a + digest_b

    def rank(self, slot: str) -> int | None:
        return None if slot in self.keys else self.checkpoint.tensors[self.pairs[slot][0]].shape[0]

    def has(self, slot: str) -> bool:
        return slot not in self._ignored

    def elements(self, slot: str, start: int, stop: int, theta_0: Tensor) -> Tensor:
        if slot in self.keys:
            key = self.keys[slot]
            return self.checkpoint.file(key).elements(self.checkpoint.tensors[key], start, stop)
        if slot not in self.pairs:
            return theta_0
        update, _ = self.weight(slot)
        assert isinstance(update, LowRank)
        if slot in self._transposed:
            update = LowRank(update.right.T, update.left.T)
        d_i, wide = update.shape[1], wide_dtype(theta_0)
        first, last = start // d_i, -(-stop // d_i)  # the rows that hold these elements
        rows = LowRank(update.left[first:last], update.right).product().flatten()
        return theta_0.to(wide) + rows[start - first * d_i : stop - first * d_i]

    def ignore(self, slot: str) -> None:
        self._ignored.add(slot)
        del self.slots[slot]
        self.keys.pop(slot, None)
        self.pairs.pop(slot, None)


def open_task(name: str, architecture: Architecture) -> Task:
    """A task by folder or hub name: a whole model, or a peft adapter."""
    checkpoint = Checkpoint.open(name)
    return (LoraAdapter if is_adapter(checkpoint.folder) else FullModel)(checkpoint, architecture)
