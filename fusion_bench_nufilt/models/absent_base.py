"""The base of adapters, of which no weight is read: what its config.json and the adapters tell."""

from collections.abc import Sequence
from pathlib import Path

from fusion_bench_nufilt.utils.files import expanded, printable
from fusion_bench_nufilt.utils.tensors import TensorInfo

from .adapters import base_name_key
from .architecture import on_meta, shared_names
from .checkpoint import Checkpoint, folder_at_hand
from .peft_layers import EMBEDDING_A, place_of

_CONFIG = "config.json"


class AbsentBase(Checkpoint):
    """A base of which names and shapes alone are known, and no weight is read.

    They are those of the model that its config.json builds, where that is in the folder that the
    adapters name, in the hub's cache or beside an adapter; else those of the layers that the
    adapters change.

    Args:
        adapters: what was trained on the base.
        name: the base's folder or hub name, by default the one that the adapters name.

    Raises:
        ValueError: the adapters name different bases, or the base that is named has no config.json.
    """

    is_absent = True

    def __init__(self, adapters: Sequence[Checkpoint], name: str | None = None) -> None:
        trained_on = name or _base_of(adapters)
        folders = [adapter.folder for adapter in adapters]
        with_config = [folder for folder in folders if (folder / _CONFIG).is_file()]
        folder = folder_at_hand(trained_on or "") or [*with_config, *folders][0]
        if name is not None and not (folder / _CONFIG).is_file():
            raise ValueError(
                f"the base '{name}' has no {_CONFIG} on this disk, which is all that is read of "
                "it: leave --base out, or name a folder that has one"
            )
        super().__init__(trained_on or "the base", folder, [])
        self.name_in_adapters = trained_on
        self.revision = None  # of no file is known which commit it is of
        self.tensors = _adapted(adapters)
        if (self.folder / _CONFIG).is_file():
            built, known_from = on_meta(self)
            if known_from == type(built).__name__:
                self.tensors = {}
                for name, *_ in shared_names(built, self.config):
                    self.tensors[name] = _described(tuple(built.get_parameter(name).shape))
        self.whole = self.tensors

    @property
    def label(self) -> str:
        # A folder's path is the user's own.
        if self.name.count("/") > 1 or expanded(self.name).is_dir():
            return printable(Path(self.name).absolute().name)
        return printable(self.name)

    def module_files(self) -> dict[str, bytes]:
        return {}


def _base_of(adapters: Sequence[Checkpoint]) -> str | None:
    """Return the name of the base of all adapters, or None if none of them tells."""
    adapters_by_base: dict[str, Checkpoint] = {}
    for adapter in adapters:
        name = adapter.adapter_config.get("base_model_name_or_path")
        if name:
            adapters_by_base.setdefault(base_name_key(name), adapter)
    if not adapters_by_base:
        return None
    first, *others = adapters_by_base.values()
    name = first.adapter_config["base_model_name_or_path"]
    if others:
        other_name = others[0].adapter_config["base_model_name_or_path"]
        raise ValueError(
            f"adapter '{first.name}' was trained on '{printable(str(name))}' and "
            f"'{others[0].name}' on '{printable(str(other_name))}': only adapters of one base can "
            "be merged; where the two are the same model, say so with --base"
        )
    return name


def _adapted(adapters: Sequence[Checkpoint]) -> dict[str, TensorInfo]:
    """Return the weights that adapters change, by their names in the model, as those of linear
    layers: where the model has others, such as GPT-2, factors are the same.
    """
    tensors: dict[str, TensorInfo] = {}
    for adapter in adapters:
        keys = {place_of(key): key for key in adapter.tensors}
        for place, key in keys.items():
            partner = keys.get(place._replace(part="B"))
            if place.part != "A" or partner is None or len(adapter.tensors[key].shape) != 2:
                continue
            shape = (adapter.tensors[partner].shape[0], adapter.tensors[key].shape[1])
            if key.endswith(EMBEDDING_A):
                shape = shape[::-1]
            tensors.setdefault(place.name, _described(shape))
    return tensors


def _described(shape: tuple[int, ...]) -> TensorInfo:
    """Return a tensor of this shape without a place in a file; of what dtype it is matters not."""
    return TensorInfo("", "F32", shape, 0, 0).with_dtype("F32")
