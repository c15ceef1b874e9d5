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
    front_matter = f"---\n{_yaml(_metadata(plan))}---"
    return "\n\n".join([front_matter, *_paragraphs(plan, warnings)]) + "\n"


def _yaml(content: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(content))  # without classes, which YAML would name
    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


def _metadata(plan: Plan) -> dict[str, Any]:
    # A dict has models in merging order, and once though one may come at two revisions.
    hub_names: dict[str, None] = {}
    for label in (plan.base.label, *plan.names):
        match = _HUB_NAME.fullmatch(label)
        if match:
            hub_names[match[1]] = None
    metadata: dict[str, Any] = {}
    if hub_names:
        metadata["base_model"] = list(hub_names)
        metadata["base_model_relation"] = "merge"
    metadata["library_name"] = "transformers"
    of_base = _metadata_of(plan.pretrained.checkpoint.folder / CARD)
    for key in _OF_THE_BASE:
        if isinstance(of_base.get(key), str):
            metadata[key] = of_base[key]
    metadata["tags"] = ["merge", "model-merging", "nufilt"]
    return metadata


def _metadata_of(card: Path) -> dict[str, Any]:
    """Return the metadata of a model card, which is empty if the card is missing or damaged."""
    try:
        return metadata_load(card) or {}
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}


def _paragraphs(plan: Plan, warnings: Sequence[str]) -> Iterator[str]:
    base = plan.base.label
    number_of_models = "1 model" if len(plan.names) == 1 else f"{len(plan.names)} models"
    yield f"# {number_of_models} merged with {plan.method.label}"
    yield (
        f"Made from {base} by {plan.method.citation},\nwithout data and without training, of these "
        "models in this order:"
    )
    yield "\n".join(f"{number}. {name}" for number, name in enumerate(plan.names, 1))
    snippet = "\n".join(_loading(plan))
    if snippet:
        yield f"```python\n{snippet}\n```"
    if plan.heads:
        first_task = json.dumps(next(iter(plan.heads)))
        load = f'model = load_task("THIS_FOLDER", {first_task})'
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
    # A class of the model's own code can't be imported by its name.
    if not hasattr(transformers, kinds["model"]):
        return
    # A processor brings its tokenizer along, so that one of the two is enough.
    if "preprocessor_config.json" in plan.small_files:
        kinds["processor"] = "AutoProcessor"
    elif "tokenizer_config.json" in plan.small_files:
        kinds["tokenizer"] = "AutoTokenizer"
    yield f"from transformers import {', '.join(sorted(kinds.values()))}\n"
    yield f'model = {kinds.pop("model")}.from_pretrained("THIS_FOLDER", dtype="auto")'
    for name, kind in kinds.items():
        yield f'{name} = {kind}.from_pretrained("THIS_FOLDER")'


def _recipe(plan: Plan) -> dict[str, Any]:
    """Return the recipe of the last merge, which names local folders without their directories."""
    options = plan.options()
    method = options.pop("method")
    recipe: dict[str, Any] = {"base": plan.base.label}
    if plan.merged is not None:
        recipe["merged"] = plan.merged.source.label
        options["step"] = plan.first_step
    recipe["tasks"] = [task.source.label for task in plan.tasks]
    recipe["out"] = "OUT"
    recipe["method"] = method
    recipe["settings"] = {key: value for key, value in options.items() if value is not None}
    return recipe
