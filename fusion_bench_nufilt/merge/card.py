"""The model card, which describes a merged folder to people and to the hub."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
import yaml
from huggingface_hub.repocard import metadata_load

from fusion_bench_nufilt.utils.files import CARD

from .plan import Plan

# A name without a slash is a folder's, which the hub refuses; a revision follows an @.
_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(@.*)?")
#: Metadata that a merged model takes over from its base.
_OF_THE_BASE = ("license", "license_name", "license_link", "pipeline_tag")


def model_card(plan: Plan, warnings: Sequence[str]) -> str:
    """Return the model card for the result of a plan, with the warnings in its manifest, as
    Markdown for the hub.
    """
    return "\n\n".join([f"---\n{_yaml(_metadata(plan))}---", *_paragraphs(plan, warnings)]) + "\n"


def _yaml(content: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(json.loads(json.dumps(content)), sort_keys=False, allow_unicode=True))


def _metadata(plan: Plan) -> dict[str, Any]:
    found = map(_HUB_NAME.fullmatch, (plan.base.label, *plan.names))
    made_from = list(dict.fromkeys(name[1] for name in found if name))
    base = _metadata_of(plan.pretrained.checkpoint.folder / CARD)
    return {
        **({"base_model": made_from, "base_model_relation": "merge"} if made_from else {}),
        "library_name": "transformers",
        **{key: base[key] for key in _OF_THE_BASE if isinstance(base.get(key), str)},
        "tags": ["merge", "model-merging", "nufilt"],
    }


def _metadata_of(card: Path) -> dict[str, Any]:
    """Return the metadata of a model card, which is empty if the card is missing or damaged."""
    try:
        return metadata_load(card) or {}
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}


def _paragraphs(plan: Plan, warnings: Sequence[str]) -> Iterator[str]:
    method, names, base = plan.method, plan.names, plan.base.label
    yield f"# {len(names)} model{'s' if len(names) > 1 else ''} merged with {method.label}"
    yield (
        f"Made from {base} by {method.citation},\nwithout data and without training, of these "
        "models in this order:"
    )
    yield "\n".join(f"{number}. {name}" for number, name in enumerate(names, 1))
    if snippet := "\n".join(_loading(plan)):
        yield f"```python\n{snippet}\n```"
    if plan.heads:
        load = f'model = load_task("THIS_FOLDER", {json.dumps(next(iter(plan.heads)))})'
        yield "With the head of one of the tasks, which are in `heads/`:"
        yield f"```python\nfrom fusion_bench_nufilt import load_task\n\n{load}\n```"
    yield f"Merged: {str(plan.coverage).removeprefix('merging ')}."
    if plan.vocabulary.params:
        yield f"Vocabulary: {plan.vocabulary}."
    if warnings:
        yield "\n".join(f"- {text}" for text in warnings)
    yield (
        "`nufilt.json` says which files were merged, and has a report for every layer of the last "
        "merge, which was this:"
    )
    yield f"```yaml\n# nufilt merge recipe.yaml\n{_yaml(_recipe(plan))}```"
    yield "To merge one more model into this one:"
    yield f"    nufilt merge --base {base} --merged THIS_FOLDER --task NEW --out OUT"


def _loading(plan: Plan) -> Iterator[str]:
    """Yield the lines that load the model and its tokenizer or processor; none if transformers
    lacks the class.
    """
    config = json.loads(plan.small_files.get("config.json", b"{}"))
    kinds = {"model": (config.get("architectures") or ["AutoModel"])[0]}
    if not hasattr(transformers, kinds["model"]):
        return
    if "preprocessor_config.json" in plan.small_files:
        kinds["processor"] = "AutoProcessor"
    elif "tokenizer_config.json" in plan.small_files:
        kinds["tokenizer"] = "AutoTokenizer"
    yield f"from transformers import {', '.join(sorted(kinds.values()))}\n"
    for name, kind in kinds.items():
        dtype = ', dtype="auto"' if name == "model" else ""
        yield f'{name} = {kind}.from_pretrained("THIS_FOLDER"{dtype})'


def _recipe(plan: Plan) -> dict[str, Any]:
    """Return the recipe of the last merge, which names local folders without their directories."""
    options = {**plan.options(), "step": plan.first_step if plan.merged else None}
    method = options.pop("method")
    return {
        "base": plan.base.label,
        **({"merged": plan.merged.source.label} if plan.merged else {}),
        "tasks": [task.source.label for task in plan.tasks],
        "out": "OUT",
        "method": method,
        "settings": {key: value for key, value in options.items() if value is not None},
    }
