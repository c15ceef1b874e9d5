"""What a merged folder says about itself: nufilt.json for programs, a model card for people."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from fusion_bench_nufilt.storage.identity import combined_digest
from fusion_bench_nufilt.storage.versions import package_versions

from .others import NOT_FINITE
from .output import Record
from .plan import Plan


def run_identity(plan: Plan) -> str:
    """Return a digest of all that the result depends on: an interrupted run goes on only if nothing of it changed."""
    content = {
        "models": [checkpoint.identity() for checkpoint in plan.checkpoints],
        "before": [plan.before.get("mean_counts"), plan.before.get("state")],
        "settings": {key: value for key, value in settings(plan).items() if key != "device"},
        "device": plan.settings.devices[0].type,
        "first step": plan.first_step,
        "layers": sorted(layer.name for layer in plan.layers),
        "averaged": sorted(plan.averaged),
        "versions": package_versions(),
    }
    return combined_digest((key, json.dumps(value)) for key, value in content.items())


def nufilt_json(plan: Plan, records: Sequence[Record], run: str) -> str:
    """Return the manifest.

    ``sha256`` of an input is over the digests of the tensors that were read of it, by name: it does not depend on
    how they are spread over files. Of an adapter's averaged tensors, the full ones count. That of the result likewise.
    """
    models = {"base": plan.pretrained, "merged": plan.merged, "state": plan.state}
    models |= {f"task {number}": task for number, task in enumerate(plan.tasks)}
    inputs: dict[str, dict[str, Any]] = {}
    for source, model in models.items():
        if model is not None:
            inputs[source] = {
                "name": model.checkpoint.label,
                **({"kind": type(model).__name__} if source.startswith("task") else {}),
                "tensors_read": sum(source in record["read"] for record in records),
                "sha256": combined_digest((record["slot"], record["read"].get(source)) for record in records),
            }
    names = {layer.slot: layer.name for layer in plan.layers}
    counts = {record["slot"]: record["mean_count"] for record in records if "mean_count" in record}
    averaged = len(plan.averaged)
    content = {
        "method": plan.method.label,
        "step": plan.last_step,
        "tasks": plan.names,
        "inputs": inputs,
        "settings": settings(plan),
        "coverage": plan.coverage.as_dict(),
        "linear_layers_known_from": plan.origin,
        "tensors": {
            "merged": len(plan.layers),
            "averaged": averaged,
            "copied": len(plan.others) - averaged,
        },
        "sha256": combined_digest((record["slot"], [entry[3] for entry in record["written"]]) for record in records),
        "run": run,
        "versions": package_versions(),
        "warnings": [_labelled(plan, text) for text in plan.warnings]
        + [NOT_FINITE % record["not_finite"] for record in records if "not_finite" in record],
        "mean_counts": {slot: count for slot, count in counts.items() if count != plan.last_step},
        "state": {key: sha for record in records for key, sha in record.get("state", {}).items()},
        "layers": {names[record["slot"]]: record["reports"] for record in records if record["slot"] in names},
    }
    return json.dumps(content, indent=1)


def settings(plan: Plan) -> dict[str, Any]:
    """Return all options of a merge by name, the method's among them."""
    return {
        "method": plan.method.name,
        **dataclasses.asdict(plan.method.options),
        **dataclasses.asdict(plan.targets),
        **{key: getattr(plan.settings, key) for key in ("seed", "accumulate", "device")},
    }


def _labelled(plan: Plan, text: str) -> str:
    """Return a message without the folders of the user."""
    for checkpoint in plan.checkpoints:
        text = text.replace(f"'{checkpoint.name}'", f"'{checkpoint.label}'")
    return text


def model_card(plan: Plan) -> str:
    """Return README.md of the merged folder."""
    method, names = plan.method, plan.names
    stream = "\n".join(f"{number}. {name}" for number, name in enumerate(names, 1))
    options = {**dataclasses.asdict(method.options), "seed": plan.settings.seed}
    shown = ", ".join(f"{key} {value}" for key, value in options.items())
    hub_name = plan.base.label.partition("@")[0]
    base = f"base_model: {json.dumps(hub_name)}\n" if "/" in hub_name else ""  # the hub refuses a folder's name
    rest = {"pretrained": "are the base's", "first": "are the first task's", "mean": "are averaged over the tasks"}
    return f"""---
{base}library_name: transformers
tags: [merge, model-merging, nufilt]
---

# {len(names)} model{"s" if len(names) > 1 else ""} merged with {method.label}

Made from {plan.base.label} by {method.citation},
without data and without training, of these models in this order:

{stream}

{len(plan.layers)} layers were merged ({shown}); all other tensors {rest[plan.targets.other_params]}. `nufilt.json` has
every setting, digests of all inputs and a report for every layer of the last merge. To merge one more model into this
one:

    nufilt merge --method {method.name} --base {plan.base.label} --merged THIS_FOLDER --task NEW --out OUT
"""
