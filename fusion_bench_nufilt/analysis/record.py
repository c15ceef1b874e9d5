"""Draw samples from a FusionBench task pool, and record second moments of a model's layer inputs on
them.
"""

import inspect
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import NonNegativeInt
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from transformers import PreTrainedModel
from typing_extensions import TypedDict

from fusion_bench_nufilt.continual.evaluation import test_loader
from fusion_bench_nufilt.nufilt.eigenvectors import gram_matrix
from fusion_bench_nufilt.utils.files import Fingerprint
from fusion_bench_nufilt.utils.finished import FinishedFolder, OtherWorkError
from fusion_bench_nufilt.utils.manifest import Difference, differences
from fusion_bench_nufilt.utils.tensors import TensorFile, to_compute_dtype

log = logging.getLogger(__name__)

Loader = DataLoader[Any]
_ABOUT = "about.json"


def task_inputs(taskpool: Any, task: str, samples: int, seed: int) -> Loader:
    """Draw samples of a task's test set, all if it has fewer, in batches like those of the pool's
    loader.

    The pool is one of FusionBench's for CLIP vision or Flan-T5 (0.1 pools), or any with
    ``get_test_dataloader(task)``.
    """
    loader = test_loader(taskpool, task)
    dataset = loader.dataset
    if samples < len(dataset):
        dataset = Subset(dataset, sorted(random.Random(seed).sample(range(len(dataset)), samples)))
    return DataLoader(dataset, batch_size=loader.batch_size or 1, collate_fn=loader.collate_fn)


@torch.no_grad()
def forward(model: nn.Module, batch: Any) -> None:
    """Run a model on a batch: a mapping with its arguments, or a sequence that begins with the
    input.
    """
    device = next(model.parameters()).device
    model.eval()
    if not hasattr(batch, "keys"):
        model(batch[0].to(device))
        return
    parameters = inspect.signature(model.forward).parameters
    arguments = {}
    for key in batch:
        if key in parameters and isinstance(batch[key], Tensor):
            arguments[key] = batch[key].to(device)
    model(**arguments)


