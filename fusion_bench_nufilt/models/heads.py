"""Heads: the output layers of classifiers, which every task has for itself."""

import re
from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate
from typing import Any

from fusion_bench_nufilt.methods.options import matches

from .layers import in_module_of_block

Shapes = Mapping[str, tuple[int, ...]]

# Tensors that are as long as the vocabulary, not as the labels.
_VOCABULARY = re.compile(r"embed|lm_head|(^|\.)(wte|wpe|shared)\.")


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
        self.rule = rule
        self.base = base
        self.labels = labels(config)
        self.modules: set[str] = set()
        self._class = config.get("architectures")
        self._embeddings = embeddings
        self._backbone = ""
        if any(name.startswith(f"{backbone}.") for name in base):
            self._backbone = f"{backbone}."

    def keep(self, heads: Iterable[Mapping[str, Any]]) -> None:
        """Add the modules of the heads of an earlier merge, as its manifest lists them."""
        if self.rule == "none":
            return
        for head in heads:
            self.modules.update(head["modules"])

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
        if self.rule == "none":
            return
        if self.rule != "auto":
            self._add_matching(name, task, is_whole=trained is None)
            return
        classifiers: set[str] = set()
        for key in self._matrices(task):
            # Names of modules may be ends of paths, such as classifier.out_proj.
            if any(f".{module}." in f".{key}" for module in trained or ()):
                classifiers.add(key.rpartition(".")[0])
        # Beside its head, an adapter's model has all that the base has.
        whole = task if trained is None else {**self.base, **task}
        self.modules |= self._own(task, config, classifiers, whole)
        # An adapter lacks all that it leaves alone, which says nothing of its model's head.
        if trained is None and config.get("architectures") != self._class:
            self.modules |= self._of_base(task)

    def _add_matching(self, name: str, task: Shapes, is_whole: bool) -> None:
        """Add the modules that the user's expression matches, of which a whole model has some."""
        modules = set()
        for key in task:
            for path in _paths(key):
                if matches(self.rule, path, of="heads"):
                    modules.add(path)
        if not modules and is_whole:
            raise ValueError(f"model '{name}': heads={self.rule!r} matches none of its modules")
        self.modules |= modules

    def of(self, names: Iterable[str]) -> list[str]:
        """Return those of the tensor names that belong to heads."""
        return [name for name in names if _within(name, self.modules)]

    def modules_of(self, names: Iterable[str]) -> list[str]:
        """Return the modules of heads to which the named tensors belong."""
        paths: set[str] = set()
        for name in names:
            paths.update(_paths(name))
        return sorted(paths & self.modules)

    def _own(
        self, task: Shapes, config: Mapping[str, Any], named: Collection[str], whole: Shapes
    ) -> set[str]:
        """Return the modules of a task's head; ``named`` has its output layers where they are
        known, and ``whole`` the tensors of its model.
        """
        theirs = labels(config)
        outside = {name for name in task if _within(name, named) or self._is_outside(name)}
        outputs = self._matrices(task)
        if self._backbone:
            outputs = [name for name in outputs if name in outside]
        if named:
            outputs = [name for name in outputs if _within(name, named)]
        else:
            of_length = []
            if theirs:
                of_length = [name for name in outputs if task[name][0] == len(theirs)]
            # Without labels in the configuration, the last one whose length differs.
            resized = [
                name for name in outputs if self._is_resized(name, task, or_new=theirs is None)
            ]
            outputs = of_length or resized[-1:]
        # As many rows as there are labels make no head by themselves: BERT has two token types.
        if not self._is_relabelled(theirs):
            outputs = [name for name in outputs if self.base.get(name) != task[name]]
        elif theirs is None and self.labels is not None:
            # An adapter may also train what is no head, such as the projector of a LLaVA.
            count = len(self.labels)
            labelled = [name for name in outputs if task[name][0] == count]
            outputs = [
                name for name in outputs if name in labelled or self.base.get(name) != task[name]
            ]
        if not outputs:
            return set()
        modules = {name.rpartition(".")[0] for name in outputs}
        head = {name for name in task if name in outside or _within(name, modules)}
        return _modules(head, whole)

    def _is_relabelled(self, theirs: Mapping[str, str] | None) -> bool:
        """Tell whether a task has other labels than the base, and as many if both are known."""
        if theirs == self.labels:
            return False
        if self.labels is None or theirs is None:
            return True
        return len(theirs) == len(self.labels)

    def _of_base(self, task: Shapes) -> set[str]:
        """Return the modules outside the backbone that the base has and a task lacks.

        An output layer alone, as of a causal language model, is no layer that is merged.
        """
        if not self._backbone:
            return set()
        outside = [name for name in self.base if not name.startswith(self._backbone)]
        head = {name for name in outside if name not in task}
        for name in head.difference(self._embeddings):
            if name.endswith(".weight") and len(self.base[name]) >= 2:
                return _modules(head, self.base)
        return set()

    def _is_outside(self, name: str) -> bool:
        if self._backbone and not name.startswith(self._backbone):
            return True
        return name not in self.base and not in_module_of_block(name)

    def _is_resized(self, name: str, task: Shapes, *, or_new: bool) -> bool:
        if name not in self.base:
            return or_new
        before = self.base[name]
        after = task[name]
        if before == after or before[1:] != after[1:]:
            return False
        # The decoder of a vocabulary that grew is as long as its embeddings, and is no head.
        of_vocabulary = [shape for other, shape in task.items() if _VOCABULARY.search(other)]
        return all(len(shape) < 2 or shape[0] != after[0] for shape in of_vocabulary)

    def _matrices(self, task: Shapes) -> list[str]:
        """Return the names of matrices outside the blocks and the embeddings."""
        names = []
        for name, shape in task.items():
            is_matrix = name.endswith(".weight") and len(shape) >= 2
            if is_matrix and not in_module_of_block(name) and not _VOCABULARY.search(name):
                names.append(name)
        return names


def labels(config: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the names of a model's labels by number, or None if the configuration does not give
    them.
    """
    if "model_type" not in config:
        return None
    # transformers writes neither field where a model has two labels, its default.
    count = config.get("num_labels") or 2
    names = config.get("id2label") or {number: f"LABEL_{number}" for number in range(count)}
    return {str(number): str(name) for number, name in names.items()}


def _modules(tensors: Collection[str], model: Iterable[str]) -> set[str]:
    """Return the outermost modules that hold some tensors of a model, and no other of it."""
    paths_of_others: set[str] = set()
    for name in model:
        if name not in tensors:
            paths_of_others.update(_paths(name))
    modules = set()
    for name in tensors:
        outermost = [path for path in _paths(name) if path not in paths_of_others]
        modules.add(outermost[0])
    return modules


def _paths(name: str) -> list[str]:
    """Return the names of the modules around a tensor, outermost first, and then its own."""
    return list(accumulate(name.split("."), "{}.{}".format))


def _within(name: str, modules: Collection[str]) -> bool:
    return not set(_paths(name)).isdisjoint(modules)
