"""The plan of a merge: what is merged of a base, the models, and where the files of the result have
its tensors.

A plan is made in :mod:`.planning` and for each step of a run. It is data: what carries it out reads
it, and changes nothing.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from safetensors.torch import save

from fusion_bench_nufilt.methods.base import LayerMethod
from fusion_bench_nufilt.models.checkpoint import INDEX, Checkpoint
from fusion_bench_nufilt.models.door import Models
from fusion_bench_nufilt.models.quantised import DESCRIPTIONS
from fusion_bench_nufilt.models.selection import Selection
from fusion_bench_nufilt.models.source import split_rows
from fusion_bench_nufilt.utils.files import Input
from fusion_bench_nufilt.utils.manifest import (
    combined_digest,
    package_versions,
    read_heads,
    tasks_of,
)
from fusion_bench_nufilt.utils.options import recorded_options
from fusion_bench_nufilt.utils.tensors import (
    FLOATS,
    TensorInfo,
    make_header,
    read_header,
    read_metadata,
)

Files = dict[str, dict[str, TensorInfo]]
"""The tensors in each file, by key; their places in it are in the file's header alone."""

#: As safetensors names the dtypes of the option ``dtype``.
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_CONFIG = "config.json"


class FactorKeys(NamedTuple):
    """The keys of A and B by which an adapter changes a tensor."""

    a: str
    b: str
    of_embedding: bool  # of which they are the factors of the transpose


@dataclass(frozen=True)
class SavedTensor:
    """What an adapter holds in full of a tensor outside the merged layers, once for each of the
    names that it is tied to.
    """

    keys: tuple[str, ...]
    tokens: tuple[int, ...] | None = None  # whose rows these are, of an embedding; else all of it


