"""What a merged folder says about itself: nufilt.json for programs, a model card for people."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fusion_bench_nufilt.storage.versions import package_versions

from .plan import Plan

#: Said of a tensor outside the merged layers, which stays the base's.
NOT_FINITE = "tensor '%s' has NaN or infinite values in the base, and so in the result"


def run_identity(plan: Plan) -> str:
    """Digest of all that the result depends on: an interrupted run goes on only if nothing of it changed."""
    content = [
        [checkpoint.identity() for checkpoint in plan.checkpoints],
        [plan.method.name, plan.method.state({}), dataclasses.asdict(plan.method.config)],
        dataclasses.asdict(plan.targets),
        [plan.settings.seed, plan.first_step, plan.settings.accumulate, plan.devices[0].type],
        [sorted(layer.name for layer in plan.layers), sorted(plan.averaged), package_versions()],
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def nufilt_json(plan: Plan, records: Sequence[Mapping[str, Any]], run: str) -> str:
    """The manifest.

    ``sha256`` of an input is over the digests of the tensors that were read of it, by name: it does not depend on
    how they are spread over files. Of an adapter's averaged tensors, the full ones count. That of the result likewise.
    """
    inputs: dict[str, dict[str, Any]] = {"base": {"name": plan.base.label}}
    if plan.merged is not None:
        inputs["merged"] = {"name": plan.merged.checkpoint.label}
    if plan.state is not None:
        inputs["state"] = {"name": plan.state.checkpoint.label}
    for number, task in enumerate(plan.tasks):
        inputs[f"task {number}"] = {"name": task.checkpoint.label, "kind": type(task).__name__}
    for source, entry in inputs.items():
        entry["tensors_read"] = sum(source in record["read"] for record in records)
        entry["sha256"] = _digest((record["slot"], record["read"].get(source)) for record in records)
    names = {layer.slot: layer.name for layer in plan.layers}
    reports = {names[record["slot"]]: record["reports"] for record in records if record["slot"] in names}
    content = {
        "method": plan.method.label,
        "step": plan.last_step,
        "tasks": plan.history + [task.checkpoint.label for task in plan.tasks],
        "inputs": inputs,
        "settings": settings(plan),
        "coverage": plan.coverage.as_dict(),
        "linear_layers_known_from": plan.origin,
        "tensors": {"merged": len(plan.layers), "averaged": len(plan.averaged), "copied": plan.copied},
        "sha256": _digest((record["slot"], [entry[3] for entry in record["written"]]) for record in records),
        "run": run,
        "versions": package_versions(),
        "warnings": [_labelled(plan, text) for text in plan.warnings]
        + [NOT_FINITE % record["not_finite"] for record in records if "not_finite" in record],
        **plan.method.state(reports),
        "layers": reports,
    }
    return json.dumps(content, indent=1)


def settings(plan: Plan) -> dict[str, Any]:
    """All options of a merge by name, the method's among them."""
    return {
        "method": plan.method.name,
        **dataclasses.asdict(plan.method.config),
        **dataclasses.asdict(plan.targets),
        **{key: getattr(plan.settings, key) for key in ("seed", "accumulate", "device")},
    }


def _labelled(plan: Plan, text: str) -> str:
    """A message without the folders of the user."""
    for checkpoint in plan.checkpoints:
        text = text.replace(f"'{checkpoint.name}'", f"'{checkpoint.label}'")
    return text


def _digest(parts: Iterable[tuple[str, object]]) -> str:
    return hashlib.sha256("".join(f"{part}\n" for part in sorted(parts)).encode()).hexdigest()


def model_card(plan: Plan) -> str:
    """README.md of the merged folder."""
    tasks = plan.history + [task.checkpoint.label for task in plan.tasks]
    stream = "\n".join(f"{number}. {task}" for number, task in enumerate(tasks, 1))
    method, chosen = plan.method, settings(plan)
    shown = ", ".join(f"{key} {chosen[key]}" for key in method.shown)
    hub_name = plan.base.label.partition("@")[0]
    base = f"base_model: {json.dumps(hub_name)}\n" if "/" in hub_name else ""  # the hub refuses a folder's name
    rest = {"pretrained": "are the base's", "first": "are the first task's", "mean": "are averaged over the tasks"}
    return f"""---
{base}library_name: transformers
tags: [merge, model-merging, nufilt]
---

# {len(tasks)} model{"s" if len(tasks) > 1 else ""} merged with {method.label.partition(",")[0]}

Made from {plan.base.label} by {method.about},
without data and without training, of these models in this order:

{stream}

{len(plan.layers)} layers were merged ({shown}); all other tensors {rest[plan.targets.other_params]}. `nufilt.json` has
every setting, digests of all inputs and a report for every layer of the last merge. To merge one more model into this
one:

    nufilt merge --method {method.name} --base {plan.base.label} --merged THIS_FOLDER --task NEW --out OUT
"""
