"""What `nufilt merge` does: it merges by a recipe file, KEY=VALUE words and options."""

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import BeforeValidator, ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table
from typing_extensions import TypedDict
from yaml import YAMLError

from fusion_bench_nufilt.merge.checks import check_contents, kept_from_base
from fusion_bench_nufilt.merge.folders import check_disk, check_output, merge_folders
from fusion_bench_nufilt.merge.output import refuse_long_name, work_folder
from fusion_bench_nufilt.merge.plan import Plan
from fusion_bench_nufilt.merge.planned import disk_bytes, peak_memory
from fusion_bench_nufilt.merge.planning import plan_merge
from fusion_bench_nufilt.methods.options import Settings, TargetConfig
from fusion_bench_nufilt.methods.registry import METHODS, find_method
from fusion_bench_nufilt.models.checkpoint import ADAPTER_CONFIG, AdapterConfig, Checkpoint
from fusion_bench_nufilt.models.source import format_names
from fusion_bench_nufilt.utils.files import (
    Count,
    Input,
    Manifest,
    counted,
    escape_markup,
    parse_json,
    printable,
    read_yaml,
    size_text,
    validate,
)
from fusion_bench_nufilt.utils.manifest import is_same_model, read_manifest
from fusion_bench_nufilt.utils.options import (
    split_options,
    unknown,
    with_current_names,
    with_scope,
)
from fusion_bench_nufilt.utils.overrides import key_value

from .terminal import SIZES, bars_on, interruptible, warn

_KINDS = [*METHODS.option_kinds(), TargetConfig, Settings]
_SETTINGS = [field.name for field in chain.from_iterable(map(fields, _KINDS))]
MODELS = ("base", "tasks", "merged", "out", "inputs")
# What a manifest may not choose: where to compute, where to connect, and what to write.
_OF_THE_USER = {*with_scope((Settings,), "run"), *MODELS}
_TASK = re.compile(r"task (0|[1-9]\d{0,5})")


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
    share = (read_manifest(folder) or Manifest())["energy_kept"]["all"]
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
    out = Path(models["out"]).expanduser()  # the shell does not expand the ~ of --out=~/merged
    refuse_long_name(out)
    plan = plan_merge(
        models.get("base"), models["tasks"], models.get("merged"), *options, method=method
    )
    plan = replace(plan, promised=models.get("inputs", {}))
    return replace(plan, warnings=[*plan.warnings, *check_contents(plan)]), out