@dataclass(frozen=True, kw_only=True)
class Plan(Models):
    """A merge whose models have passed all checks that need no more than headers and samples.

    It is made once and does not change. What is found later, such as warnings of downloaded weights
    and the strengths of tasks, is handed on beside it.
    """

    method: LayerMethod
    #: All files of the result but weights, card and manifest, by path.
    small_files: dict[str, bytes] = field(default_factory=dict)
    files: Files = field(default_factory=dict)  # the tensors in each file of the result
    #: Of an adapter, the keys of each tensor that it changes by factors, by param; one that is tied
    #: is there under each of its names.
    adapter_keys: dict[str, list[FactorKeys]] = field(default_factory=dict)
    #: Of an adapter, what it holds in full, by param.
    saved_tensors: dict[str, SavedTensor] = field(default_factory=dict)

    @property
    def mean_counts(self) -> dict[str, int]:
        """The number of models in the mean of each tensor after this merge, by param.

        One that is not listed counts every step.
        """
        means = self.averaged_at(1)
        # What an earlier merge averaged and this one leaves as it is has as many models as before.
        earlier_means = self.merged_manifest.get("mean_counts", {})
        counts = {}
        for param in self.other_keys:
            if param in means or param in earlier_means:
                counts[param] = self.models_in_mean(param) + len(self.joining(param))
        return counts

    @cached_property
    def headers(self) -> dict[str, bytes]:
        """The header of each file of the result, once the base is on this disk."""
        changed = self.mean_counts
        kept: set[str] = set()
        for param, keys in self.other_keys.items():
            if param not in changed:
                kept.update(keys)
        headers = {}
        for file, tensors in self.files.items():
            of_base = self.pretrained.checkpoint.opened.get(file)
            if of_base is None:
                headers[file] = make_header(tensors)
            elif tensors.keys() <= kept and _shapes(of_base.tensors) == _shapes(tensors):
                # Byte for byte, so that the whole file is the base's.
                headers[file] = of_base.header
            else:
                headers[file] = make_header(tensors, read_metadata(of_base.header))
        return headers

    @cached_property
    def places(self) -> dict[str, TensorInfo]:
        """Where the result has each tensor, by its key in the base or in the state."""
        places: dict[str, TensorInfo] = {}
        for file, header in self.headers.items():
            places |= read_header(file, header)
        return split_rows(places, self.pretrained.checkpoint.row_ranges)

    @property
    def disk_bytes(self) -> int:
        """The bytes of all weight files while the result is made."""
        total = 0
        for task in self.tasks:
            for entry in task.head.values():
                total += task.source.tensors[entry.key].nbytes
        for tensors in self.files.values():
            for info in tensors.values():
                total += info.nbytes
        return total

    @property
    def names(self) -> list[str]:
        """The names of all tasks in the result, in merging order."""
        labels = [task.source.label for task in self.tasks]
        return [*self.merged_manifest.get("tasks", []), *labels]

    @property
    def task_inputs(self) -> list[Input]:
        """What all tasks in the result are known by, in merging order."""
        inputs = self.inputs
        own_inputs = [inputs[f"task {number}"] for number in range(len(self.tasks))]
        return [*tasks_of(self.merged_manifest), *own_inputs]

    @property
    def last_step(self) -> int:
        return self.first_step + len(self.tasks) - 1

    @property
    def keeps_state(self) -> bool:
        """Whether the result has what the next merge needs beside its model."""
        if self.settings.state is None:
            return self.method.keeps_sums
        return self.settings.state

    def rounds(self, key: str) -> bool:
        """Return whether the result has a tensor of the base in fewer digits than float32."""
        return is_rounded(as_written(self.base.tensors[key], self.settings.dtype))

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor between tasks: the wider one of the base's and the
        result's.
        """
        if self.is_adapter:
            return torch.float32
        info = self.base.tensors[key]
        written = as_written(info, self.settings.dtype)
        # A float32 result of a bfloat16 base must not be rounded after each of its tasks.
        return torch.promote_types(FLOATS[info.dtype], FLOATS[written.dtype])

    def head_files(self) -> dict[str, bytes]:
        """Return the files of all heads by path in the result; those of earlier tasks come from the
        merged model.
        """
        files = self.new_heads()
        if self.merged is not None and self.merged_manifest.get("heads"):
            folder = self.merged.checkpoint.folder_with("heads/*")
            files |= read_heads(folder, self.merged_manifest)
        return files

    def new_heads(self) -> dict[str, bytes]:
        """Return the files of the heads of this merge's own tasks by path in the result."""
        earlier_heads = self.merged_manifest.get("heads", {})
        names = [head["file"] for task, head in self.heads.items() if task not in earlier_heads]
        tasks = [task for task in self.tasks if task.head]
        return {name: save(task.head_tensors()) for name, task in zip(names, tasks, strict=True)}

    def options(self) -> dict[str, Any]:
        """Return the options that the result records, by name, the method's included."""
        options = recorded_options(self.method.options, self.targets, self.settings)
        return {"method": self.method.name, **options}

    @property
    def description(self) -> dict[str, Any]:
        """All that the result depends on, as its manifest and the journal have it."""
        digests = {}
        for name, content in self.small_files.items():
            digests[name] = hashlib.sha256(content).hexdigest()
        description = {
            "step": self.last_step,
            "tasks": self.names,
            "inputs": self.inputs,
            "settings": self.options(),
            # The kind alone: two GPUs give the same bits, and a CPU gives others.
            "device": self.settings.devices[0].type,
            "heads": self.heads,
            "earlier_heads": self._digests_of_earlier_heads(),
            "mean_counts": self._other_mean_counts(),
            "vocabulary": self.vocabulary.as_dict(),
            "small_files": digests,
            "versions": package_versions(),
        }
        return dict(json.loads(json.dumps(description)))  # as it will be read

    def _digests_of_earlier_heads(self) -> dict[str, str]:
        """Return the digests of the files of the heads that come from the merged model."""
        files = self.merged_manifest.get("files", {})
        digests = {}
        for head in self.merged_manifest.get("heads", {}).values():
            if head["file"] in files:
                digests[head["file"]] = combined_digest(files[head["file"]].items())
        return digests

    def _other_mean_counts(self) -> dict[str, int]:
        """Return the number of models in the mean of each tensor where that is not the number of
        steps, as it is of most.
        """
        counts = {}
        for param, count in self.mean_counts.items():
            if count != self.last_step:
                counts[param] = count
        return counts


