"""What `nufilt merge` does: it merges by a recipe file, KEY=VALUE words and options."""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table
from typing_extensions import TypedDict
from yaml import YAMLError

from fusion_bench_nufilt.merge.checks import kept_from_base
from fusion_bench_nufilt.merge.folders import check_disk, check_output, merge_folders
from fusion_bench_nufilt.merge.layer_jobs import peak_memory
from fusion_bench_nufilt.merge.output import work_folder
from fusion_bench_nufilt.merge.plan import Plan
from fusion_bench_nufilt.merge.planning import plan_merge
from fusion_bench_nufilt.methods.options import Settings, TargetConfig
from fusion_bench_nufilt.methods.registry import METHODS, find_method
from fusion_bench_nufilt.models.checkpoint import ADAPTER_CONFIG, AdapterConfig, Checkpoint
from fusion_bench_nufilt.models.source import format_names
from fusion_bench_nufilt.utils.files import (
    CARD,
    Input,
    Manifest,
    counted,
    escape_markup,
    expanded,
    parse_json,
    printable,
    read_yaml,
    size_text,
    validate,
)
from fusion_bench_nufilt.utils.manifest import base_of, is_same_model, read_manifest
from fusion_bench_nufilt.utils.options import (
    split_options,
    unknown,
    with_scope,
)
from fusion_bench_nufilt.utils.overrides import key_value

from .terminal import SIZES, bars_on, interruptible, warn

_KINDS = [*METHODS.option_kinds(), TargetConfig, Settings]
_SETTINGS = [field.name for field in chain.from_iterable(map(fields, _KINDS))]
MODELS = ("base", "tasks", "merged", "out")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@.+)?")


