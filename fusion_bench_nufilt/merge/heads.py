"""The heads of classifiers: find them in the tasks, keep them beside the merged model, put them
back on it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load, load_file, save
from torch import nn

from fusion_bench_nufilt.models import Heads
from fusion_bench_nufilt.models.architecture import Architecture
from fusion_bench_nufilt.models.checkpoint import Checkpoint
from fusion_bench_nufilt.models.heads import labels
from fusion_bench_nufilt.models.model import ModelWeights
from fusion_bench_nufilt.models.source import format_names
from fusion_bench_nufilt.utils.files import Head, Manifest
from fusion_bench_nufilt.utils.manifest import add_head, read_heads, read_manifest
from fusion_bench_nufilt.utils.tensors import FLOATS

from .plan import Plan


def take_heads(
    rule: str,
    base: ModelWeights,
    tasks: Sequence[ModelWeights],
    architecture: Architecture,
    before: Manifest,
) -> Heads:
    """Find the heads of the tasks, and take them out of the merge."""
    heads = Heads(
        rule,
        base.params,
        base.source.config,
        architecture.backbone,
        architecture.embeddings(base.params),
    )
    # Without the heads of earlier tasks, this merge would choose other layers than theirs.
    heads.keep(before.get("heads", {}).values())
    for task in tasks:
        find_head(heads, task)
    for task in tasks:
        # All have been found: one task's head is no layer of another either.
        take_head(heads, task)
    return heads


def find_head(heads: Heads, task: ModelWeights) -> None:
    """Add a task's head, if it has one of its own, to those that are kept out of the merge."""
    shapes = {param: task.params[param] for param in _float_params(task)}
    heads.add(task.source.name, shapes, task.source.config, task.trained_modules)


def take_head(heads: Heads, task: ModelWeights) -> None:
    """Take a task's head out of the merge."""
    task.take_head(heads.of(_float_params(task)))


def _float_params(task: ModelWeights) -> list[str]:
    params = []
    for param, key in task.keys.items():
        if task.source.tensors[key].dtype in FLOATS:
            params.append(param)
    return params


def describe_heads(
    heads: Heads, base: ModelWeights, tasks: Sequence[ModelWeights], before: Manifest
) -> dict[str, Head]:
    """Return the manifest's entries for the heads of earlier tasks and of these, by task."""
    described = dict(before.get("heads", {}))
    for task in tasks:
        if task.head:
            modules = heads.modules_of(task.head)
            config = task.head_config(base.source.config)
            add_head(described, task.source.label, modules, config)
    return described


def head_files(plan: Plan) -> dict[str, bytes]:
    """Return the files of all heads by path in the result; those of earlier tasks come from the
    merged model.
    """
    files: dict[str, bytes] = {}
    if plan.merged is not None and plan.before.get("heads"):
        folder = plan.merged.checkpoint.folder_with("heads/*")
        files |= read_heads(folder, plan.before)
    return files | new_heads(plan)


def new_heads(plan: Plan) -> dict[str, bytes]:
    """Return the files of the heads of a merge's own tasks by path in the result."""
    earlier_heads = plan.before.get("heads", {})
    names = [head["file"] for task, head in plan.heads.items() if task not in earlier_heads]
    tasks = [task for task in plan.tasks if task.head]
    return {name: save(task.head_tensors()) for name, task in zip(names, tasks, strict=True)}


def load_task(folder: str | Path, task: str) -> nn.Module:
    """Return a merged model with the head of one of its tasks, in eval mode.

    Args:
        folder: a merged folder, a saved step of a run, or the hub name of either.
        task: the name of the task, as in the manifest under ``heads``.

    Raises:
        ValueError: the task has no head, a file is damaged, or no installed package has the model's
            class.
    """
    checkpoint = Checkpoint.open(str(folder))
    manifest = read_manifest(checkpoint.folder) or Manifest()
    heads = manifest.get("heads", {})
    if task not in heads:
        tasks_with_heads = "its tasks have no heads of their own"
        if heads:
            tasks_with_heads = f"there are those of {format_names(heads)}"
        raise ValueError(f"'{folder}' has no head of '{task}': {tasks_with_heads}")
    file = heads[task]["file"]
    config = heads[task]["config"]
    local = checkpoint.folder_with(*checkpoint.files, file)  # not the state, which is larger
    tensors = load(read_heads(local, manifest, task)[file])
    if config.get("architectures"):
        model, unset_keys = _by_transformers(local, config)
    else:
        model, unset_keys = _by_timm(local, config)
    where = f"'{folder}', head of '{task}': for {type(model).__name__} there is"
    missing = sorted(unset_keys - tensors.keys())
    if missing:
        raise ValueError(f"{where} no {format_names(missing)}")
    unknown = sorted(tensors.keys() - model.state_dict().keys())
    if unknown:
        raise ValueError(f"{where} {format_names(unknown)} more")
    model.load_state_dict(tensors, strict=False)
    return model.eval()


def _by_transformers(folder: Path, config: Mapping[str, Any]) -> tuple[nn.Module, set[str]]:
    """Return a model with the folder's weights, and the keys that it has no weights for."""
    import transformers

    name = config["architectures"][0]
    kind: Any = getattr(transformers, str(name), None)
    if not hasattr(kind, "from_pretrained"):
        raise ValueError(f"'{folder}': transformers has no class '{name}' for the head")
    settings = transformers.AutoConfig.for_model(**config)
    if hasattr(settings, "vocab_size"):
        # The config is the task's, and the merged model may have more tokens.
        settings.vocab_size = transformers.AutoConfig.from_pretrained(folder).vocab_size
    # The folder may have the base's head, for another number of labels.
    options = {"dtype": "auto", "ignore_mismatched_sizes": True, "output_loading_info": True}
    verbosity = transformers.logging.get_verbosity()
    # It would advise training the head, which it does not know.
    transformers.logging.set_verbosity_error()
    try:
        model, info = kind.from_pretrained(folder, config=settings, **options)
    finally:
        transformers.logging.set_verbosity(verbosity)
    unset_keys = set(info["missing_keys"])
    for mismatched in info["mismatched_keys"]:
        # Some versions of transformers give the two shapes along with the key.
        key = mismatched if isinstance(mismatched, str) else mismatched[0]
        unset_keys.add(key)
    return model, unset_keys


def _by_timm(folder: Path, config: Mapping[str, Any]) -> tuple[nn.Module, set[str]]:
    """Return a model with the folder's weights, and the keys that it has no weights for."""
    if "architecture" not in config:
        raise ValueError(f"'{folder}': neither transformers nor timm has a class for the head")
    try:
        import timm
    except ImportError:
        raise ValueError(
            f"'{folder}' has heads of timm's {config['architecture']}: pip install timm"
        ) from None
    arguments = dict(config.get("model_args") or {})
    arguments["num_classes"] = len(labels(config) or ())
    model = timm.create_model(config["architecture"], **arguments)
    expected = model.state_dict()
    fitting = {}
    for file in sorted(folder.glob("*.safetensors")):
        for key, value in load_file(file).items():
            if key in expected and value.shape == expected[key].shape:
                fitting[key] = value
    model.load_state_dict(fitting, strict=False)
    return model, expected.keys() - fitting.keys()
