"""The cards of a merged model and of a merged adapter, for people and for the hub."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from fusion_bench_nufilt.models.checkpoint import ADAPTER_CONFIG
from fusion_bench_nufilt.utils.files import CARD, counted, escape_html

from .plan import Plan


def model_card(plan: Plan, warnings: Sequence[str]) -> str:
    """Return the card of the merged model of a plan, with the warnings in its manifest, as Markdown
    for the hub.
    """
    base = plan.base.label
    paragraphs = _opening(plan, "model", f"Made from {base}")
    paragraphs += _in_python(_loading(plan))
    if plan.heads:
        first_task = json.dumps(next(iter(plan.heads)))
        load = f'model = load_task("THIS_FOLDER", {first_task})'
        paragraphs.append("With the head of one of the tasks, which are in `heads/`:")
        paragraphs += _in_python(["from fusion_bench_nufilt import load_task\n", load])
    paragraphs.append(_merged_layers(plan))
    if plan.vocabulary.params:
        paragraphs.append(f"Vocabulary: {plan.vocabulary}.")
    paragraphs += _as_list(warnings)
    paragraphs += _last_merge(plan)
    paragraphs += [
        "To merge one more model into this one:",
        f"    nufilt merge --base {base} --merged THIS_FOLDER --task NEW --out OUT",
    ]
    return _card(_metadata(plan), paragraphs)


def adapter_card(plan: Plan, warnings: Sequence[str], energy_kept: Mapping[str, Any]) -> str:
    """Return the card of the adapter that adapters were merged into, with the warnings and the
    energy that is kept in its manifest, as Markdown for the hub.
    """
    paragraphs = _opening(plan, "adapter", f"Made for {plan.base.label}")
    paragraphs += _in_python(_loading_adapter(plan))
    paragraphs.append(_merged_layers(plan))
    paragraphs += _as_list(warnings)
    if plan.settings.rank is not None:
        paragraphs.append(sentence_about_energy(plan, energy_kept))
    paragraphs += _last_merge(plan)
    paragraphs += [
        "To merge one more adapter into this one:",
        "    nufilt merge --merged THIS_FOLDER --task NEW --out OUT",
    ]
    return _card(_metadata_of_adapter(plan), paragraphs)


def _card(metadata: Mapping[str, Any], paragraphs: Sequence[str]) -> str:
    blocks = [f"---\n{_yaml(metadata)}---"]
    for paragraph in paragraphs:
        # Names of folders and tasks are text, and no HTML; in code, they stay as they are.
        if not paragraph.startswith(("```", "    ")):
            paragraph = "\n".join(map(escape_html, paragraph.split("\n")))
        blocks.append(paragraph)
    return "\n\n".join(blocks) + "\n"


def _opening(plan: Plan, noun: str, made_from: str) -> list[str]:
    """Return the title, what the result was made from, and the tasks in their order."""
    return [
        f"# {counted(len(plan.names), noun)} merged with {plan.method.label}",
        f"{made_from} by {plan.method.citation},\nwithout data and without training, of these "
        f"{noun}s in this order:",
        "\n".join(f"{number}. {name}" for number, name in enumerate(plan.names, 1)),
    ]


def _in_python(lines: Iterable[str]) -> list[str]:
    code = "\n".join(lines)
    if not code:
        return []
    return [f"```python\n{code}\n```"]


def _merged_layers(plan: Plan) -> str:
    return f"Merged: {str(plan.coverage).removeprefix('merging ')}."


def _as_list(warnings: Sequence[str]) -> list[str]:
    if not warnings:
        return []
    return ["\n".join(f"- {text}" for text in warnings)]


def _last_merge(plan: Plan) -> list[str]:
    """Return what was merged last, as a recipe."""
    return [
        "`nufilt.json` says which files were merged, and has a report for every layer of the last "
        "merge, which was this:",
        f"```yaml\n# nufilt merge recipe.yaml\n{_yaml(_recipe(plan))}```",
    ]


def sentence_about_energy(plan: Plan, energy_kept: Mapping[str, Any]) -> str:
    shares = energy_kept["tensors"]
    least = min(shares, key=shares.__getitem__)
    return (
        f"Cut to rank {plan.settings.rank}: {energy_kept['all']:.2%} of the energy of the update "
        f"stays, and in `{least}`, where it is least, {shares[least]:.2%}."
    )


# A name without a slash is a folder's, which the hub refuses; a revision follows an @.
_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(@.*)?")
_TAGS = ["merge", "model-merging", "nufilt"]
#: Metadata that a merged model takes over from its base.
_OF_THE_BASE = ("license", "license_name", "license_link", "pipeline_tag")


def _metadata_of_adapter(plan: Plan) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    if _HUB_NAME.fullmatch(plan.base.label):
        metadata["base_model"] = plan.base.label
        metadata["base_model_relation"] = "adapter"
    metadata["library_name"] = "peft"
    metadata["tags"] = [*_TAGS, "lora"]
    return metadata


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
    metadata["tags"] = _TAGS
    return metadata


def _metadata_of(card: Path) -> dict[str, Any]:
    """Return the metadata of a model card, which is empty if the card is missing or damaged."""
    try:
        # Not metadata_load, which reads in the locale's encoding before huggingface_hub 2.
        block = REGEX_YAML_BLOCK.search(card.read_text(encoding="utf-8-sig"))
        metadata = yaml.safe_load(block[2]) if block else None
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    if isinstance(metadata, dict):
        return metadata
    return {}


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


#: The classes to which adapters for a type of task are added.
_CLASSES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
}


def _loading_adapter(plan: Plan) -> Iterator[str]:
    """Yield the lines that load the base and an adapter on it."""
    config = json.loads(plan.small_files[ADAPTER_CONFIG])
    mapped = (config.get("auto_mapping") or {}).get("base_model_class")
    kind = _CLASSES.get(config["task_type"], mapped or "AutoModel")
    if not hasattr(transformers, kind):
        return
    yield "from peft import PeftModel"
    yield f"from transformers import {kind}\n"
    yield f'base = {kind}.from_pretrained({json.dumps(plan.base.label)}, dtype="auto")'
    yield 'model = PeftModel.from_pretrained(base, "THIS_FOLDER")'


def _recipe(plan: Plan) -> dict[str, Any]:
    """Return the recipe of the last merge, which names local folders without their directories."""
    options = plan.options()
    method = options.pop("method")
    recipe: dict[str, Any] = {}
    if not plan.base.is_absent:
        recipe["base"] = plan.base.label
    if plan.merged is not None:
        recipe["merged"] = plan.merged.source.label
        options["step"] = plan.first_step
    recipe["tasks"] = [task.source.label for task in plan.tasks]
    recipe["out"] = "OUT"
    recipe["method"] = method
    recipe["settings"] = {key: value for key, value in options.items() if value is not None}
    return recipe


def _yaml(content: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(content))  # without classes, which YAML would name
    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