def method_of(
    kind: type[LayerMethod], options: Any, seed: int, selection: Selection
) -> LayerMethod:
    """Return the method that merges the selected layers of a model."""
    shapes = {layer.name: layer.view.shape for layer in selection.layers}
    return kind(options, list(shapes), seed, selection.architecture.last_blocks, shapes)


def arrange_files(plan: Plan) -> Files:
    """Arrange the tensors of the result in the base's files."""
    base = plan.pretrained.checkpoint
    tensors = {key: as_written(info, plan.settings.dtype) for key, info in base.whole.items()}
    keys_by_param = dict(plan.other_keys)
    for layer in plan.layers:
        keys_by_param[layer.param] = layer.keys
    for param in plan.vocabulary.grown:
        for key in keys_by_param[param]:
            tensors[key] = tensors[key].rows(0, plan.vocabulary.rows)
    return _by_file(tensors)


def _by_file(tensors: Mapping[str, TensorInfo]) -> Files:
    files: Files = {}
    for key, info in tensors.items():
        files.setdefault(info.file, {})[key] = info
    return files


def small_files_of(
    small: Mapping[str, bytes], base: Checkpoint, files: Files, dtype: str, untied: bool
) -> dict[str, bytes]:
    """Return the base's small files for the result, with config.json and the index changed where
    they must be, and without those that describe a quantisation, which the result does not have.

    ``untied`` says that the result has a head of its own where the base's config ties it.
    """
    result = {file: small[file] for file in small if file not in DESCRIPTIONS}
    if _CONFIG in result:
        of_base = json.loads(result[_CONFIG])
        config = _edited(of_base, dtype, untied)
        if untied:
            # Also where the base's config is silent, since many classes tie by default. In a larger
            # model, transformers 4 asks the part of the language model.
            for part in (config, config.get("text_config")):
                if isinstance(part, dict):
                    part["tie_word_embeddings"] = False
        if config != of_base:
            result[_CONFIG] = _json_file(config)
    # A copy is how the base presents one weight as two; its files and index lack it.
    stored = {key: info for key, info in base.whole.items() if key not in base.copies}
    if files != _by_file(stored):
        # The base's would send a loader to files that the result does not have.
        result.pop(INDEX, None)
        if len(files) > 1:
            result[INDEX] = _index(files)
    return result


def _edited(config: Any, dtype: str, untied: bool) -> Any:
    """Return a part of config.json with the dtype of the result, without what it ties if it is
    ``untied``, and without the base's quantisation, which the result does not have.
    """
    if not isinstance(config, dict):
        return config
    edited = {}
    for key, value in config.items():
        if key in ("quantization_config", "compression_config"):
            continue
        # Parts of a composite model, such as text_config, have a dtype of their own.
        edited[key] = _edited(value, dtype, untied)
        # transformers 4 writes the one, transformers 5 the other.
        if key in ("torch_dtype", "dtype") and isinstance(value, str) and dtype in DTYPES:
            edited[key] = dtype
        if key == "tie_word_embeddings" and untied:
            edited[key] = False
    return edited


def _index(files: Files) -> bytes:
    """Return the index of files of weights, which says where each tensor is."""
    total_size = 0
    weight_map = {}
    for file, tensors in files.items():
        for key, info in tensors.items():
            total_size += info.nbytes
            weight_map[key] = file
    return _json_file({"metadata": {"total_size": total_size}, "weight_map": weight_map})


def _json_file(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _shapes(tensors: Mapping[str, TensorInfo]) -> dict[str, object]:
    return {key: (info.dtype, info.shape) for key, info in tensors.items()}


def as_written(info: TensorInfo, dtype: str) -> TensorInfo:
    """Return a tensor of the base as the result has it with the option ``dtype``."""
    if info.dtype not in FLOATS:
        return info
    # No merge can quantise again: scales may come from data, which only a quantiser has.
    if info.is_quantised:
        return info.with_dtype(DTYPES.get(dtype, "BF16"))
    name = DTYPES.get(dtype, info.dtype)
    if name == info.dtype:
        return info
    return info.with_dtype(name)


def is_rounded(info: TensorInfo) -> bool:
    """Return whether a tensor is stored in fewer digits than float32."""
    return info.is_quantised or FLOATS[info.dtype].itemsize < 4
