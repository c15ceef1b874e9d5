"""What is done to the good inputs: each mutation takes their folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import llama

Mutation = Callable[[Path], object]
Tensors = dict[str, torch.Tensor]

INDEX = "base/model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"
STATE_OF_UP = "model.layers.1.mlp.up_proj.state.weight"
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


def nothing(folder: Path) -> None:
    """Change no file, for bad options."""


def in_json(file: str, **fields: object) -> Mutation:
    """Set fields of a JSON file; ``...`` removes one."""

    def mutate(folder: Path) -> None:
        content = {**json.loads((folder / file).read_text()), **fields}
        (folder / file).write_text(
            json.dumps({key: value for key, value in content.items() if value is not ...})
        )

    return mutate


def in_index(file: str | None, tensor: str = UP) -> Mutation:
    """Have the index say that a tensor lies in a file; None is a file that is there."""

    def mutate(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][tensor] = index["weight_map"][UP] if file is None else file
        (folder / INDEX).write_text(json.dumps(index))

    return mutate


def rewrite(model: str, edit: Callable[[Tensors], Tensors]) -> Mutation:
    """Store other tensors in every file of a model."""

    def mutate(folder: Path) -> None:
        for path in (folder / model).glob("*.safetensors"):
            save_file(edit(load_file(path)), path, metadata={"format": "pt"})
        if model == "base":  # the index would tell
            there = {
                key: path.name
                for path in (folder / "base").glob("*.safetensors")
                for key in load_file(path)
            }
            in_json(INDEX, weight_map=there)(folder)

    return mutate


def change(
    model: str, key: str, function: Callable[[torch.Tensor], torch.Tensor | None]
) -> Mutation:
    """Put another tensor in place of one, or none."""

    def edit(state: Tensors) -> Tensors:
        new = function(state[key]) if key in state else None
        return {k: w for k, w in state.items() if k != key} | ({} if new is None else {key: new})

    return rewrite(model, edit)


def rename(model: str, key: str, name: str) -> Mutation:
    return rewrite(model, lambda state: {name if k == key else k: w for k, w in state.items()})


def half(mutation: Mutation) -> Mutation:
    """Store all models in float16 before they are changed."""

    def mutate(folder: Path) -> None:
        for path in folder.glob("*/*.safetensors"):
            save_file(
                {key: w.half() for key, w in load_file(path).items()},
                path,
                metadata={"format": "pt"},
            )
        mutation(folder)

    return mutate


def another_base(folder: Path) -> None:
    """Put a model in place of task2 that was not made from the base."""
    llama(seed=9).save_pretrained(folder / "task2")


def state_of(dtype: torch.dtype | None) -> Mutation:
    """Float32 layers beside the merged model that are of another kind, or a row short."""

    def mutate(folder: Path) -> None:
        weight = load_file(single(folder / "task1"))[UP]
        path = folder / "one" / "nufilt_state"
        path.mkdir()
        save_file(
            {STATE_OF_UP: weight[1:].contiguous() if dtype is None else weight.to(dtype)},
            path / "model.safetensors",
        )

    return mutate


def shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def twice(folder: Path) -> None:
    """Put the tensors of the base's last shard into its first one, too."""
    both = {
        **load_file(shard(folder / "base")),
        **load_file(max((folder / "base").glob("*.safetensors"))),
    }
    save_file(both, shard(folder / "base"), metadata={"format": "pt"})


def single(folder: Path) -> Path:
    return folder / "model.safetensors"


def overwrite(path: Path, head: bytes) -> None:
    with path.open("r+b") as file:
        file.write(head)


def instead(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def link(path: Path, target: Path | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("precious")


def wider(weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(weight, (0, 1, 0, 1))


def swap(folder: Path, other: Path) -> None:
    shutil.rmtree(folder)
    other.rename(folder)
