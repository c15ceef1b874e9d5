"""The model card: what a merged folder says to people and to the hub."""

import dataclasses
import json
from collections.abc import Iterator

from .plan import Plan


def model_card(plan: Plan) -> str:
    """Return the card of the result of a plan, in the Markdown of the hub."""
    return "\n\n".join([_front_matter(plan), *_paragraphs(plan)]) + "\n"


def _front_matter(plan: Plan) -> str:
    hub_name = plan.base.label.partition("@")[0]
    base = f"base_model: {json.dumps(hub_name)}\n" if "/" in hub_name else ""  # the hub refuses a folder's name
    return f"---\n{base}library_name: transformers\ntags: [merge, model-merging, nufilt]\n---"


def _paragraphs(plan: Plan) -> Iterator[str]:
    method, names = plan.method, plan.names
    yield f"# {len(names)} model{'s' if len(names) > 1 else ''} merged with {method.label}"
    yield (
        f"Made from {plan.base.label} by {method.citation},\n"
        "without data and without training, of these models in this order:"
    )
    yield "\n".join(f"{number}. {name}" for number, name in enumerate(names, 1))
    options = {**dataclasses.asdict(method.options), "seed": plan.settings.seed}
    shown = ", ".join(f"{key} {value}" for key, value in options.items())
    rest = {"pretrained": "are the base's", "first": "are the first task's", "mean": "are averaged over the tasks"}
    yield (
        f"{len(plan.layers)} layers were merged ({shown}); all other tensors {rest[plan.targets.other_params]}.\n"
        "`nufilt.json` has every setting, digests of all inputs and a report for every layer of the last merge."
    )
    yield "To merge one more model into this one:"
    yield f"    nufilt merge --method {method.name} --base {plan.base.label} --merged THIS_FOLDER --task NEW --out OUT"
