"""Weights that a configuration ties, such as those of the embedding and the output head.

Whether they are one is for the models to say: transformers 5 loads two where a checkpoint stores
two, whatever its configuration says, and an adapter may change one of them alone. What is two
weights in one of the models is merged as two.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from fusion_bench_nufilt.models import TargetConfig
from fusion_bench_nufilt.models.shared import shared_names, untie

from .architecture import Architecture
from .model import ModelWeights


def tie_weights(
    architecture: Architecture,
    lasting: Sequence[ModelWeights],
    tasks: Sequence[ModelWeights],
    targets: TargetConfig,
    first_step: int = 1,
) -> None:
    """Decide which names share a weight, and have the models go by that.

    Args:
        architecture: knows what the configuration ties, and what is decided.
        lasting: the base, and the model merged so far.
        tasks: models that count if the merge takes over such a weight.
        targets: tells which weights it takes over.
        first_step: the number of the first task.
    """
    for model in lasting:
        _separate(architecture, model)
    for step, task in enumerate(tasks, first_step):
        names = differing(architecture, task)
        if names and (targets.changes_others(step) or architecture.selects(targets, names)):
            _separate(architecture, task)
        else:
            task.left_out = [name for name in names if name in task.params]
    # After all were asked: until the last one, any model may still untie a weight for the others.
    for model in (*lasting, *tasks):
        model.tie(architecture)


def differing(architecture: Architecture, model: ModelWeights) -> list[str]:
    """Return the names of weights that a model has apart from those that they are tied to."""
    differing: list[str] = []
    for names in architecture.weights:
        first, *others = model.tell_apart(names)
        if any(other != first for other in others):
            differing += names
    return differing


def _separate(architecture: Architecture, model: ModelWeights) -> None:
    """Untie what is more than one tensor in a model."""
    for names in architecture.weights:
        for group in _groups(model, names):
            if architecture.param_named(names[0]) not in group:
                architecture.untie(group)


def _groups(model: ModelWeights, names: Sequence[str]) -> list[list[str]]:
    """Group names of a weight by the tensors that a model has for them."""
    groups = defaultdict(list)
    for name, content in zip(names, model.tell_apart(names), strict=True):
        groups[content].append(name)
    return list(groups.values())


def earlier_params(architecture: Architecture, merged: ModelWeights) -> dict[str, str]:
    """Return for the names of all weights that the configuration ties the params by which they
    went when a model was merged, given that model before its names are tied.
    """
    params: dict[str, str] = {}
    for names in architecture.shared:
        for group in _groups(merged, names):
            params |= dict.fromkeys(group, architecture.first(group))
    return params


def carry_over(
    architecture: Architecture,
    known: dict[str, Any],
    earlier: Mapping[str, str],
    key_of: Callable[[str], str] = str,
) -> None:
    """Enter what is known of weights also under the params that shared them when it was noted."""
    for names in architecture.weights:
        param = architecture.param_named(names[0])
        if key_of(earlier.get(param, param)) in known:
            known.setdefault(key_of(param), known[key_of(earlier.get(param, param))])


def complete_base(
    architecture: Architecture, base: ModelWeights, models: Iterable[ModelWeights]
) -> None:
    """Have the base's files present every weight that they hold as another one, to which it is no
    longer tied, under the key that a model has for it.
    """
    stored = architecture.by_param(base.source)
    for param in [architecture.param_named(names[0]) for names in architecture.weights]:
        if param in base.keys and param not in stored:
            keys = [model.keys[param] for model in models if param in model.keys]
            keys = [key for key in keys if architecture.module_name(key) == param]
            key = [*keys, param][0]
            base.checkpoint.add_copy(key, base.keys[param])
            base.keys[param] = key


def untie_model(architecture: Architecture, model: nn.Module) -> None:
    """Give a model in memory the weights that the architecture has."""
    for names in architecture.weights:
        held = next(held for held in shared_names(model) if names[0] in held)
        if not {*held} <= {*names}:
            untie(model, names)
            config: Any = getattr(model, "config", None)
            if config is not None and is_untied(architecture, vars(config)):
                # Otherwise, transformers ties them again when it loads the saved model.
                config.tie_word_embeddings = False


def is_untied(architecture: Architecture, config: Mapping[str, Any]) -> bool:
    """Tell whether a configuration may say that nothing is tied.

    That of an encoder and a decoder may not, since T5 also scales its outputs by it.
    """
    nothing = all(len(names) == 1 for names in architecture.weights)
    return nothing and not config.get("is_encoder_decoder")
