"""Whether the inputs of a merge still are what was read of them: the digests in the records of what
is finished tell.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch

from fusion_bench_nufilt.models.source import format_names
from fusion_bench_nufilt.utils.devices import map_layers

from .engine import Budget
from .other_params import digests_of_other
from .output import Record
from .plan import Plan
from .planned import PlannedLayers


def unchanged_records(plan: Plan, records: Sequence[Record]) -> list[Record]:
    """Return the records of tensors that were made from what the inputs now hold."""
    params = [record["param"] for record in records]
    digests = read_digests(plan, params)
    return [record for record in records if record["read"] == digests.get(record["param"])]


def read_digests(plan: Plan, params: Iterable[str]) -> dict[str, dict[str, str]]:
    """Read what tensors of the result are made from, and return its digests by the model's role in
    the merge, by param.
    """
    # Digests are of bytes as they are stored, for which no GPU or cluster is needed.
    settings = dataclasses.replace(plan.settings, engine="local", address=None, device="cpu")
    source = PlannedLayers(dataclasses.replace(plan, settings=settings))
    budget = Budget(source.memory_limit)
    layers = {layer.param: layer for layer in plan.layers}

    def digests_of_layer(param: str) -> dict[str, str]:
        layer = layers[param]
        with budget.reserve(source.memory(layer)):
            return source.digests_read(layer)

    wanted = set(params)
    merged = [param for param in layers if param in wanted]
    others = [param for param in plan.others if param in wanted]
    cpu = torch.device("cpu")
    digests = dict(zip(merged, map_layers(digests_of_layer, merged, cpu), strict=True))
    of_others = map_layers(partial(digests_of_other, plan), others, cpu)
    return digests | dict(zip(others, of_others, strict=True))


def refuse_changed(plan: Plan, done: Mapping[str, Record]) -> None:
    """Raise a ValueError if a file was written to during the run, which may have given parts of two
    models to one result.

    One that was only touched, or replaced by a copy, still has what was read of it.
    """
    changed = plan.changed()
    if not changed:
        return
    names = [checkpoint.name for checkpoint in changed if not checkpoint.reopen()]
    if not names and len(unchanged_records(plan, list(done.values()))) < len(done):
        names = [checkpoint.name for checkpoint in changed]
    if names:
        raise ValueError(
            f"{format_names(names)} was changed during the run: run the same command again, which "
            "makes anew what was made from it"
        )