def _as_json(plan: Plan, out: Path) -> dict[str, Any]:
    return {
        "inputs": {role: model.source.name for role, model in plan.models.items()},
        "out": str(out),
        "first_step": plan.first_step,
        "settings": plan.options(),
        "layers": [layer.name for layer in plan.layers],
        "coverage": plan.coverage.as_dict(),
        "memory_bytes": peak_memory(plan),
        "disk_bytes": disk_bytes(plan),
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
    num_averaged = len(plan.averaged)
    yield "averaged", f"{counted(num_averaged, 'tensor')} (other_params={other_params})"
    if plan.heads:
        heads = [f"{task} ({', '.join(head['modules'])})" for task, head in plan.heads.items()]
        yield "heads", f"kept for each task: {', '.join(heads)}"
    if not plan.is_adapter:
        yield "copied", f"{counted(len(plan.other_keys) - num_averaged, 'tensor')}, bit by bit"
    unchanged = kept_from_base(plan)
    if unchanged:
        loss = f"whatever a task changed in {counted(len(unchanged), 'tensor')} is left out"
        if not set(unchanged).isdisjoint(plan.vocabulary.params):
            loss += ", but for rows of new tokens"
        remedy = ""
        if other_params != "mean":
            remedy = "; other_params=mean averages them"
        yield "", f"{loss}: {format_names(unchanged)}{remedy}"
    if plan.vocabulary.params:
        yield "tokenizer", str(plan.vocabulary)
    if plan.settings.engine == "local":
        yield "memory", f"{size_text(peak_memory(plan))} at most"
    else:
        from fusion_bench_nufilt.merge.distributed import cluster_nodes

        workers_by_slots = Counter(node.slots for node in cluster_nodes(plan))
        for slots, number in workers_by_slots.items():
            memory = f"{size_text(peak_memory(plan, slots))} at most"
            yield "workers", f"{number}, each on {slots} batches of layers at a time in {memory}"
    yield "disk", f"{size_text(disk_bytes(plan))} in {out}"


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
    inputs: dict[str, Input]  # of a manifest: what its models are known by, by their roles
    method: str | None
    settings: dict[Any, Any] | None


class _Result(TypedDict):
    """What a manifest tells about how its result is made again."""

    inputs: dict[str, Input]
    step: Count
    settings: NotRequired[dict[str, Any]]
    without_effect: NotRequired[dict[str, Any]]


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
    named = with_current_names(named)
    if "inputs" in recipe:
        # A model that the user names need not be the one that the manifest knows.
        inputs = {}
        for role, model in recipe["inputs"].items():
            option = "tasks" if _TASK.fullmatch(role) else role
            if option not in named:
                inputs[role] = model.copy()
        # With other settings, other tensors may be read.
        if not named.keys() <= {"out", *with_scope((Settings,), "run")}:
            for model in inputs.values():
                model.pop("read", None)
        recipe["inputs"] = inputs
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
    """Read a YAML recipe or a manifest; a ValueError names the file and the field that is wrong."""
    if not file.is_file():
        raise ValueError(
            f"there is no recipe file '{file}'; what is no file must be of the form KEY=VALUE"
        )
    try:
        content: Any
        if file.suffix == ".json":
            content = parse_json(file.read_bytes(), object)
        else:
            content = read_yaml(file)
        if isinstance(content, dict) and "inputs" in content:
            content = _recipe_of(validate(content, _Result), file.absolute().parent)
        # Both commands read YAML files of merges, which are easily taken for each other.
        elif isinstance(content, dict) and "merge_method" in content:
            raise ValueError(f"it is a file of mergekit, run by: nufilt mergekit {file} OUT")
        recipe = validate(content, _Recipe)
        settings = recipe.pop("settings", None) or {}
        # Once more, since a model's name may stand under settings, too.
        return with_current_names(validate({**recipe, **settings}, _Recipe))
    except (YAMLError, ValueError, OSError, RecursionError) as error:
        raise ValueError(
            f"the recipe '{file}' can't be read: {' '.join(str(error).split())}"
        ) from None


def _recipe_of(result: _Result, folder: Path) -> dict[str, Any]:
    """Return the recipe of a result in a folder, beside which its models are looked for, too."""
    names = {}
    tasks = {}
    for role, model in result["inputs"].items():
        if "name" not in model:
            raise ValueError(f"field 'inputs.{role}.name': field required")
        names[role] = find_model(model, folder.parent)
        match = _TASK.fullmatch(role)
        if match:
            tasks[int(match[1])] = names[role]
    settings = given_settings(result)
    recipe: dict[str, Any] = {}
    if "base" in names:
        recipe["base"] = names["base"]
    elif not settings.get("adapter"):
        raise ValueError("field 'inputs.base': field required")
    if "merged" in names:
        recipe["merged"] = names["merged"]
    # By number: among sorted names, task 10 comes ahead of task 2.
    recipe["tasks"] = [tasks[number] for number in sorted(tasks)]
    recipe["step"] = result["step"] - len(tasks) + 1  # the number of its first task
    recipe["inputs"] = result["inputs"]
    recipe["settings"] = {key: settings[key] for key in settings if key not in _OF_THE_USER}
    return recipe


def settings_to_continue(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base and the settings of the model to go on from, except what the user says in a
    recipe.

    If that is another method, the earlier one's options are left out.
    """
    merged = recipe.get("merged")
    if not merged:
        return {}
    folder = Checkpoint.open(merged).folder
    manifest = read_manifest(folder) or Manifest()
    before = given_settings(manifest)
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


def given_settings(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a manifest as they were given."""
    settings = {**manifest.get("settings", {}), **manifest.get("without_effect", {})}
    return with_current_names(settings)


def _base(merged: str, folder: Path, manifest: Manifest) -> str:
    """Return the base of a merged model, if it can be found."""
    base = manifest.get("inputs", {}).get("base", {})
    if "name" not in base:
        raise ValueError(f"--base must be given: '{merged}' does not say what it was made from")
    name = find_model(base, folder.absolute().parent)
    if Path(name).is_dir() or "/" in base["name"]:  # the hub's names have a slash
        return name
    raise ValueError(
        f"--base must be given: '{name}', which '{merged}' was made from, is neither here nor "
        "near it"
    )


def find_model(model: Input, beside: Path) -> str:
    """Return the name of a model that a manifest names: on the hub at the same revision, or a
    folder here, beside the result or one folder away from that. Of several, it is the one that has
    the content.

    A ValueError refuses the path of a folder elsewhere, which none of our manifests has.
    """
    name = model["name"]
    parts = name.partition("@")[0].split("/")
    if len(parts) > 2 or name.startswith("~") or not {"", ".", ".."}.isdisjoint(parts):
        raise ValueError(
            f"a manifest names a model '{printable(name)}', which is neither the name of a folder "
            "nor of a model on the hub: name your models by --base and --task"
        )
    if "revision" in model:
        # A branch in the name moves; the revision stays what it is.
        return f"{name.partition('@')[0]}@{model['revision']}"
    # A manifest names folders without their directories, which are the user's own.
    folders = [Path(), beside, beside.absolute().parent]
    if "/" not in name:
        folders += sorted(path for path in beside.glob("*/") if (path / name).is_dir())
    places: dict[Path, Path] = {}
    for folder in folders:
        if (folder / name).is_dir():
            places.setdefault((folder / name).resolve(), folder / name)
    if not places:
        return name
    return str(_with_content_of(model, list(places.values())))


def _with_content_of(model: Input, folders: Sequence[Path]) -> Path:
    """Return the first folder with the content of a model, or else the first."""
    if len(folders) == 1:
        return folders[0]
    for folder in folders:
        try:
            identity = Checkpoint.open(str(folder)).identity()
        except (ValueError, OSError):  # which holds no model
            continue
        if is_same_model(identity, model):
            return folder
    return folders[0]
