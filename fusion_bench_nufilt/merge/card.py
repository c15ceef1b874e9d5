"""The card of a result, for people and for the hub."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from fusion_bench_nufilt.models.checkpoint import ADAPTER_CONFIG
from fusion_bench_nufilt.models.peft_layers import auto_class
from fusion_bench_nufilt.utils.files import CARD, counted, escape_html

from .plan import Plan

_TEMPLATE = """\
---
{{ card_data }}
---

# {{ number }} merged with {{ method }}

{{ made }} {{ base }} by {{ citation }},
without data and without training, of these {{ noun }}s in this order:

{% for name in names -%}
{{ loop.index }}. {{ name }}
{% endfor %}
{% if loading -%}
```python
{{ loading }}
```

{% endif -%}
{% if task_with_head -%}
With the head of one of the tasks, which are in `heads/`:

```python
from fusion_bench_nufilt import load_task

model = load_task("THIS_FOLDER", {{ task_with_head }})
```

{% endif -%}
Merged: {{ coverage }}.

{% if vocabulary -%}
Vocabulary: {{ vocabulary }}.

{% endif -%}
{% for warning in warnings -%}
- {{ warning }}
{% if loop.last %}
{% endif -%}
{% endfor -%}
{% if energy -%}
{{ energy }}

{% endif -%}
`nufilt.json` says which files were merged, and has a report for every layer of the last merge,
which was this:

```yaml
# nufilt merge recipe.yaml
{{ recipe }}```

To merge one more {{ noun }} into this one:

    nufilt merge {{ options }}--merged THIS_FOLDER --task NEW --out OUT
"""


def card(plan: Plan, manifest: Mapping[str, Any]) -> str:
    """Return the card of the result of a plan, as Markdown for the hub, given its manifest."""
    noun = "adapter" if plan.is_adapter else "model"
    task_with_head = ""
    if plan.heads:
        task_with_head = json.dumps(next(iter(plan.heads)))
    energy = ""
    if plan.settings.rank is not None:
        energy = sentence_about_energy(plan, manifest["energy_kept"])
    # Names of folders and tasks are text, and no HTML; in code, they stay as they are.
    text = {
        "number": counted(len(plan.names), noun),
        "method": plan.method.label,
        "made": "Made for" if plan.is_adapter else "Made from",
        "base": plan.base.label,
        "citation": plan.method.citation,
        "noun": noun,
        "coverage": str(plan.coverage).removeprefix("merging "),
        "vocabulary": str(plan.vocabulary) if plan.vocabulary.grown else "",
        "energy": energy,
    }
    filled = ModelCard.from_template(
        ModelCardData(**_metadata(plan)),
        template_str=_TEMPLATE,
        **{key: escape_html(value) for key, value in text.items()},
        names=list(map(escape_html, plan.names)),
        warnings=list(map(escape_html, manifest["warnings"])),
        loading="\n".join(_loading_adapter(plan) if plan.is_adapter else _loading(plan)),
        task_with_head=task_with_head,
        recipe=_yaml(_recipe(plan, manifest)),
        options="" if plan.is_adapter else f"--base {plan.base.label} ",
    )
    return f"{filled}\n"


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


def _metadata(plan: Plan) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    if plan.is_adapter:
        if _HUB_NAME.fullmatch(plan.base.label):
            metadata["base_model"] = plan.base.label
            metadata["base_model_relation"] = "adapter"
        metadata["library_name"] = "peft"
        metadata["tags"] = [*_TAGS, "lora"]
        return metadata
    # A dict has models in merging order, and once though one may come at two revisions.
    hub_names: dict[str, None] = {}
    for label in (plan.base.label, *plan.names):
        match = _HUB_NAME.fullmatch(label)
        if match:
            hub_names[match[1]] = None
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


def _loading_adapter(plan: Plan) -> Iterator[str]:
    """Yield the lines that load the base and an adapter on it."""
    config = json.loads(plan.small_files[ADAPTER_CONFIG])
    mapped = (config.get("auto_mapping") or {}).get("base_model_class")
    kind = getattr(auto_class(config), "__name__", mapped or "AutoModel")
    if not hasattr(transformers, kind):
        return
    yield "from peft import PeftModel"
    yield f"from transformers import {kind}\n"
    yield f'base = {kind}.from_pretrained({json.dumps(plan.base.label)}, dtype="auto")'
    yield 'model = PeftModel.from_pretrained(base, "THIS_FOLDER")'


def _recipe(plan: Plan, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe of the last merge, which names local folders without their directories."""
    options = dict(manifest["settings"])
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
