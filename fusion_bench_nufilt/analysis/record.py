"""Records the second moments of the inputs of a model's layers, and keeps them in safetensors files."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import NonNegativeInt
from safetensors.torch import save_file
from torch import Tensor, nn
from typing_extensions import TypedDict

from fusion_bench_nufilt.core.subspace import gram_matrix
from fusion_bench_nufilt.core.weights import widened
from fusion_bench_nufilt.storage.files import atomic_file, write_text
from fusion_bench_nufilt.storage.json_files import read_json
from fusion_bench_nufilt.storage.tensors import TensorFile

from .inputs import Loader, forward, watched_layers

log = logging.getLogger(__name__)


class Recorded(TypedDict):
    """What ``about.json`` says of the moments beside it."""

    about: dict[str, Any]  # what they depend on
    owner: dict[str, str]  # for each layer the layer whose moment it shares
    files: dict[str, str]  # for each owner the file that has its moment
    tokens: NonNegativeInt


class Moments:
    """The second moments of one task in a folder, read one at a time.

    Raises:
        ValueError: a file is damaged or lacks a moment; names it.
    """

    def __init__(self, folder: Path, content: Recorded) -> None:
        self.tokens, self._owner = content["tokens"], content["owner"]
        files = {name: TensorFile(folder / Path(name).name) for name in set(content["files"].values())}
        self._files = {owner: files[name] for owner, name in content["files"].items()}
        for owner in self._owner.values():
            if owner not in self._files or owner not in self._files[owner].tensors:
                raise ValueError(f"'{folder / 'about.json'}' is damaged: no file beside it has the moment of '{owner}'")

    def read(self, layer: str) -> Tensor:
        """Return C, ``(d_i, d_i)``, float32."""
        owner = self._owner[layer]
        return self._files[owner].read(self._files[owner].tensors[owner])


def known_moments(folder: Path, about: Mapping[str, Any]) -> Moments | None:
    """Return what was recorded earlier, if it is whole and was for the same model, data and layers."""
    try:
        content = read_json(folder / "about.json", Recorded, advice="its moments can be recorded again")
        if content is None or content["about"] != json.loads(json.dumps(about)):
            return None
        return Moments(folder, content)
    except ValueError as error:
        log.warning("%s; recording again", error)
        return None


@torch.no_grad()
def record_moments(
    model: nn.Module, inputs: Loader, owner: Mapping[str, str], folder: Path, about: Mapping[str, Any], max_memory: int
) -> Moments:
    """Run a model on a task's samples and keep the second moments of what its layers get in a folder.

    The samples are run once, or once for each group of layers where all moments together would take more bytes than
    ``max_memory``; each group goes to disk before the next. ``owner`` tells whose moment each layer shares.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "about.json").unlink(missing_ok=True)
    files: dict[str, str] = {}
    for number, group in enumerate(_groups(model, sorted(set(owner.values())), max_memory)):
        moments, tokens = _run_and_sum(model, inputs, group)
        file = f"moments-{number}.safetensors"
        with atomic_file(folder / file) as temporary:
            save_file(moments, temporary)
        files |= dict.fromkeys(group, file)
    content: Recorded = {"about": dict(about), "owner": dict(owner), "files": files, "tokens": tokens}
    write_text(folder / "about.json", json.dumps(content))
    return Moments(folder, content)


def _run_and_sum(model: nn.Module, inputs: Loader, layers: Sequence[str]) -> tuple[dict[str, Tensor], int]:
    """Run the model on the samples; return C, float32, for some of its layers, and the number of tokens."""
    sums = {name: torch.zeros([_width(model, name)] * 2, dtype=torch.float64) for name in layers}
    counts = dict.fromkeys(layers, 0)

    def add(name: str, X: Tensor, _: Tensor) -> None:
        rows = widened(tokens(X).cpu())
        sums[name] += gram_matrix(rows)
        counts[name] += len(rows)

    with watched_layers(model, layers, add) as tokens:
        for batch in inputs:
            forward(model, batch)
    return {name: (total / max(counts[name], 1)).float() for name, total in sums.items()}, max(counts.values())


def shared_inputs(model: nn.Module, names: Sequence[str], inputs: Loader) -> dict[str, str]:
    """Find for each linear layer the first one that gets the very same tensor when the model runs on one sample.

    Raises:
        ValueError: a layer gets no input at all; names it.
    """
    first: dict[int, str] = {}
    held: list[Tensor] = []  # so that no two tensors have the same address in turn
    owner: dict[str, str] = {}

    def receive(name: str, X: Tensor, _: Tensor) -> None:
        held.append(X)
        owner.setdefault(name, first.setdefault(id(X), name))

    with watched_layers(model, names, receive):
        forward(model, inputs.collate_fn([inputs.dataset[0]]))
    if lost := [name for name in names if name not in owner]:
        raise ValueError(f"{len(lost)} layers get no input from the task's data, '{lost[0]}' first")
    return owner


def memory_of(model: nn.Module, owner: Mapping[str, str]) -> int:
    """Return the bytes that recording takes beside the model if all layers are recorded at once."""
    return sum(_bytes(model, name) for name in set(owner.values()))


def _groups(model: nn.Module, names: Sequence[str], max_memory: int) -> Iterator[list[str]]:
    """Split the layers into groups whose moments fit into the memory, or that are a single layer."""
    group: list[str] = []
    for name in names:
        if group and sum(_bytes(model, each) for each in (*group, name)) > max_memory:
            yield group
            group = []
        group.append(name)
    yield group


def _bytes(model: nn.Module, name: str) -> int:
    """Return what a moment takes while it is recorded: its float64 sum, and the float32 mean that is written."""
    return (8 + 4) * _width(model, name) ** 2


def _width(model: nn.Module, name: str) -> int:
    """Return d_i of a linear layer; transformers' Conv1D stores its weight transposed."""
    module = model.get_submodule(name)
    width: int = module.in_features if isinstance(module, nn.Linear) else module.get_parameter("weight").shape[0]
    return width
