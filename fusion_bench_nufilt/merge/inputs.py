"""Whether the inputs of a merge still are what was read of them, to the last bit, which their
fingerprints can't tell: the digests in the records of what is finished do.
"""

import dataclasses
import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch

from fusion_bench_nufilt.models.source import format_names
from fusion_bench_nufilt.utils.devices import map_layers
from fusion_bench_nufilt.utils.files import Input

from .engine import Budget
from .other_params import digests_of_other_param
from .output import Record
from .plan import Plan
from .planned import PlannedLayers

log = logging.getLogger(__name__)


def unchanged_records(layers: PlannedLayers, records: Sequence[Record]) -> list[Record]:
    """Return the records of tensors of a merge that were made from what the inputs now hold."""
    if not records:
        return []
    log.info("comparing what %d tensors were made of with what the inputs hold", len(records))
    params = [record["param"] for record in records]
    digests = read_digests(layers.plan, params, layers.strengths)
    return [record for record in records if record["read"] == digests.get(record["param"])]


def read_digests(
    plan: Plan, params: Iterable[str], strengths: Sequence[float]
) -> dict[str, dict[str, str]]:
    """Read what tensors of the result are made from, and return its digests by the model's role in
    the merge, by param; ``strengths`` are those of the tasks.
    """
    # Digests are of bytes as they are stored, for which no GPU or cluster is needed.
    settings = dataclasses.replace(plan.settings, engine="local", address=None, device="cpu")
    reader = PlannedLayers(dataclasses.replace(plan, settings=settings), strengths)
    budget = Budget(reader.memory_limit)
    layers = {layer.param: layer for layer in plan.layers}

    def digests_of_layer(param: str) -> dict[str, str]:
        layer = layers[param]
        with budget.reserve(reader.memory(layer)):
            return reader.digests_read(layer)

    wanted = set(params)
    merged = [param for param in layers if param in wanted]
    other_params = [param for param in plan.other_keys if param in wanted]
    cpu = torch.device("cpu")
    digests = dict(zip(merged, map_layers(digests_of_layer, merged, cpu), strict=True))
    of_others = map_layers(partial(digests_of_other_param, plan), other_params, cpu)
    return digests | dict(zip(other_params, of_others, strict=True))


def digests_of_inputs(read: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return a digest of all that was read of each input, by its role, given the digests for each
    tensor of the result.

    They are taken in their own order, each once: those of the base do not depend on which tensors
    are merged, and which of them are stored once more under another name.
    """
    digests_by_role: dict[str, set[str]] = {}
    for digests in read:
        for role, digest in digests.items():
            digests_by_role.setdefault(role, set()).add(digest)
    digests_by_role.pop("strengths", None)
    of_inputs = {}
    for role, digests_of_tensors in digests_by_role.items():
        lines = "\n".join(sorted(digests_of_tensors))
        of_inputs[role] = hashlib.sha256(lines.encode()).hexdigest()
    return of_inputs


def edited_inputs(plan: Plan, inputs: Mapping[str, Input]) -> list[str]:
    """Read all that is merged, and return the roles of models that are no longer what was read of
    them, as ``inputs`` of a finished merge of this plan say; none if any is still on the hub.
    """
    if any(checkpoint.remote for checkpoint in plan.checkpoints):
        return []
    params = [*(layer.param for layer in plan.layers), *plan.other_keys]
    log.info("comparing what %d tensors were made of with what the inputs hold", len(params))
    # They follow from the rest, which is compared.
    no_strengths = [1.0] * len(plan.tasks)
    digests = digests_of_inputs(read_digests(plan, params, no_strengths).values())
    return [role for role, digest in digests.items() if inputs[role].get("read") != digest]


def refuse_changed(layers: PlannedLayers, done: Mapping[str, Record]) -> None:
    """Raise a ValueError if a file was written to during the run, which may have given parts of two
    models to one result.

    One that was only touched, or replaced by a copy, still has what was read of it.
    """
    changed = layers.plan.changed()
    if not changed:
        return
    names = [checkpoint.name for checkpoint in changed if not checkpoint.reopen()]
    if not names and len(unchanged_records(layers, list(done.values()))) < len(done):
        names = [checkpoint.name for checkpoint in changed]
    if names:
        raise ValueError(
            f"{format_names(names)} was changed during the run: run the same command again, which "
            "makes anew what was made from it"
        )
