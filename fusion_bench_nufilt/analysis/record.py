"""Second moments of the inputs of a model's layers, recorded while it runs and kept in safetensors files."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import TypedDict

from fusion_bench_nufilt.storage.files import atomic_file, write_text
from fusion_bench_nufilt.storage.json_files import Count, read_json
from fusion_bench_nufilt.storage.tensors import TensorFile

from .moments import RunningMoment

log = logging.getLogger(__name__)

#: Bytes for each element of a moment: its float64 sum, and the mean that is written when it is done.
_BYTES = 8 + 4


class Recorded(TypedDict):
    """What ``about.json`` says of the moments beside it."""

    about: dict[str, Any]  # what they depend on
    owner: dict[str, str]  # for every layer the one whose moment it shares
    files: dict[str, str]  # for every owner the file that has its moment
    tokens: Count


class MomentFile:
    """The moments of one task, read from disk one at a time.

    Args:
        folder: a folder that :func:`record_moments` wrote.
        content: what its ``about.json`` says.

    Raises:
        ValueError: a file is damaged or lacks a moment; names it.
    """

    def __init__(self, folder: Path, content: Recorded) -> None:
        self.about, self.tokens, self._owner = content["about"], content["tokens"], content["owner"]
        files = {name: TensorFile(folder / Path(name).name) for name in set(content["files"].values())}
        self._files = {owner: files[name] for owner, name in content["files"].items()}
        for owner in self._owner.values():
            if owner not in self._files or owner not in self._files[owner].tensors:
                raise ValueError(f"'{folder / 'about.json'}' is damaged: no file beside it has the moment of '{owner}'")

    def owner(self, layer: str) -> str:
        """The first layer with the same inputs, such as the query projection for the key and value projections."""
        return self._owner[layer]

    def read(self, layer: str) -> Tensor:
        """C, ``(d_i, d_i)``, float32."""
        file = self._files[self._owner[layer]]
        return file.read(file.tensors[self._owner[layer]])


def known_moments(folder: Path, about: Mapping[str, Any]) -> MomentFile | None:
    """What was recorded earlier, if it is whole and was for the same model, data and layers."""
    try:
        content = read_json(folder / "about.json", Recorded, advice="its moments can be recorded again")
        if content is None or content["about"] != json.loads(json.dumps(about)):
            return None
        return MomentFile(folder, content)
    except ValueError as error:
        log.warning("%s; recording again", error)
        return None


@torch.no_grad()
def record_moments(
    model: nn.Module,
    run: Callable[[], Iterable[Any]],
    owner: Mapping[str, str],
    folder: Path,
    about: Mapping[str, Any],
    max_memory: int,
) -> MomentFile:
    """Run a model on a task's data and keep the second moments of what its layers get.

    Args:
        model: whose layers are watched.
        run: iterates over the data, giving it to the model; called once, or once for each group of layers where all
            moments together would take more than ``max_memory``.
        owner: for every layer the one whose moment it shares, see :func:`shared_inputs`.
        folder: where to.
        about: what the moments depend on.
        max_memory: bytes that moments may take while they are recorded; each group goes to disk before the next.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "about.json").unlink(missing_ok=True)
    files: dict[str, str] = {}
    for number, group in enumerate(_groups(model, sorted(set(owner.values())), max_memory)):
        moments = {name: RunningMoment(_width(model, name)) for name in group}
        with _watching(model, group, lambda name, X, into=moments: into[name].add(X)):  # type: ignore[misc]
            for _ in run():
                pass
        file = f"moments-{number}.safetensors"
        with atomic_file(folder / file) as temporary:
            save_file({name: moment.mean.float() for name, moment in moments.items()}, temporary)
        files |= dict.fromkeys(group, file)
        tokens = max(moment.count for moment in moments.values())
    content: Recorded = {"about": dict(about), "owner": dict(owner), "files": files, "tokens": tokens}
    write_text(folder / "about.json", json.dumps(content))
    return MomentFile(folder, content)


@torch.no_grad()
def shared_inputs(model: nn.Module, names: Sequence[str], run: Callable[[], Any]) -> dict[str, str]:
    """For each layer the first one that gets the very same tensor.

    Args:
        model: whose layers are watched.
        names: of linear layers.
        run: gives the model a little data.

    Raises:
        ValueError: a layer gets no input at all; names it.
    """
    seen: list[tuple[Tensor, str]] = []  # held, so that no two have the same address in turn
    owner: dict[str, str] = {}

    def look(name: str, X: Tensor) -> None:
        first = next((other for tensor, other in seen if tensor is X), name)
        seen.append((X, name))
        owner.setdefault(name, first)

    with _watching(model, names, look, rows=False):
        run()
    if lost := [name for name in names if name not in owner]:
        raise ValueError(f"{len(lost)} layers get no input from the task's data, '{lost[0]}' first")
    return owner


def memory_of(model: nn.Module, owner: Mapping[str, str]) -> int:
    """Bytes that recording takes if all layers are recorded at once, beside the model."""
    return sum(_bytes(model, name) for name in set(owner.values()))


@contextmanager
def watching_outputs(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """A dictionary that holds, after each forward pass, what the layers gave: ``(rows, d_o)``, padding left out."""
    outputs: dict[str, Tensor] = {}
    with _padding(model) as mask, ExitStack() as stack:
        for name in names:

            def keep(module: nn.Module, inputs: Any, output: Tensor, name: str = name) -> None:
                outputs[name] = _rows(output, mask)

            stack.callback(model.get_submodule(name).register_forward_hook(keep).remove)
        yield outputs


@contextmanager
def _watching(
    model: nn.Module, names: Iterable[str], see: Callable[[str, Tensor], None], *, rows: bool = True
) -> Iterator[None]:
    with _padding(model) as mask, ExitStack() as stack:
        for name in names:

            def look(module: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
                see(name, _rows(inputs[0], mask).cpu() if rows else inputs[0])

            stack.callback(model.get_submodule(name).register_forward_pre_hook(look).remove)
        yield


@contextmanager
def _padding(model: nn.Module) -> Iterator[list[Tensor | None]]:
    """Holds the ``attention_mask`` of the transformer that is running, as given: 1 for a token, 0 for padding."""
    mask: list[Tensor | None] = [None]

    def note(module: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
        if "attention_mask" in named:
            given = named["attention_mask"]
            mask[0] = given if isinstance(given, Tensor) and given.dim() == 2 else None

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                stack.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield mask


def _rows(X: Tensor, mask: list[Tensor | None]) -> Tensor:
    """``(rows, d)`` of ``(..., d)``, without padding."""
    if mask[0] is not None and mask[0].shape == X.shape[:-1]:
        return X[mask[0].bool()]
    return X.flatten(0, -2)


def _groups(model: nn.Module, names: Sequence[str], max_memory: int) -> Iterator[list[str]]:
    group: list[str] = []
    used = 0
    for name in names:
        if group and used + _bytes(model, name) > max_memory:
            yield group
            group, used = [], 0
        group.append(name)
        used += _bytes(model, name)
    yield group


def _bytes(model: nn.Module, name: str) -> int:
    return _BYTES * _width(model, name) ** 2


def _width(model: nn.Module, name: str) -> int:
    """d_i of a linear layer; transformers' Conv1D stores its weight transposed."""
    module = model.get_submodule(name)
    width: int = module.in_features if isinstance(module, nn.Linear) else module.get_parameter("weight").shape[0]
    return width