@contextmanager
def watched_layers(
    model: nn.Module, names: Sequence[str], receive: Callable[[str, Tensor], None]
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Call ``receive`` with the name and the input of each named layer whenever the model runs.

    Yields a function from an input ``(..., d_i)`` to its rows ``(n, d_i)`` that are not padding, by
    the ``attention_mask`` of the transformer that is running; a model may hold several.
    """
    mask: Tensor | None = None  # 1 for a token, 0 for padding

    def note_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal mask
        mask = kwargs.get("attention_mask", mask)
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            mask = None

    def pass_on(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        receive(name, args[0])

    def tokens(X: Tensor) -> Tensor:
        # Padding would count as inputs. A tower beside the one that is masked has other shapes.
        if mask is not None and mask.shape == X.shape[:-1]:
            return X[mask.bool()]
        return X.flatten(0, -2)

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                stack.callback(module.register_forward_pre_hook(note_mask, with_kwargs=True).remove)
        for name in names:
            module = model.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(partial(pass_on, name)).remove)
        yield tokens


class Recorded(TypedDict):
    """The content of ``about.json``, which describes the moments beside it."""

    about: dict[str, Any]  # what they depend on
    owner: dict[str, str]  # for each layer, the layer whose moment it shares
    tokens: NonNegativeInt
    files: dict[str, Fingerprint]


class Moments:
    """The second moments of one task in some files of a folder, read one at a time; a ValueError
    names a damaged file.
    """

    def __init__(
        self, folder: Path, files: Iterable[str], owner: Mapping[str, str], tokens: int
    ) -> None:
        self.tokens = tokens
        self._owner = owner
        self._files: dict[str, TensorFile] = {}
        for name in files:
            file = TensorFile(folder / name)
            self._files |= dict.fromkeys(file.tensors, file)
        for layer in owner.values():
            if layer not in self._files:
                raise ValueError(
                    f"'{folder / _ABOUT}' is damaged: no file beside it has the moment of '{layer}'"
                )

    def read(self, layer: str) -> Tensor:
        """Return C, ``(d_i, d_i)``, float32."""
        owner = self._owner[layer]
        file = self._files[owner]
        return file.read(file.tensors[owner])


def _about_differences(recorded: Recorded, about: Mapping[str, Any]) -> list[Difference]:
    return differences(recorded["about"], about)


def _record_in(folder: Path) -> FinishedFolder[Recorded]:
    advice = "its moments can be recorded again"
    return FinishedFolder(folder / _ABOUT, Recorded, advice, _about_differences)


def known_moments(folder: Path, about: Mapping[str, Any]) -> Moments | None:
    """Return earlier records if they are complete and of the same model, data and layers."""
    try:
        recorded = _record_in(folder).take(about)
        if recorded is None:
            return None
        return Moments(folder, recorded["files"], recorded["owner"], recorded["tokens"])
    except OtherWorkError as error:
        log.info("'%s': %s; recording again", folder, error)
    except ValueError as error:
        log.warning("%s; recording again", error)
    return None


@torch.no_grad()
def record_moments(
    model: nn.Module,
    inputs: Loader,
    owner: Mapping[str, str],
    folder: Path,
    about: Mapping[str, Any],
    max_memory: int,
) -> Moments:
    """Run a model on a task's samples, and save the second moments of its layers' inputs in a
    folder.

    The samples are run once for each group of layers whose moments fit into ``max_memory`` bytes.
    ``owner`` has the layer whose moment each layer shares.
    """
    content: dict[str, Any] = {"about": dict(about), "owner": dict(owner)}
    owners = sorted(set(owner.values()))
    files = []
    with _record_in(folder).keep(content) as draft:
        for number, group in enumerate(_groups(model, owners, max_memory)):
            moments, content["tokens"] = _run_and_sum(model, inputs, group)
            files.append(f"moments-{number}.safetensors")
            save_file(moments, draft / files[-1])
    return Moments(folder, files, owner, content["tokens"])


def _run_and_sum(
    model: nn.Module, inputs: Loader, layers: Sequence[str]
) -> tuple[dict[str, Tensor], int]:
    """Run the model on the samples; return C, float32, of the layers' inputs, and the number of
    tokens.
    """
    cpu = torch.device("cpu")
    sums = {}
    for name in layers:
        width = _width(model, name)
        sums[name] = torch.zeros(width, width, dtype=torch.float64, device=cpu)
    counts = dict.fromkeys(layers, 0)

    def add(name: str, X: Tensor) -> None:
        rows = to_compute_dtype(tokens(X).cpu())
        sums[name] += gram_matrix(rows)
        counts[name] += len(rows)

    with watched_layers(model, layers, add) as tokens:
        for batch in inputs:
            forward(model, batch)
    moments = {}
    for name, total in sums.items():
        moments[name] = (total / max(counts[name], 1)).float()
    return moments, max(counts.values())


def shared_inputs(model: nn.Module, names: Sequence[str], inputs: Loader) -> dict[str, str]:
    """Return, for each linear layer, the first one whose input is the same tensor when the model
    runs on a sample.
    """
    # By the address of an input, which no other has while the tensor is held.
    first: dict[int, tuple[str, Tensor]] = {}
    owner: dict[str, str] = {}

    def receive(name: str, X: Tensor) -> None:
        first.setdefault(id(X), (name, X))
        owner.setdefault(name, first[id(X)][0])

    with watched_layers(model, names, receive):
        forward(model, inputs.collate_fn([inputs.dataset[0]]))
    unused = [name for name in names if name not in owner]
    if unused:
        raise ValueError(
            f"{len(unused)} layers get no input from the task's data, '{unused[0]}' first"
        )
    return owner


def memory_of(model: nn.Module, layers: Iterable[str]) -> int:
    """Return the bytes that recording the moments of some layers takes: float64 sums and float32
    means.
    """
    return sum((8 + 4) * _width(model, name) ** 2 for name in set(layers))


def _groups(model: nn.Module, names: Sequence[str], max_memory: int) -> Iterator[list[str]]:
    """Split the layers into groups whose moments fit into memory, of one layer at least."""
    group: list[str] = []
    for name in names:
        if group and memory_of(model, [*group, name]) > max_memory:
            yield group
            group = []
        group.append(name)
    yield group


def _width(model: nn.Module, name: str) -> int:
    """Return d_i of a linear layer; transformers' Conv1D stores its weight transposed."""
    module = model.get_submodule(name)
    shape = module.get_parameter("weight").shape
    if isinstance(module, nn.Linear):
        return shape[1]
    return shape[0]
