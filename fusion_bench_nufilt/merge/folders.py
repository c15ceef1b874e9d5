"""Merge checkpoint folders tensor by tensor, and describe the result: in a manifest, and in a model
card to people and to the hub.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from huggingface_hub.repocard import metadata_load
from torch import Tensor

from fusion_bench_nufilt.models.architecture import Layer
from fusion_bench_nufilt.models.checkpoint import ADAPTER_CONFIG
from fusion_bench_nufilt.utils.devices import give_back_freed_memory, map_layers
from fusion_bench_nufilt.utils.files import (
    CARD,
    disk_full_errors,
    escape_html,
    existing_parent,
    is_writable,
    size_text,
)
from fusion_bench_nufilt.utils.manifest import (
    STATE_FILE,
    in_one_line,
    merge_differences,
    read_manifest,
    tasks_of,
    verify_files,
    write_files,
    write_manifest,
)
from fusion_bench_nufilt.utils.tensors import TensorInfo, end_of_file

from .checks import check_contents, check_same_base, verify_merged
from .engine import MergedLayer, merge_layers
from .inputs import (
    digests_of_inputs,
    edited_inputs,
    refuse_changed,
    refuse_edited,
    unchanged_records,
)
from .other_params import NOT_FINITE, head_files, write_other
from .output import Output, Record, clear_work_folder, refuse_long_name, work_folder
from .plan import Plan
from .planned import (
    PlannedLayers,
    disk_bytes,
    serialize_layer,
    state_layout,
)

log = logging.getLogger(__name__)


def merge_folders(
    plan: Plan, out: Path, progress: Callable[[int, int], object] | None = None
) -> Path:
    """Carry out a plan, and return ``out``.

    A tensor goes through all tasks before the next one is read, so that each input is read once,
    after the samples for the plan and for strengths, and nothing in between is stored. A run that
    was interrupted goes on where it stopped.

    Args:
        plan: from :func:`fusion_bench_nufilt.merge.plan_merge`.
        out: the folder to make.
        progress: called with the number of finished tensors and the number of all tensors.

    Raises:
        ValueError: ``out`` exists, the disk has no room, or a tensor has NaN or infinite values;
            the message names it.
    """
    # Ahead of any download: a result that is finished needs no weights.
    if check_output(plan, out):
        clear_work_folder(out)  # the run may have been killed before it cleaned up
        return out
    warnings = [*plan.warnings, *_fetch(plan)]
    check_disk(plan, out)
    files = plan.small_files | head_files(plan)
    state_header, state_places = state_layout(plan)
    layout = dict(plan.headers)
    if state_header:
        layout[STATE_FILE] = state_header
    headers = {file: (header, end_of_file(header)) for file, header in layout.items()}
    # One for all, since it measures the strengths of tasks, where they have any, at most once.
    layers = PlannedLayers(plan)
    unchanged = partial(unchanged_records, layers)
    with (
        disk_full_errors(out, f" ({size_text(disk_bytes(plan))} in all)"),
        closing(Output(out, plan.description, headers, unchanged)) as output,
    ):
        _merge(layers, state_places, output, progress or (lambda done, total: None))
        refuse_changed(layers, output.done)
        digests = digests_of_inputs(record["read"] for record in output.done.values())
        refuse_edited(plan, digests)
        manifest = _manifest(plan, output.done, digests, warnings)
        energy_kept = manifest.get("energy_kept")
        card = model_card(plan, manifest["warnings"], energy_kept)
        if energy_kept is not None and plan.settings.rank is not None:
            log.info("%s", _sentence_about_energy(plan, energy_kept))
        write_files(output.model, {**files, CARD: card.encode()})
        # The last of the files, since it has the digests of all others.
        write_manifest(output.model, manifest)
        output.finish()
    return out


def check_output(plan: Plan, out: Path) -> bool:
    """Return whether ``out`` is this very merge; refuse a folder that holds anything else, and a
    result that is damaged.
    """
    refuse_long_name(out)
    refuse_inside(plan, out)
    if out.exists() or out.is_symlink():
        remedy = "remove it or name another folder"
        manifest = read_manifest(out, remedy)
        if not manifest:
            # What is no result is somebody's, and not for this command to have removed.
            if out.is_dir() and any(out.iterdir()):
                remedy = "name another folder"
            raise ValueError(f"'{out}' exists: {remedy}")
        description = plan.description
        saved = {key: manifest.get(key) for key in description}
        differing = merge_differences(saved, description)
        if differing:
            raise ValueError(f"'{out}' exists: {in_one_line(differing)}; {remedy}")
        advice = "remove it, and the same command makes it again"
        verify_files(out, manifest, advice, digests=plan.settings.verify)
        if plan.settings.verify:
            edited = edited_inputs(plan, manifest["inputs"])
            if edited:
                raise ValueError(
                    f"'{out}' exists: {edited[0]} '{plan.models[edited[0]].source.label}' was "
                    f"edited inside a tensor; {remedy}"
                )
        return True
    folder = existing_parent(out)
    if not is_writable(folder):
        raise ValueError(f"'{out}' can't be made: '{folder}' is no folder that can be written to")
    return False


def refuse_inside(plan: Plan, out: Path) -> None:
    """Refuse a folder for results that is or lies in a model that is read, or whose work folder
    holds such a model.
    """
    resolved_out = out.resolve()
    work = work_folder(resolved_out)
    for checkpoint in plan.checkpoints:
        paths = [file.path.resolve() for file in checkpoint.opened.values()]  # may be links
        for path in [checkpoint.folder.resolve(), *paths]:
            if path == resolved_out or path in resolved_out.parents:
                raise ValueError(
                    f"'{out}' is inside '{checkpoint.name}', which is not written to: name another "
                    "folder"
                )
            if work == path or work in path.parents:
                raise ValueError(
                    f"'{checkpoint.name}' is inside '{work}', where '{out}' is to grow: move it "
                    "elsewhere"
                )


def check_disk(plan: Plan, out: Path) -> None:
    """Raise a ValueError if the disk has no room for the result, besides what an interrupted run
    wrote of it.
    """
    folder = existing_parent(out)
    needed = disk_bytes(plan)
    free = shutil.disk_usage(folder).free
    for path in work_folder(out).rglob("*.safetensors"):
        if path.is_file():
            # Blocks of 512 bytes: a file has its full size from the start, with holes to fill.
            free += 512 * path.stat().st_blocks
    if needed > free:
        raise ValueError(
            f"the result takes {size_text(needed)} and '{folder}' has {size_text(free)} left"
        )


def _fetch(plan: Plan) -> list[str]:
    """Download the weights that are still on the hub, and return the warnings that only they can
    tell.
    """
    remote = [checkpoint for checkpoint in plan.checkpoints if checkpoint.remote]
    for checkpoint in remote:
        checkpoint.fetch()
    plan.vocabulary.check()
    if not remote:
        return []
    warnings = []
    texts = [*check_contents(plan), *verify_merged(plan), *check_same_base(plan)]
    for text in texts:
        # The plan has checked the models that were on this disk, and said what it found.
        if text not in plan.warnings:
            warnings.append(text)
            log.warning("%s", text)
    return warnings


def _merge(
    source: PlannedLayers,
    state_places: Mapping[str, TensorInfo],
    output: Output,
    progress: Callable[[int, int], object],
) -> None:
    plan = source.plan
    done = output.done
    total = len(plan.layers) + len(plan.others)
    if done:
        log.info("going on: %d of %d tensors are done", len(done), total)
    layers = [layer for layer in plan.layers if layer.param not in done]
    others = [param for param in plan.others if param not in done]

    def write_layer(merged: MergedLayer[Layer], merged_weight: Callable[[], Tensor]) -> None:
        output.add(merged.record, serialize_layer(plan, state_places, merged, merged_weight))

    def write_other_param(param: str) -> None:
        write_other(plan, param, state_places, output)

    if plan.settings.engine == "ray":
        from .distributed import merge_on_cluster

        merged_layers = merge_on_cluster(plan, layers, output.add)
    else:
        # Workers of a cluster do this in processes of their own.
        give_back_freed_memory()
        merged_layers = merge_layers(source, layers, write_layer)
    written_others = map_layers(write_other_param, others, torch.device("cpu"))
    for written in (merged_layers, written_others):
        # An error here, such as Ctrl-C, must leave no thread that writes when the lock is released.
        with closing(written):
            for _ in written:
                progress(len(done), total)


def _manifest(
    plan: Plan, done: Mapping[str, Record], digests: Mapping[str, str], warnings: Sequence[str]
) -> dict[str, Any]:
    """Return the manifest's content: what the result depends on, and what became of it.

    ``digests`` are those of all that was read of the inputs.
    """
    public_warnings = list(warnings)
    for checkpoint in plan.checkpoints:  # without the user's directories
        name = f"'{checkpoint.name}'"
        label = f"'{checkpoint.label}'"
        public_warnings = [text.replace(name, label) for text in public_warnings]
    for param in plan.others:
        if "not_finite" in done[param]:
            public_warnings.append(NOT_FINITE % done[param]["not_finite"])
    averaged = len(plan.averaged)
    tensors = {
        "merged": len(plan.layers),
        "averaged": averaged,
        "copied": len(plan.others) - averaged,
    }
    description = plan.description
    for role, digest in digests.items():
        description["inputs"][role]["read"] = digest
    own_tasks = [description["inputs"][f"task {number}"] for number in range(len(plan.tasks))]
    about_adapter = {}
    if plan.is_adapter:
        about_adapter = {"base_model": plan.base.label, "energy_kept": _energy_kept(plan, done)}
    return {
        "method": plan.method.label,
        **description,
        **about_adapter,
        "task_inputs": [*tasks_of(plan.before), *own_tasks],
        "without_effect": plan.without_effect,
        "coverage": plan.coverage.as_dict(),
        "linear_layers_known_from": plan.origin,
        "tensors": tensors,
        "warnings": public_warnings,
        "layers": {layer.name: done[layer.param]["reports"] for layer in plan.layers},
    }


def _energy_kept(plan: Plan, done: Mapping[str, Record]) -> dict[str, Any]:
    """Return what share of the squared norm of the update an adapter has, in all and of each
    tensor.
    """
    names = {layer.param: layer.name for layer in plan.layers}
    shares = {}
    kept_of_all = 0.0
    whole_of_all = 0.0
    for param in plan.adapter_keys:
        kept, whole = done[param]["energy"]
        shares[names.get(param, param)] = kept / whole if whole else 1.0
        kept_of_all += kept
        whole_of_all += whole
    share_of_all = kept_of_all / whole_of_all if whole_of_all else 1.0
    return {"all": share_of_all, "tensors": shares}


def model_card(
    plan: Plan, warnings: Sequence[str], energy_kept: Mapping[str, Any] | None = None
) -> str:
    """Return the model card for the result of a plan, with the warnings in its manifest and, of an
    adapter, the energy that is kept, as Markdown for the hub.
    """
    front_matter = f"---\n{_yaml(_metadata(plan))}---"
    paragraphs = list(_paragraphs(plan, warnings))
    if energy_kept is not None and plan.settings.rank is not None:
        paragraphs.insert(-4, _sentence_about_energy(plan, energy_kept))
    blocks = [front_matter]
    for paragraph in paragraphs:
        # Names of folders and tasks are text, and no HTML; in code, they stay as they are.
        if not paragraph.startswith(("```", "    ")):
            paragraph = "\n".join(map(escape_html, paragraph.split("\n")))
        blocks.append(paragraph)
    return "\n\n".join(blocks) + "\n"


def _sentence_about_energy(plan: Plan, energy_kept: Mapping[str, Any]) -> str:
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
    if plan.is_adapter:
        metadata_of_adapter: dict[str, Any] = {}
        if _HUB_NAME.fullmatch(plan.base.label):
            metadata_of_adapter["base_model"] = plan.base.label
            metadata_of_adapter["base_model_relation"] = "adapter"
        metadata_of_adapter["library_name"] = "peft"
        return {**metadata_of_adapter, "tags": [*_TAGS, "lora"]}
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
        return metadata_load(card) or {}
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}


def _paragraphs(plan: Plan, warnings: Sequence[str]) -> Iterator[str]:
    base = plan.base.label
    noun = "adapter" if plan.is_adapter else "model"
    number_of_models = f"1 {noun}" if len(plan.names) == 1 else f"{len(plan.names)} {noun}s"
    made_from = f"Made for {base}" if plan.is_adapter else f"Made from {base}"
    yield f"# {number_of_models} merged with {plan.method.label}"
    yield (
        f"{made_from} by {plan.method.citation},\nwithout data and without training, of these "
        f"{noun}s in this order:"
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
    yield f"To merge one more {noun} into this one:"
    if plan.is_adapter:
        yield "    nufilt merge --merged THIS_FOLDER --task NEW --out OUT"
    else:
        yield f"    nufilt merge --base {base} --merged THIS_FOLDER --task NEW --out OUT"


def _loading(plan: Plan) -> Iterator[str]:
    """Yield the lines that load the model and its tokenizer or processor; none if transformers
    lacks the class.
    """
    if plan.is_adapter:
        yield from _loading_adapter(plan)
        return
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
