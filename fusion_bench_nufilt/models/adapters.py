"""LoRA adapters as task models: their targets, and what else they change, by param."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fusion_bench_nufilt.models.targets import matches
from fusion_bench_nufilt.utils.tensors import digest

from .architecture import Architecture
from .checkpoint import Checkpoint, is_adapter
from .experts import find_experts, find_saved_experts
from .model import EMBEDDING_A, FullModel
from .source import some

PREFIX = "base_model.model."
# Options of peft that change the base's own weights or add other terms than B A.
_REFUSED = {
    "lora_bias": "lora_bias",
    "use_qalora": "QALoRA",
    "kasa_config": "KaSA, which truncates the base",
}
# Options with which an adapter is no change of the base's weights, so that peft can't merge it.
_NO_CHANGE_OF_WEIGHTS = {
    "arrow_config": "Arrow, which mixes several adapters by the input",
    "layer_replication": "layer_replication, which adds layers",
    "alora_invocation_tokens": "activated LoRA, which acts on some tokens only",
}
# peft also writes what the wrapper of a module in modules_to_save holds, if embeddings are saved.
_SAVED, _ORIGINAL = ".modules_to_save.", ".original_module."
# Kinds of adapters that add to the input or choose among adapters, which peft can't merge either.
_WITHOUT_WEIGHTS = (
    "PROMPT_TUNING",
    "MULTITASK_PROMPT_TUNING",
    "P_TUNING",
    "PREFIX_TUNING",
    "ADAPTION_PROMPT",
    "CPT",
    "POLY",
    "XLORA",
)
_WITH_PEFT = "with peft (merge_and_unload), and give that folder"
_SAVE_AGAIN = "save it again from the model that was trained"
COPY_HEAD = (
    "copy the embedding of its base into the head, and save that with tie_word_embeddings=False"
)
_TOKENS = ".token_adapter.trainable_tokens_delta"
# In a model, names have that of the adapter, without which peft saves it; in a file with another
# name than 'default', peft passes over them and merges nothing.
_NAMED = re.compile(r"\.lora_[AB]\.(\w+)\.weight$")
_REFUSED_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


class LoraAdapter(FullModel):
    r"""A peft LoRA adapter: :math:`\theta_t = \theta_0 + s\,B A` for its targets, full tensors for
    `modules_to_save`.

    Other kinds of adapters are refused. What an adapter neither changes nor brings is as in the
    base.
    """

    def __init__(self, checkpoint: Checkpoint, architecture: Architecture) -> None:
        self.config: Mapping[str, Any] = checkpoint.adapter_config
        name = checkpoint.name
        kind = self.config.get("peft_type")
        if kind in _WITHOUT_WEIGHTS:
            raise ValueError(
                f"adapter '{name}' is of type {kind}: only LORA can be merged, and it changes no "
                "weights"
            )
        if kind != "LORA":
            raise ValueError(
                f"adapter '{name}' is of type {kind}: only LORA can be merged; "
                f"{with_peft(checkpoint, architecture)}"
            )
        for option, what in _NO_CHANGE_OF_WEIGHTS.items():
            if self.config.get(option):
                raise ValueError(f"adapter '{name}' uses {what}: it can't be merged")
        for key in checkpoint.tensors if self.config.get("lora_bias") else ():
            module, of_b, _ = key.removeprefix(PREFIX).partition(".lora_B.bias")
            if of_b and not architecture.rows(architecture.param(f"{module}.bias")):
                raise ValueError(
                    f"adapter '{name}' uses lora_bias, and '{module}' of the base has no bias: it "
                    "can't be merged"
                )
        for option, what in _REFUSED.items():
            if self.config.get(option):
                raise ValueError(
                    f"adapter '{name}' uses {what}: {with_peft(checkpoint, architecture)}"
                )
        if (start := str(self.config.get("init_lora_weights", True))).startswith(_REFUSED_INITS):
            remedy = "save it with peft's path_initial_model_for_weight_conversion"
            raise ValueError(
                f"adapter '{name}' was initialised with {start}, which changes the base as well: "
                f"{remedy}"
            )
        super().__init__(checkpoint, architecture)

    def has(self, param: str) -> bool:
        return param not in self.ignored  # what an adapter does not change is the base's

    def _find_tensors(self, architecture: Architecture) -> None:
        unknown, tensors, wrapped = [], self.source.tensors, {}
        if not tensors:
            raise ValueError(f"adapter '{self.source.name}' has no tensors: {_SAVE_AGAIN}")
        self.source.check_not_empty(tensors)
        for key, info in tensors.items():
            name = key.removeprefix(PREFIX).replace(".base_layer.bias", ".bias")  # trained biases
            if _ORIGINAL in name or (_SAVED in name and key.replace(_SAVED, ".") in tensors):
                continue  # of the base, and a second copy of what is trained
            name = name.replace(_SAVED, ".")
            module, is_a, _ = name.partition(
                EMBEDDING_A if EMBEDDING_A in name else ".lora_A.weight"
            )
            partner = re.sub(r"\.lora_(embedding_)?B(\.weight)?$", r".lora_\1A\2", key)
            if is_a and len(info.shape) == 2:
                if architecture.stacks_of(outer := module.split(".base_layer")[0]):
                    wrapped[key] = outer
                else:
                    self._add_pair(architecture.name(f"{module}.weight"), module, key)
            elif name.endswith(_TOKENS):
                self._add_tokens(architecture, name.removesuffix(_TOKENS), key)
            elif self.config.get("use_dora") and name.endswith(".lora_magnitude_vector"):
                param = architecture.name(name.removesuffix(".lora_magnitude_vector") + ".weight")
                self.magnitudes[param] = key
            elif ".base_layer." in name:
                # the base's own weight, which peft saves along with an adapted embedding or head
                continue
            elif ".lora_" not in name:
                experts = find_saved_experts(self.checkpoint, architecture, key, name)
                for param, rows in experts.items():
                    self._check_new(param, name)
                    self.saved_experts[param] = rows
                    self.keys[param], self.params[param] = key, rows.shape
                if experts:
                    continue
                param = architecture.name(name)
                self.keys[param], self.params[param] = key, info.shape
            elif partner == key:
                unknown.append(key)
            elif partner not in tensors:
                raise ValueError(f"adapter '{self.source.name}' has '{key}' and no '{partner}'")
        for key in unknown:
            named = _NAMED.search(key)
            if named:
                adapter = named[1]
                of_dora = rf"(?<=magnitude_vector)\.{adapter}\.weight$"
                remedy = self.checkpoint.stripping(rf"{of_dora}|\.{adapter}(?=\.|$)")
                raise ValueError(
                    f"adapter '{self.source.name}' was saved from a model that calls it "
                    f"'{adapter}': the name of '{key}' has '{adapter}.', without which peft saves "
                    f"it. {remedy}"
                )
        self._add_experts(architecture, wrapped)
        self._share(architecture)
        promised = {
            "use_dora": self.pairs.keys() <= self.magnitudes.keys(),
            "trainable_token_indices": self._trained,
        }
        if lost := [
            option for option, there in promised.items() if self.config.get(option) and not there
        ]:
            what = f"uses {some(lost)} and lacks tensors of it"
            raise ValueError(f"adapter '{self.source.name}' {what}: {_SAVE_AGAIN}")
        if unknown:
            raise ValueError(
                f"adapter '{self.source.name}': {some(unknown)}: no LoRA of a linear layer; "
                f"{with_peft(self.checkpoint, architecture)}"
            )

    def _share(self, architecture: Architecture) -> None:
        """Give all names of a weight what peft applies to all of them: a tensor that it saved by
        itself, such as a resized embedding, and rows that were trained in the embedding.
        """
        trained = self.config.get("modules_to_save") or ()
        for names in architecture.shared:
            for name in [name for name in names if name in self.keys]:
                alone = any(f".{name}".endswith(f".{module}.weight") for module in trained)
                if alone or (name in self._trained and name != architecture.embedding):
                    continue
                for other in set(names) - self.keys.keys() - self.pairs.keys():
                    self.keys[other], self.params[other] = self.keys[name], self.params[name]
                    if name in self._trained:
                        self._trained[other] = self._trained[name]
                        self._rows[other] = self._rows[name]

    def tell_apart(self, names: Sequence[str]) -> list[object]:
        told: list[object] = []
        for name in names:
            digests: list[object] = []
            if name in self.pairs:
                key_a, key_b, scaling = self.pairs[name]
                right, left = self.source.read(key_a)[0], self.source.read(key_b)[0]
                if key_a.endswith(EMBEDDING_A):
                    left, right = right.T, left.T
                digests += [digest(left), digest(right), scaling]
            if name in self.magnitudes:
                digests.append(self.source.read(self.magnitudes[name])[1])
            if name in self.keys:
                digests += [self.source.read(self.keys[name])[1], *self._trained.get(name, ())]
            told.append(tuple(digests))
        return told

    def _add_tokens(self, architecture: Architecture, module: str, key: str) -> None:
        """Note the rows of an embedding that the adapter trained, which replace the base's."""
        param, numbers = (
            architecture.name(f"{module}.weight"),
            self.config.get("trainable_token_indices"),
        )
        if isinstance(numbers, dict):
            numbers = next(
                (numbers[name] for name in numbers if f".{module}".endswith(f".{name}")), None
            )
        count, rows = self.source.tensors[key].shape[0], architecture.rows(param)
        what = f"{count} rows for the tokens {numbers} of '{param}' with {rows} rows"
        if not numbers or len(numbers) != count:
            raise ValueError(f"adapter '{self.source.name}' has {what}: {_SAVE_AGAIN}")
        if max(numbers) >= rows:
            raise ValueError(
                f"adapter '{self.source.name}' has {what}: load its base, resize its embeddings "
                f"as for the training (resize_token_embeddings), merge the adapter into that "
                f"{_WITH_PEFT}"
            )
        self._check_new(param, f"{module}{_TOKENS}")
        self._trained[param] = {number: place for place, number in enumerate(numbers)}
        self.keys[param], self.params[param] = key, self.source.tensors[key].shape
        self.show_rows(param, range(rows))

    def _add_pair(self, param: str, module: str, key_a: str) -> None:
        """Note the factors A ``(rank, d_i)`` and B ``(d_o, rank)`` of a layer's update, and their
        scaling.
        """
        name, tensors = self.source.name, self.source.tensors
        key_b, transposed = (
            re.sub(r"\.lora_(embedding_)?A", r".lora_\1B", key_a),
            key_a.endswith(EMBEDDING_A),
        )
        if key_b not in tensors:
            raise ValueError(f"adapter '{name}' has '{key_a}' and no '{key_b}'")
        targets = self.config.get("target_parameters") or ()
        parameter = any(f".{module}.weight".endswith(f".{target}") for target in targets)
        scaling = self._scaling(f"{module}.weight" if parameter else module, key_a, key_b)
        self._check_new(param, module)
        (_, d_i), (d_o, _) = tensors[key_a].shape, tensors[key_b].shape
        if self.config.get("fan_in_fan_out") and param not in self._transposed and not transposed:
            none = f"'{param}' of the base is none"
            raise ValueError(
                f"adapter '{name}' is for transposed layers (fan_in_fan_out), and {none}"
            )
        self.pairs[param] = key_a, key_b, scaling
        self.params[param] = (d_i, d_o) if transposed or param in self._transposed else (d_o, d_i)

    def _add_experts(self, architecture: Architecture, modules: Mapping[str, str]) -> None:
        """Note the factors of fused experts, by the key of A with the module that has the
        experts.
        """
        for key_a, key_b, parameter, experts in find_experts(
            self.checkpoint, architecture, modules
        ):
            count = next(iter(experts.values())).count
            scaling = self._scaling(parameter, key_a, key_b, count)
            for param, expert in experts.items():
                self._check_new(param, parameter)
                self.pairs[param], self.experts[param] = (key_a, key_b, scaling), expert
                self.params[param] = architecture.views[param].part_shape

    def _scaling(self, name: str, key_a: str, key_b: str, experts: int = 1) -> float:
        """Return what the product of two factors is multiplied by; refuse factors that do not
        belong together.

        ``name`` is that of the module or parameter to which the patterns in the config apply.
        """
        self.source.check_floats((key_a, key_b))
        shape_a, shape_b = self.source.tensors[key_a].shape, self.source.tensors[key_b].shape
        rank = shape_a[0] // experts
        expected = self._pattern("rank_pattern", name, self.config.get("r", rank))
        if len(shape_b) != 2 or not shape_a[0] == shape_b[1] == expected * experts:
            shapes = f"A is {shape_a}, B {shape_b}, and the rank in its config {expected}"
            raise ValueError(
                f"adapter '{self.source.name}', '{name}': {shapes}: they do not belong together"
            )
        alpha = self._pattern("alpha_pattern", name, self.config.get("lora_alpha", 8))
        return float(alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank))

    def _check_new(self, param: str, name: str) -> None:
        if param in {*self.pairs, *self.keys}:
            twice = f"changes '{param}' twice, as '{name}' too: {_SAVE_AGAIN}"
            raise ValueError(f"adapter '{self.source.name}' {twice}")

    def _pattern(self, field: str, module: str, default: Any) -> Any:
        """Return the value of the first expression that matches the end of a module's name, as peft
        does.
        """
        of = f"adapter '{self.source.name}', {field}"
        values = self.config.get(field) or {}
        return next(
            (values[key] for key in values if matches(rf"(.*\.)?({key})", module, of=of)), default
        )


def with_peft(adapter: Checkpoint, architecture: Architecture) -> str:
    """Return the end of a message about an adapter that only peft can merge.

    Into a weight that several modules share, peft adds the updates of all of them.
    """
    for names in architecture.shared:
        for module in [name.rpartition(".")[0] for name in names]:
            if any(f".{module}." in f".{key}" for key in adapter.tensors):
                return f"{COPY_HEAD}, merge it into that {_WITH_PEFT}"
    return f"merge it into its base {_WITH_PEFT}"


def open_task(name: str, architecture: Architecture, strength: float) -> FullModel:
    checkpoint = Checkpoint.open(name)
    task = (LoraAdapter if is_adapter(checkpoint.folder) else FullModel)(checkpoint, architecture)
    task.strength = strength
    return task