def run(
    console: Console,
    words: Sequence[str],
    typed: Mapping[str, Any],
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Plan a merge, show the plan, and carry it out unless this is a dry run."""
    if as_json and not dry_run:
        raise ValueError("--json goes with --dry-run: a merge leaves its result in OUT/nufilt.json")
    recipe = gather(words, typed, ["method", *_SETTINGS])
    taken_over = settings_to_continue(recipe)
    # What the user says is left out of what is taken over, so that the user wins.
    plan, folder = _plan({**recipe, **taken_over})
    if not as_json:
        table = Table(show_header=False, box=None, title="Plan", title_justify="left")
        for key, value in _rows(plan, folder, taken_over):
            table.add_row(key, escape_markup(value))
        output = Console() if dry_run else console  # of a dry run, the plan is the result
        output.print(table, soft_wrap=False)
        warn(console, plan.warnings)
    if dry_run:
        finished = check_output(plan, folder)
        # As in a merge: a result that is finished needs no more room.
        if not finished:
            check_disk(plan, folder)
    else:
        finished = _carry_out(console, plan, folder)
    if as_json:
        print(json.dumps(_as_json(plan, folder), indent=1))
    elif finished:
        _end(console, plan, folder, "finished by an earlier run, nothing to do")
    elif not dry_run:
        _end(console, plan, folder, _result(plan, folder))


def _result(plan: Plan, folder: Path) -> str:
    merged = f"{counted(len(plan.layers), 'layer')} merged"
    if not plan.is_adapter:
        return merged
    share = read_manifest(folder)["energy_kept"]["all"]
    rank = parse_json(plan.small_files[ADAPTER_CONFIG], AdapterConfig)["r"]
    return f"{merged} into an adapter of rank {rank}, {share:.2%} of the update's energy"


def _end(console: Console, plan: Plan, folder: Path, result: str) -> None:
    console.print(f"[bold]{escape_markup(str(folder))}[/bold]: step {plan.last_step}, {result}")


def _plan(recipe: dict[str, Any]) -> tuple[Plan, Path]:
    for name in SIZES:
        if recipe.get(name) is None:
            continue
        try:
            recipe[name] = TypeAdapter(ByteSize).validate_python(recipe[name])
        except ValidationError:
            raise ValueError(f"{name} must be a size such as 4GB, got '{recipe[name]}'") from None
    method = recipe.pop("method", "nufilt")
    kind = find_method(method)
    options, models = split_options(
        (kind.Options, TargetConfig, Settings), {**kind.defaults, **recipe}
    )
    for name in models:
        if name not in MODELS:
            raise ValueError(f"'{name}' is not an option of method={method}")
    out = expanded(models["out"])
    plan = plan_merge(
        models.get("base"), models["tasks"], models.get("merged"), *options, method=method
    )
    return plan, out


def _as_json(plan: Plan, out: Path) -> dict[str, Any]:
    return {
        "inputs": {role: model.source.name for role, model in plan.models.items()},
        "out": str(out),
        "first_step": plan.first_step,
        "settings": plan.options(),
        "layers": [layer.name for layer in plan.layers],
        "coverage": plan.coverage.as_dict(),
        "memory_bytes": peak_memory(plan),
        "disk_bytes": plan.disk_bytes,
        "warnings": plan.warnings,
    }


def _carry_out(console: Console, plan: Plan, out: Path) -> bool:
    """Carry out a plan, and return whether there was nothing left to do."""

    def show(written: int, total: int) -> None:
        bar.total = total
        bar.update(written - bar.n)

    with (
        interruptible(console, str(work_folder(out))),
        bars_on(console)(desc="Merging", unit="tensor") as bar,
    ):
        merge_folders(plan, out, show)
        return bar.total is None  # nothing was written


def _rows(plan: Plan, out: Path, taken_over: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table that shows a plan: a heading, and what it says."""
    yield "base", plan.base.name + (", not read" if plan.base.is_absent else "")
    if plan.merged is not None:
        beside = ", with the state beside it" if plan.state else ""
        yield "merged so far", f"{plan.merged.source.name}{beside}"
    if taken_over:
        # Of the settings, those that would be others without the earlier merge.
        defaults: dict[str, Any] = {"base": taken_over.get("base"), "adapter": plan.is_adapter}
        for option in chain(*map(fields, (plan.method.Options, TargetConfig, Settings))):
            defaults[option.name] = option.default
        defaults |= plan.method.defaults
        changed = []
        for name, value in taken_over.items():
            if value != defaults.get(name):
                changed.append(f"{name} {value}")
        yield "taken over", ", ".join(changed)
    for number, task in enumerate(plan.tasks, plan.first_step):
        yield f"step {number}", f"{task.source.name} ({task.kind})"
    yield "method", str(plan.method)
    layers = plan.layers
    first_and_last = f"{layers[0].name} … {layers[-1].name}"
    known_from = f"known from {plan.layers_known_from}"
    yield "merged", f"{counted(len(layers), 'layer')}, {first_and_last} ({known_from})"
    yield "", f"{plan.coverage.merged[1]:.1%} of all elements"
    if plan.coverage.left_out:
        yield "not merged", f"matrices in blocks: {plan.coverage.names_left_out}"
    other_params = plan.targets.other_params
    num_changed = len(plan.averaged)
    yield "changed", f"{counted(num_changed, 'other tensor')} (other_params={other_params})"
    if plan.heads:
        heads = [f"{task} ({', '.join(head['modules'])})" for task, head in plan.heads.items()]
        yield "heads", f"kept for each task: {', '.join(heads)}"
    if not plan.is_adapter:
        holder = "the base" if plan.merged is None else f"'{plan.merged.source.name}'"
        num_kept = len(plan.other_keys) - num_changed
        yield "kept", f"{counted(num_kept, 'tensor')}, as {holder} has them"
    unchanged = kept_from_base(plan)
    if unchanged:
        loss = f"whatever a task changed in {counted(len(unchanged), 'tensor')} is left out"
        if not set(unchanged).isdisjoint(plan.vocabulary.grown):
            loss += ", but for rows of new tokens"
        remedy = ""
        if other_params != "mean":
            remedy = "; other_params=mean averages them"
        yield "", f"{loss}: {format_names(unchanged)}{remedy}"
    if plan.vocabulary.grown:
        yield "tokenizer", str(plan.vocabulary)
    if plan.settings.engine == "local":
        yield "memory", f"{size_text(peak_memory(plan))} at most"
    else:
        from fusion_bench_nufilt.merge.distributed import slots_of

        memory = f"{size_text(peak_memory(plan, 1))} at most"
        yield "workers", f"{slots_of(plan).number}, each on a batch of layers at a time in {memory}"
    yield "disk", f"{size_text(plan.disk_bytes)} in {out}"


def _as_list(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    return value


class _Recipe(TypedDict, total=False):
    """A recipe. Settings may be under ``settings`` or beside the models; their dataclasses check
    them.
    """

    base: str | None
    tasks: Annotated[list[str], BeforeValidator(_as_list)]
    merged: str | None
    out: str | None
    method: str | None
    settings: dict[Any, Any] | None


def gather(
    words: Sequence[str], typed: Mapping[str, Any], settings: Collection[str]
) -> dict[str, Any]:
    """Return all that the user says about a merge, by name.

    One recipe file, ``KEY=VALUE`` words in Hydra's grammar and ``typed`` options win in this order.
    A ValueError says which name is neither in ``MODELS`` nor in ``settings``, or what is wrong with
    a value or the file.
    """
    # isfile, since Path.is_file raises an OSError where a word is too long for a name.
    files = [word for word in words if "=" not in word or os.path.isfile(word)]
    if len(files) > 1:
        raise ValueError(
            f"one recipe file at a time, got {', '.join(files)}; models are named by --base and "
            "--task"
        )
    recipe: dict[str, Any] = {}
    if files:
        recipe = read_recipe(Path(files[0]))
    named = dict(key_value(word) for word in words if word not in files)
    named.update(typed)
    recipe.update(named)
    validate(recipe, _Recipe)
    names = [*MODELS, *settings]
    for name in recipe:
        if name not in names:
            raise ValueError(unknown("option", str(name), names))
    if "tasks" in recipe:
        recipe["tasks"] = _as_list(recipe["tasks"])
    needed = ["tasks", "out"]
    # The manifest of a merged model names the base, and of an adapter nothing of it is read.
    if not recipe.get("merged") and not recipe.get("adapter"):
        needed.insert(0, "base")
    missing = [name for name in needed if not recipe.get(name)]
    if missing:
        options = " and ".join(f"--{name.removesuffix('s')}" for name in missing)
        raise ValueError(f"{options} must be given, or said in a recipe file")
    return recipe


def read_recipe(file: Path) -> dict[str, Any]:
    """Read a YAML recipe; a ValueError names the file and the field that is wrong."""
    if not file.is_file():
        raise ValueError(
            f"there is no recipe file '{file}'; what is no file must be of the form KEY=VALUE"
        )
    try:
        content: Any = read_yaml(file)
        if isinstance(content, dict) and "inputs" in content:
            raise ValueError(f"it describes a result, in whose {CARD} is the recipe")
        # Both commands read YAML files of merges, which are easily taken for each other.
        if isinstance(content, dict) and "merge_method" in content:
            raise ValueError(f"it is a file of mergekit, run by: nufilt mergekit {file} OUT")
        recipe = validate(content, _Recipe)
        settings = recipe.pop("settings", None) or {}
        # Once more, since a model's name may stand under settings, too.
        return dict(validate({**recipe, **settings}, _Recipe))
    except (YAMLError, ValueError, OSError, RecursionError) as error:
        raise ValueError(
            f"the recipe '{file}' can't be read: {' '.join(str(error).split())}"
        ) from None


def settings_to_continue(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base and the settings of the model to go on from, except what the user says in a
    recipe.

    If that is another method, the earlier one's options are left out.
    """
    merged = recipe.get("merged")
    if not merged:
        return {}
    folder = Checkpoint.open(merged).folder
    manifest = read_manifest(folder)
    before = manifest.get("settings", {})
    settings: dict[str, Any] = {}
    # In a run of fusion_bench, the key is layer_method.
    method = str(before.get("method", before.get("layer_method", "")))
    if method:
        settings["method"] = method
        kinds: list[type] = [TargetConfig, Settings]
        if recipe.get("method", method) == method:
            kinds.insert(0, find_method(method).Options)
        for name in with_scope(kinds, "stream", "merge"):
            if name in before:
                settings[name] = before[name]
        if settings.get("tokenizer") not in ("base", "union"):  # it names a task
            settings.pop("tokenizer", None)
        settings = {name: value for name, value in settings.items() if name not in recipe}
    makes_adapter = recipe.get("adapter", settings.get("adapter"))
    # Of an adapter, the base is an input only if weights of it were read.
    needs_base = not makes_adapter or "base" in manifest.get("inputs", {})
    if needs_base and not recipe.get("base"):
        settings["base"] = _base(merged, folder, manifest)
    return settings


def _base(merged: str, folder: Path, manifest: Manifest) -> str:
    """Return the base of a merged model: its name on the hub, or the folder that has its content,
    where a run had it, here, or beside the model.
    """
    base = base_of(manifest) or Input()
    name = base.get("source", base.get("name"))  # a run has all of the path
    if isinstance(name, dict):
        name = name.get("pretrained_model_name_or_path")
    if not isinstance(name, str):
        raise ValueError(f"--base must be given: '{merged}' does not say what it was made from")
    if "revision" in base:
        # A branch in the name moves; the revision stays what it is.
        return f"{name.partition('@')[0]}@{base['revision']}"
    label = Path(name).name
    for place in (expanded(name), Path(label), folder.absolute().parent / label):
        # A manifest from elsewhere may name any folder of the user's.
        if os.path.isdir(place) and _is_base(place, base):
            return str(place)
    if _HUB_NAME.fullmatch(name):
        return name
    raise ValueError(
        f"--base must be given: '{printable(name)}', which '{merged}' was made from, is neither "
        "here nor beside it"
    )


def _is_base(folder: Path, base: Input) -> bool:
    try:
        identity = Checkpoint.open(str(folder)).identity()
    except (ValueError, OSError):  # which holds no model
        return False
    return is_same_model(identity, base) is True
