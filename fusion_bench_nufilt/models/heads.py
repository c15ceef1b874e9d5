"""Heads: the output layers of classifiers, which every task has for itself."""

import re
from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate
from typing import Any

from fusion_bench_nufilt.models.names import in_module_of_block
from fusion_bench_nufilt.models.targets import matches

Shapes = Mapping[str, tuple[int, ...]]

_VOCABULARY = re.compile(
    r"embed|lm_head|(^|\.)(wte|wpe|shared)\."
)  # as long as the vocabulary, not as the labels


class Heads:
    """The heads in a merge, found from the names and shapes of tensors and from configurations.

    A head is the module that maps to the labels, with everything else that lies outside the
    backbone of the task's class, such as both layers of RoBERTa's ``classifier``. It is kept for
    its task if the base lacks it or has it for other labels; a head for the same labels is a layer
    like any other. The base's own head, such as that of a masked language model, is a head, too, if
    a task of another class lacks it. What is kept for one task is kept for all.

    Args:
        rule: ``auto``, ``none``, or an expression for the names of modules.
        base: the base's tensors. Those of tasks must have the same names.
        config: the content of the base's config.json.
        backbone: where the backbone lies in the base's classes of models with heads (``vit``).
        embeddings: the base's tensors with a row for every token.
    """

    def __init__(
        self,
        rule: str,
        base: Shapes,
        config: Mapping[str, Any],
        backbone: str = "",
        embeddings: Collection[str] = (),
    ) -> None:
        self.rule, self.base, self.labels = rule, base, labels(config)
        self._class, self._embeddings = config.get("architectures"), embeddings
        self.modules: set[str] = set()
        within_backbone = any(name.startswith(f"{backbone}.") for name in base)
        self._backbone = f"{backbone}." if within_backbone else ""

    def keep(self, heads: Iterable[Mapping[str, Any]]) -> None:
        """Add the modules of the heads of an earlier merge, as its manifest lists them."""
        if self.rule != "none":
            self.modules.update(module for head in heads for module in head["modules"])

    def add(
        self,
        name: str,
        task: Shapes,
        config: Mapping[str, Any],
        trained: Collection[str] | None = None,
    ) -> None:
        """Add the modules of a task's head, if it has one of its own.

        ``trained`` names the modules that an adapter holds in full (peft's ``modules_to_save``); a
        task's model has None, and the base, which need not have a head, has none of them.
        """
        if self.rule == "auto":
            whole = (
                key
                for key in self._matrices(task)
                if not {*(trained or ())}.isdisjoint(key.split("."))
            )
            self.modules |= self._own(
                task, config, _named(config) or {key.rpartition(".")[0] for key in whole}
            )
            if trained is None and config.get("architectures") != self._class:
                self.modules |= self._of_base(task)
        elif self.rule != "none":
            found = {
                path for key in task for path in _paths(key) if matches(self.rule, path, of="heads")
            }
            if not found and trained is None:
                raise ValueError(f"model '{name}': heads={self.rule!r} matches none of its modules")
            self.modules |= found

    def of(self, names: Iterable[str]) -> list[str]:
        """Return those of the tensor names that belong to heads."""
        return [name for name in names if _within(name, self.modules)]

    def modules_of(self, names: Iterable[str]) -> list[str]:
        """Return the modules of heads to which the named tensors belong."""
        return sorted({path for name in names for path in _paths(name)} & self.modules)

    def _own(self, task: Shapes, config: Mapping[str, Any], named: Collection[str]) -> set[str]:
        theirs = labels(config)
        outside = {name for name in task if _within(name, named) or self._is_outside(name)}
        outputs = [name for name in self._matrices(task) if not self._backbone or name in outside]
        if named:
            outputs = [name for name in outputs if _within(name, named)]
        else:  # without labels in the configuration, the last one whose length differs
            resized = [
                name for name in outputs if self._is_resized(name, task, or_new=theirs is None)
            ][-1:]
            outputs = [
                name for name in outputs if theirs and task[name][0] == len(theirs)
            ] or resized
        known = self.labels is not None and theirs is not None
        relabelled = theirs != self.labels and not (
            known and len(theirs or ()) != len(self.labels or ())
        )
        own = {
            name.rpartition(".")[0]
            for name in outputs
            if relabelled or self.base.get(name) != task[name]
        }
        if not own:
            return set()
        head = {name for name in task if name in outside or _within(name, own)}
        return _modules(head, task)

    def _of_base(self, task: Shapes) -> set[str]:
        """Return the modules outside the backbone that the base has and a task lacks.

        An output layer alone, as of a causal language model, is no layer that is merged.
        """
        if not self._backbone:
            return set()
        head = {
            name for name in self.base if not name.startswith(self._backbone) and name not in task
        }
        layers = [
            name
            for name in head - {*self._embeddings}
            if name.endswith(".weight") and len(self.base[name]) >= 2
        ]
        return _modules(head, self.base) if layers else set()

    def _is_outside(self, name: str) -> bool:
        if self._backbone and not name.startswith(self._backbone):
            return True
        return name not in self.base and not in_module_of_block(name)

    def _is_resized(self, name: str, task: Shapes, *, or_new: bool) -> bool:
        if name not in self.base:
            return or_new
        vocabulary = {
            shape[0]
            for other, shape in task.items()
            if _VOCABULARY.search(other) and len(shape) > 1
        }
        same_width = self.base[name][1:] == task[name][1:]
        return same_width and self.base[name] != task[name] and task[name][0] not in vocabulary

    def _matrices(self, task: Shapes) -> list[str]:
        there = (
            name for name, shape in task.items() if name.endswith(".weight") and len(shape) >= 2
        )
        return [
            name for name in there if not (in_module_of_block(name) or _VOCABULARY.search(name))
        ]


def labels(config: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the names of a model's labels by number, or None if the configuration does not give
    them.
    """
    if "architecture" in config:  # timm's
        names = dict(enumerate(config.get("label_names") or range(config.get("num_classes", 0))))
    elif "model_type" in config:
        names = config.get("id2label") or {
            i: f"LABEL_{i}" for i in range(config.get("num_labels") or 2)
        }
    else:
        return None
    return {str(number): str(name) for number, name in names.items()}


def _named(config: Mapping[str, Any]) -> Collection[str]:
    """Return the modules that a timm configuration calls the classifier."""
    names = (config.get("pretrained_cfg") or {}).get("classifier") or ()
    return [names] if isinstance(names, str) else names


def _modules(tensors: Collection[str], model: Iterable[str]) -> set[str]:
    """Return the outermost modules that hold some tensors of a model, and no other of it."""
    others = {path for name in model if name not in tensors for path in _paths(name)}
    return {next(path for path in _paths(name) if path not in others) for name in tensors}


def _paths(name: str) -> list[str]:
    """Return the names of the modules around a tensor, outermost first, and then its own."""
    return list(accumulate(name.split("."), "{}.{}".format))


def _within(name: str, modules: Collection[str]) -> bool:
    return any(path in modules for path in _paths(name))
