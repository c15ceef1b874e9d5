"""Base, merged and task models, whose tensors are addressed by param, whatever their files call
them; and the weights that a configuration ties, such as those of the embedding and the output head.

Whether tied weights are one is for the models to say: transformers 5 loads two where a checkpoint
stores two, whatever its configuration says, and an adapter may change one of them alone. What is
two weights in one of the models is merged as two, so that a model has a tensor for each name until
:func:`tie_weights` has asked them all.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_nufilt.methods.options import TargetConfig
from fusion_bench_nufilt.nufilt.low_rank import LowRank
from fusion_bench_nufilt.utils.tensors import TensorInfo, compute_dtype

from .architecture import (
    Architecture,
    shared_names,
    untie_parameter,
)
from .checkpoint import Checkpoint
from .entries import Entry, Stored, Unchanged
from .source import Source


class ModelWeights:
    """A model, in files or in memory: an entry for each tensor that it has, by param. An adapter
    has all of the base's, once it is opened by their names.
    """

    kind = "model"

    def __init__(self, source: Source, architecture: Architecture) -> None:
        self.source = source
        self.entries: dict[str, Entry] = {}
        self.left_out: list[str] = []  # names of tied weights that are more than one here alone
        self.head: dict[str, Entry] = {}  # the task's own head, by param
        #: The base's embeddings as an adapter was trained on them, by param.
        self.beneath: dict[str, Entry] = {}
        self.gives_rows_of: set[str] = set()  # params from which the result has rows of new tokens
        self.coefficient = 1.0  # of its update in a merge, as task arithmetic calls it
        architecture.split(source)
        self._find_tensors(architecture)
        for names in architecture.names_by_weight:
            self._join_same(names)

    def _find_tensors(self, architecture: Architecture) -> None:
        for key in self.source.tensors:
            self.entries[architecture.model_name(key)] = Stored.of(self.source, key)
        for names in architecture.shared:
            stored = [name for name in names if name in self.entries]
            if stored:
                self._share(stored[0], names)
        embedding = architecture.embedding
        if self.source.config.get("tie_word_embeddings") is True and embedding in self.entries:
            # This model's head is its embedding, also where the base has a head of its own.
            self._share(embedding, architecture.head)

    def _share(self, stored: str, names: Iterable[str]) -> None:
        """Have the tensor of one name stand for those of others that are not stored."""
        for name in names:
            self.entries.setdefault(name, self.entries[stored])

    def _join_same(self, names: Sequence[str]) -> None:
        """Have one entry for those names of a weight that have the same tensor."""
        for number, name in enumerate(names):
            for other in names[:number]:
                entry = self.entries.get(other)
                if entry is not None and name in self.entries and entry.same(self.entries[name]):
                    self.entries[name] = entry
                    break

    @property
    def checkpoint(self) -> Checkpoint:
        """The source of a model that is in files."""
        assert isinstance(self.source, Checkpoint)
        return self.source

    # Which tensors it has

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, by param."""
        return {param: entry.shape for param, entry in self.entries.items()}

    def tie(self, architecture: Architecture) -> None:
        """Have one tensor for each weight, which goes by its param from now on.

        Until then, each name has its own.
        """
        for name in chain(*architecture.shared):
            param = architecture.param(name)
            if name == param or name not in self.entries:
                continue
            if self.entries.pop(name) is not self.entries.get(param):
                self.left_out.append(name)

    def leave_unchanged(self, base: "ModelWeights") -> None:
        """Present all tensors of the base that the model neither changes nor brings."""
        for param, entry in base.entries.items():
            self.entries.setdefault(param, Unchanged(self.source, "", entry.shape))

    def info(self, param: str) -> TensorInfo | None:
        """Return how the model stores a tensor that it holds in full, None of any other."""
        entry = self.entries.get(param)
        return None if entry is None else entry.info

    @property
    def changed_params(self) -> list[str]:
        """The params of all tensors but those that an adapter leaves as they are."""
        return [param for param, entry in self.entries.items() if entry.rank != 0]

    @property
    def trained_modules(self) -> Collection[str] | None:
        """The modules that an adapter holds in full, and None for a whole model."""
        return None

    @property
    def float_params(self) -> list[str]:
        """The params of what the model holds in full and is floating point."""
        return [param for param, entry in self.entries.items() if entry.dtype is not None]

    def take_head(self, params: Iterable[str]) -> None:
        """Keep some tensors out of the merge, as the task's own head; what is also there under the
        name of another one stays with that.
        """
        taken = {param: self.entries.pop(param) for param in params}
        staying = set(self.entries.values())
        self.head |= {param: entry for param, entry in taken.items() if entry not in staying}

    # What they hold

    def factors(self, param: str, device: torch.device | str) -> LowRank:
        """Read the factors of a layer's update, which needs nothing of the base, times the model's
        coefficient.
        """
        nothing = torch.empty(0, dtype=torch.float32, device=device)
        update = scaled_update(self.entries[param].read(nothing), nothing, self.coefficient)
        assert isinstance(update, LowRank)
        return update

    def head_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the task's head by their names in the task's model."""
        tensors = {}
        for entry in self.head.values():
            # safetensors refuses tensors that are not contiguous.
            tensors[self.name_of(entry.key)] = self.source.read(entry.key).contiguous()
        return tensors

    def name_of(self, key: str) -> str:
        """Return the name of a stored tensor in the model that was saved."""
        return key

    def head_config(self, base: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the configuration of the model that the task's head belongs to, given that of the
        base.
        """
        config: Mapping[str, Any] = self.source.config
        return config

    @property
    def trained_config(self) -> Mapping[str, Any]:
        """The configuration with which the model was trained, empty if it is not at hand."""
        config: Mapping[str, Any] = self.source.config
        return config

    # What is checked before a merge

    def check_uses(
        self, base: "ModelWeights", layers: Collection[str], rule: str, architecture: Architecture
    ) -> list[str]:
        """Return warnings if the model says that it was trained on another base, or changes what
        the merge leaves: what is not among the params of ``layers``, and not taken over by
        ``rule``.
        """
        return []


# What to do with an embedding that is one weight with the head, where a model has two.
COPY_HEAD = (
    "copy the embedding of its base into the head, and save that with tie_word_embeddings=False"
)


def scaled_update(new: Tensor | LowRank, theta_0: Tensor, coefficient: float) -> Tensor | LowRank:
    """Return a weight, or the factors of an update, with the update times a coefficient."""
    # A full update keeps its bits, which a way through the difference would round.
    if coefficient == 1:
        return new
    if isinstance(new, LowRank):
        return LowRank(new.left * coefficient, new.right)
    # The widest dtype that occurs, so that each weight is read exactly.
    wide = torch.promote_types(compute_dtype(theta_0), new.dtype)
    return torch.lerp(theta_0.to(wide), new.to(wide), coefficient)


def tie_weights(
    architecture: Architecture,
    lasting: Sequence[ModelWeights],
    tasks: Sequence[ModelWeights],
    targets: TargetConfig,
    first_step: int = 1,
) -> Architecture:
    """Return the architecture with a weight for each tensor that models have, by which the models
    go from now on.

    Args:
        architecture: knows what the configuration ties, and what is decided.
        lasting: the base, and the model merged so far.
        tasks: models that count if the merge takes over such a weight.
        targets: tells which weights it takes over.
        first_step: the number of the first task.
    """
    for model in lasting:
        architecture = architecture.apart(weights_in(architecture, model))
    for step, task in enumerate(tasks, first_step):
        names = names_apart(architecture, task)
        if names and (targets.changes_other_params(step) or architecture.selects(targets, names)):
            architecture = architecture.apart(weights_in(architecture, task))
    # After all were asked: until the last one, any model may still untie a weight for the others.
    for model in (*lasting, *tasks):
        model.tie(architecture)
    return architecture


def weights_in(architecture: Architecture, model: ModelWeights) -> list[list[str]]:
    """Return the names of the weights that the architecture ties, by the tensors that a model has
    for them.
    """
    weights: list[list[str]] = []
    for names in architecture.names_by_weight:
        names_of_entries = defaultdict(list)
        for name in names:
            names_of_entries[model.entries.get(name)].append(name)
        weights += names_of_entries.values()
    return weights


def names_apart(architecture: Architecture, model: ModelWeights) -> list[str]:
    """Return the names of weights that a model has apart from those that they are tied to."""
    weights = weights_in(architecture, model)
    tied = [names for names in architecture.names_by_weight if names not in weights]
    return list(chain(*tied))


def carry_over(
    architecture: Architecture,
    known: dict[str, Any],
    earlier: Architecture,
    key_of: Callable[[str], str] = str,
) -> None:
    """Enter what is known of weights also under the params of those that were one with them in an
    earlier architecture, by whose params it was noted.
    """
    for names in architecture.names_by_weight:
        param = architecture.param(names[0])
        earlier_key = key_of(earlier.param(param))
        if earlier_key in known:
            known.setdefault(key_of(param), known[earlier_key])


def complete_base(
    architecture: Architecture, base: ModelWeights, models: Iterable[ModelWeights]
) -> None:
    """Have the base's files present each weight under all names by which transformers looks for it,
    now that it is no longer tied to another one: by the key that a model has for a name.
    """
    if architecture.names_by_weight == architecture.shared:
        return
    keys: dict[str, str] = {}  # by name
    for model in models:
        for key in model.source.tensors:
            keys.setdefault(architecture.model_name(key), key)
    for names in architecture.names_by_weight:
        param = architecture.param(names[0])
        if param not in base.entries:
            continue
        key_now = base.entries[param].key
        for name in architecture.names_to_store(names):
            key = keys.setdefault(name, name)
            if key not in base.source.tensors:
                base.checkpoint.add_copy(key, key_now)
        # Its own key, under which it is written, and not that of what it was tied to.
        own_keys = [keys[name] for name in names if keys.get(name) in base.source.tensors]
        if key_now not in own_keys:
            base.entries[param] = Stored.of(base.source, own_keys[0])


def untie_model(architecture: Architecture, model: nn.Module) -> None:
    """Give a model in memory the weights that the architecture has."""
    for names in architecture.names_by_weight:
        tied_now = next(tied for tied in shared_names(model) if names[0] in tied)
        others = [name for name in tied_now if name not in names]
        if others:
            untie_parameter(model, names, others)
    config: Any = getattr(model, "config", None)
    if config is None or not architecture.may_untie(vars(config)):
        return
    # Otherwise, transformers ties them again when it loads the saved model: version 5 by the
    # model's configuration, version 4 by that of the language model in it.
    config.tie_word_embeddings = False
    if hasattr(config, "get_text_config"):
        config.get_text_config(decoder=True).tie_word_embeddings = False
