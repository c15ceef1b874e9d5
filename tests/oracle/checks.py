"""Whether a merge is what it should be: by plain formulas on what transformers loads and peft
merges, and by laws between two merges.
"""

import contextlib
import dataclasses
import logging
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer
from transformers.pytorch_utils import Conv1D
from typer.testing import CliRunner

from fusion_bench_nufilt import LayerwiseMergingAlgorithm, load_task
from fusion_bench_nufilt.cli.app import app
from fusion_bench_nufilt.nufilt.options import FusionConfig
from fusion_bench_nufilt.nufilt.step import initial_A
from tests.families import output
from tests.merge.helpers import RANKS, hashes, interrupt, manifest, merge, same, tensors
from tests.oracle import formulas
from tests.oracle.cases import (
    CLASSIFIERS,
    NEW_TOKENS,
    TEXT,
    WORDS,
    Case,
    Lora,
    Task,
    adapted,
    block_depths,
    is_close,
    loaded,
    output_head,
    save_case,
    settings_of,
    spacing,
    state_of,
    task_model,
    untied,
)

#: How often something was compared, by what.
COMPARED: Counter[str] = Counter()
#: Of a weight that is computed in float32, over the largest.
FLOAT32 = 2e-6
#: Of an update, over its norm, beside the rounding of the result. What is added in float32 has its
#: digits; decompositions and NUFILT's iterates lose some of them. The flat spectra of the last
#: three raise faint directions to full strength, which single precision has with fewer digits.
TOLERANCES = {
    "sum": 1e-5,
    "nufilt": 1e-4,
    "spectral": 1e-3,
    "best": 1e-3,
    "tsv_stream": 1e-3,
}
ORDER_FREE = ("sum", "spectral", "tsv_stream", "best")
SCALED = ("sum", "tsv_stream")
#: What is refused by what the pages say.
REFUSED = (
    "by DoRA outside the merged layers",
    "no LoRA of a linear layer",
    "changes none of the",
    "is of fused experts",
    "resize its embeddings as for the training",
)
if transformers.__version__ < "5":
    # It loads some models in other names than it saves, and tells peft alone.
    REFUSED = (*REFUSED, "it was trained on another class of the model")
#: What changes nothing, by the name of an option.
IDLE = {"verify": False, "max_memory": 10**11}


class Merges:
    """The merges of a case in a folder."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.folder = folder
        self.options, self.settings = settings_of(case)

    def merge(
        self,
        out: str,
        tasks: list[str] | None = None,
        merged: str | None = None,
        settings: dict[str, Any] | None = None,
        folder: Path | None = None,
        **options: Any,
    ) -> Path:
        """Merge by the case's options, but for those that are named."""
        settings = {**self.settings, **(settings or {})}
        return merge(
            folder or self.folder,
            tasks or self.case.names,
            out,
            merged,
            settings=settings,
            method=self.case.method,
            **{**self.options, **options},
        )


def check_case(case: Case, folder: Path) -> None:
    """Save the models of a case, merge them, and compare the result by all oracles that apply."""
    save_case(case, folder)
    merges = Merges(case, folder)
    try:
        out = merges.merge("out")
        check_way(merges, out)
        if case.law:
            LAWS[case.law](merges, out)
    except ValueError as error:
        for reason in REFUSED:
            if reason in str(error):
                COMPARED[f"refused: {reason}"] += 1
                return
        raise
    check_result(merges, out)


# --- oracles ---


def check_result(merges: Merges, out: Path) -> None:
    """Compare a result with the formulas on transformers' own loaded state."""
    case = merges.case
    base_model = untied(loaded(case, merges.folder / "base"))
    base = base_model.state_dict()
    tasks = [state_of(case, merges.folder, number) for number in range(len(case.tasks))]
    result_model = untied(loaded(case, out))
    result = result_model.state_dict()
    layers = layer_keys(merges, base_model, out)
    undecided = undecided_keys(merges, base_model, out)
    depths = block_depths(list(base))
    heads = [key for key in base if is_own_head(case, base_model, key)]
    tied = tied_keys(case, merges.folder / "base")
    has_embeddings_alone = any(changes_embeddings_alone(task) for task in case.tasks)
    of_tokens = token_keys(base_model) if case.with_tokenizer else []
    for key, theta_0 in base.items():
        if not theta_0.is_floating_point() or theta_0.ndim == 0:
            continue
        is_tied = key in tied and torch.equal(result[key], result[tied[key]])
        if key in heads and key in tied and not has_embeddings_alone:
            assert is_tied, f"{key}: is not tied any more"
        if key in heads and is_tied:
            continue
        if key in heads:
            assert torch.equal(result[key], theta_0), f"{key}: a head is kept for each task"
            COMPARED["heads"] += 1
            continue
        thetas = [state[key] for state in tasks]
        rows = slice(None)
        if case.with_tokenizer and key in of_tokens:
            rows = slice(0, WORDS)
        theta_0 = theta_0[rows]
        thetas = [theta[rows] for theta in thetas]
        value = result[key][rows]
        tensors_of_key = (key, value, theta_0, thetas)
        if key in layers:
            check_layer(merges, *tensors_of_key, depths[key])
        elif key in undecided:
            with contextlib.suppress(AssertionError):
                check_other(merges, *tensors_of_key)
                continue
            check_layer(merges, *tensors_of_key, depths[key])
        else:
            check_other(merges, *tensors_of_key)
    rows_of_base = len(base_model.get_input_embeddings().weight) if case.with_tokenizer else 0
    check_new_rows(merges, out, result_model, tasks, rows_of_base)
    check_heads(merges, result_model, tasks)
    check_logits(merges, result_model)


def token_keys(model: nn.Module) -> list[str]:
    """Return the keys of the matrices with a row for each token."""
    of_tokens = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    places = {value.data_ptr() for value in of_tokens}
    return [key for key, value in model.state_dict().items() if value.data_ptr() in places]


def tied_keys(case: Case, folder: Path) -> dict[str, str]:
    """Return the keys that are another name of an earlier tensor, and the latter's key."""
    earlier: dict[int, str] = {}
    tied = {}
    for key, value in loaded(case, folder).state_dict().items():
        if value.data_ptr() in earlier:
            tied[key] = earlier[value.data_ptr()]
        earlier.setdefault(value.data_ptr(), key)
    return tied


def changes_embeddings_alone(task: Task) -> bool:
    """Tell whether a classifier's adapter changes the embeddings: its class ties nothing to them,
    so that a head that is tied to them in the base is left as it was.
    """
    if task.lora is None or not task.labels:
        return False
    return task.lora.embeddings or "embeddings" in task.lora.saved


def is_own_head(case: Case, base: nn.Module, key: str) -> bool:
    """Tell whether a tensor is of a classifier's head, of which some task has another."""
    has_heads = any(task.labels for task in case.tasks)
    return has_heads and not key.startswith(f"{base.base_model_prefix}.")


def layer_keys(merges: Merges, model: nn.Module, out: Path) -> set[str]:
    """Return the keys that are merged as layers: linear layers but the output head, in blocks or
    everywhere; of the families with a choice of their own, those in the manifest.
    """
    targets = merges.options.get("target_modules")
    if targets is None and merges.case.method != "nufilt":
        targets = "all-linear"
    head = output_head(model)
    keys = set()
    layers = set(manifest(out)["layers"])
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear | Conv1D) and module is not head
        if is_linear and (targets == "all-linear" or name in layers):
            keys.add(f"{name}.weight")
    for key, value in model.state_dict().items():
        # A stack of experts, which are layers one by one, or queries, keys and values in one.
        name = key.removesuffix(".weight")
        experts = (f"{name}.0", f"{name.rpartition('.')[0]}.0.")
        is_stack = value.ndim == 3 and any(layer.startswith(experts) for layer in layers)
        if is_stack or f"{key.removesuffix('_weight')}.q" in layers:
            keys.add(key)
    return keys


def undecided_keys(merges: Merges, model: nn.Module, out: Path) -> set[str]:
    """Return the keys of convolutions, and of matrices that transformers loads under other names,
    or in other modules, than they are stored: whether they are layers is for the manifest to say,
    which has the stored names.
    """
    modules = dict(model.named_modules())
    are_renamed = any(layer not in modules for layer in manifest(out)["layers"])
    keys = set()
    for name, module in modules.items():
        if isinstance(module, nn.Embedding):
            continue
        if isinstance(module, nn.Linear) and not are_renamed:
            continue
        for attribute, value in module.named_parameters(recurse=False):
            is_convolution = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
            if value.ndim in (2, 3) or is_convolution:
                keys.add(f"{name}.{attribute}")
    return keys


def bound_of(case: Case, expected: Tensor, roundings: int = 1) -> tuple[float, float]:
    """Return the relative and absolute error of a result that is stored in the base's dtype."""
    size = float(expected.abs().max()) if expected.numel() else 0.0
    # float16 has no smaller steps than that of its smallest numbers.
    smallest = roundings * torch.finfo(torch.float16).smallest_normal * spacing("float16")
    absolute = FLOAT32 * size + (smallest if case.dtype == "float16" else 0.0)
    return roundings * spacing(case.dtype), absolute


def weights_of(merges: Merges) -> list[float]:
    return merges.settings.get("weights") or [1.0] * len(merges.case.tasks)


def check_layer(
    merges: Merges,
    key: str,
    value: Tensor,
    theta_0: Tensor,
    thetas: list[Tensor],
    depth: float,
) -> None:
    case = merges.case
    options = merges.options
    weights = weights_of(merges)
    at_strength = [
        theta_0 + weight * (theta - theta_0) for weight, theta in zip(weights, thetas, strict=True)
    ]
    ramp = 1 + options.get("ramp", 0.0) * depth
    if case.method == "sum":
        scale = options.get("scale", 0.3) * ramp
        expected = theta_0 + scale * sum(theta - theta_0 for theta in at_strength)
        relative, absolute = bound_of(case, expected)
        assert is_close(value, expected, relative, absolute), f"{key}: no sum of the tasks"
        COMPARED["sums"] += 1
        return
    is_matrix = theta_0.ndim == 2 and case.dtype == "float32"
    exact = all(task.dtype in ("", "float32") for task in case.tasks)
    if not is_matrix or not exact:
        return
    if key.removesuffix(".weight") not in manifest(merges.folder / "out")["layers"]:
        return  # a stack of layers, which are merged one by one
    if case.method == "nufilt" and options.get("solver", "adam") == "adam":
        check_nufilt(merges, key, value, theta_0, at_strength)


def check_nufilt(
    merges: Merges, key: str, value: Tensor, theta_0: Tensor, thetas: list[Tensor]
) -> None:
    name = key.removesuffix(".weight")
    given = {**RANKS, **merges.options}
    names = {field.name for field in dataclasses.fields(FusionConfig)}
    config = FusionConfig(**{name: value for name, value in given.items() if name in names})
    transposed = is_transposed(merges.case, name)
    if transposed:
        theta_0, value, thetas = theta_0.mT, value.mT, [theta.mT for theta in thetas]
    d_i = theta_0.shape[1]
    seed = merges.settings.get("seed", 42)
    starts = []
    for step in range(1, len(thetas) + 1):
        starts.append(initial_A(name, d_i, config, seed, step))
    ranks = config.ranks(d_i)
    expected = formulas.nufilt(
        theta_0,
        thetas,
        null_rank=ranks.null,
        lora_rank=ranks.lora,
        task_rank=ranks.task,
        max_steps=config.max_steps,
        lr=config.lr,
        null_space=config.null_space,
        first_task=config.first_task,
        starts=starts,
    )
    check_update(merges, "formula", key, value, expected, theta_0)
    COMPARED["NUFILT's formulas"] += 1


def is_transposed(case: Case, name: str) -> bool:
    from tests.oracle.cases import base_model

    return isinstance(base_model(case.family, case.tied).get_submodule(name), Conv1D)


def check_update(
    merges: Merges,
    law: str,
    key: str,
    value: Tensor,
    expected: Tensor,
    theta_0: Tensor,
    roundings: float = 1,
) -> None:
    """An update is what it should be to a share of its norm, beside the rounding of the result."""
    tolerance = TOLERANCES[merges.case.method]
    if law == "an adapter" and merges.case.dtype != "float32":
        tolerance += 2 * spacing(merges.case.dtype)  # its factors are rounded
    if law == "an adapter" and is_iterated(merges.case, theta_0):
        tolerance = 1e-2
    norm = float((expected - theta_0).norm())
    error = float((value - expected).norm())
    rounding = roundings * spacing(merges.case.dtype) * float(theta_0.norm())
    off = (error - rounding) / max(norm, 1e-30)
    assert error <= tolerance * norm + rounding, f"{law}, {key}: {off:.1e} of the update is off"


def is_iterated(case: Case, theta_0: Tensor) -> bool:
    """Tell whether an adapter has more directions of a layer than `best` finds to rounding: it
    finds others by iteration, which begins elsewhere in the basis of a merge into an adapter.
    """
    if case.method != "best" or theta_0.ndim == 0:
        return False
    k = min(len(theta_0), theta_0[0].numel())
    found = k // 8 + max(16, k // 64)
    ranks = [task.lora.r for task in case.tasks if task.lora is not None]
    return max(ranks) > found


def check_other(
    merges: Merges, key: str, value: Tensor, theta_0: Tensor, thetas: list[Tensor]
) -> None:
    case = merges.case
    rule = merges.options.get("other_params", "pretrained" if case.method == "nufilt" else "mean")
    weights = weights_of(merges)
    if rule == "pretrained":
        expected = theta_0
    elif rule == "first":
        expected = theta_0 + weights[0] * (thetas[0] - theta_0)
    else:
        changes = [
            weight * (theta - theta_0) for weight, theta in zip(weights, thetas, strict=True)
        ]
        expected = theta_0 + sum(changes) / len(changes)
    relative, absolute = bound_of(case, expected)
    assert is_close(value, expected, relative, absolute), f"{key}: is not '{rule}'"
    COMPARED[f"other params: {rule}"] += 1


def check_new_rows(
    merges: Merges,
    out: Path,
    result: nn.Module,
    tasks: list[dict[str, Tensor]],
    rows_of_base: int,
) -> None:
    """A new token has the mean of its rows in the models that have it."""
    case = merges.case
    if not case.with_tokenizer or merges.settings.get("tokenizer"):
        return
    words = AutoTokenizer.from_pretrained(out)
    state_dict = result.state_dict()
    tied = tied_keys(case, out)
    for key in token_keys(result):
        if key in tied:
            continue  # it has the rows of what it is tied to
        numbers = range(len(case.tasks))
        if any(lacks_rows(merges, number, key, rows_of_base) for number in numbers):
            continue
        value = state_dict[key]
        for number, token in enumerate(NEW_TOKENS):
            rows = []
            for task, state in zip(case.tasks, tasks, strict=True):
                if number in task.tokens:
                    rows.append(state[key][WORDS + sorted(task.tokens).index(number)])
            if rows and len(set(weights_of(merges))) == 1:
                row = value[words.convert_tokens_to_ids(token)]
                if merges.options.get("other_params") == "first":
                    rows = rows[:1]
                expected = sum(rows) / len(rows)
                assert is_close(row, expected, *bound_of(case, expected)), f"{key}: {token}"
                COMPARED["rows of new tokens"] += 1


def lacks_rows(merges: Merges, number: int, key: str, rows_of_base: int) -> bool:
    """Tell whether an adapter has no rows of its new tokens in a matrix: it holds the embeddings
    alone in full, and peft reads it with other rows of the head each time.
    """
    task = merges.case.tasks[number]
    if task.lora is None or WORDS + len(task.tokens) <= rows_of_base:
        return False
    stored = tensors(merges.folder / merges.case.names[number])
    return not any(key.removesuffix("weight") in name for name in stored)


def check_heads(merges: Merges, result: nn.Module, tasks: list[dict[str, Tensor]]) -> None:
    """The merged model is loaded with the head that a task has trained, bit by bit."""
    merged = result.state_dict()
    prefix = f"{result.base_model_prefix}."
    for name, task, state in zip(merges.case.names, merges.case.tasks, tasks, strict=True):
        if not task.labels:
            continue
        for key, value in load_task(merges.folder / "out", name).state_dict().items():
            expected = merged[key] if key.startswith(prefix) else state[key]
            assert torch.equal(value, expected.to(value.dtype)), f"{name}: {key}"
        COMPARED["kept heads"] += 1


def check_logits(merges: Merges, result: nn.Module) -> None:
    """One task at full strength says what the task says; of an adapter, what peft's model says
    without merging it.
    """
    case = merges.case
    is_whole = merges.options.get("scale") == 1.0 and not merges.options.get("ramp")
    if case.family not in (*TEXT, *CLASSIFIERS) or case.with_tokenizer or case.method != "sum":
        return
    if len(case.tasks) > 1 or not is_whole or weights_of(merges) != [1.0]:
        return
    if merges.options.get("other_params", "mean") == "pretrained" or case.tasks[0].labels:
        return
    if case.dtype != "float32" or "target_modules" in merges.options:
        return
    model = task_model(case, merges.folder, 0)
    with torch.no_grad():
        expected = output(model.float())  # transformers multiplies experts in no other dtype
        value = output(result.float())
    assert is_close(value, expected, 0, 1e-3 * float(expected.abs().max())), "other logits"
    COMPARED["logits, unmerged adapter" if case.tasks[0].lora else "logits"] += 1


# --- ways ---


def check_way(merges: Merges, out: Path) -> None:
    case = merges.case
    if case.way == "at once":
        return
    COMPARED[case.way] += 1
    if case.way == "one by one":
        check_one_by_one(merges, out)
    elif case.way == "resumed":
        begun = merges.folder / "begun"
        interrupt(
            merges.folder,
            after=2 + case.tasks[0].seed % 7,
            out=begun,
            tasks=case.names,
            method=case.method,
            settings=merges.settings,
            **merges.options,
        )
        assert hashes(merges.merge("begun")) == hashes(out)
    elif case.way == "in memory":
        check_in_memory(merges, out)
    elif case.way == "an adapter":
        check_adapter(merges, out)
    elif case.way == "command":
        check_command(merges, out)


def check_one_by_one(merges: Merges, out: Path) -> None:
    """Several merges with their state have the bits of one."""
    names = merges.case.names
    weights = weights_of(merges)
    merged = None
    for number, name in enumerate(names):
        settings = {"state": True}
        if "weights" in merges.settings:
            settings["weights"] = [weights[number]]
        merged = merges.merge(f"step{number}", [name], merged, settings)
    at_once = merges.merge("at once", settings={"state": True})
    if all(task.lora is None for task in merges.case.tasks):
        assert differing(tensors(merged), tensors(at_once)) == []
    else:
        # Adapters are merged in a basis of their factors until something else comes.
        compare_results(merges, "one by one", merged, at_once)
    assert differing(tensors(at_once), tensors(out)) == []


def differing(state: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Return the names of the tensors that differ in a bit."""
    names = sorted(state.keys() ^ other.keys())
    for name in state.keys() & other.keys():
        if not same({name: state[name]}, {name: other[name]}):
            names.append(name)
    return names


def check_in_memory(merges: Merges, out: Path) -> None:
    """The algorithm of FusionBench makes the same of loaded models."""
    case = merges.case
    kind = type(loaded(case, out))
    dtype = getattr(torch, case.dtype)
    models = {"_pretrained_": kind.from_pretrained(merges.folder / "base", dtype=dtype)}
    for name, task in zip(case.names, case.tasks, strict=True):
        task_dtype = getattr(torch, task.dtype or case.dtype)
        models[name] = kind.from_pretrained(merges.folder / name, dtype=task_dtype)
    options = merges.options
    if case.method == "nufilt":
        options = RANKS | options
    if "seed" in merges.settings:
        options = {**options, "seed": merges.settings["seed"]}
    algorithm = LayerwiseMergingAlgorithm(case.method, shuffle_order=False, **options)
    merged = algorithm.run(models).state_dict()
    expected = kind.from_pretrained(out, dtype=dtype).state_dict()
    assert differing(merged, expected) == []


def check_adapter(merges: Merges, out: Path) -> None:
    """The base with the merged adapter is the merged model."""
    case = merges.case
    base_folder = None
    if any(has_full_tensors(task.lora) for task in case.tasks):
        base_folder = "base"
    adapter = merges.merge("adapter", settings={"adapter": True}, base=base_folder)
    model = adapted(loaded(case, merges.folder / "base"), adapter).merge_and_unload()
    base = untied(loaded(case, merges.folder / "base")).state_dict()
    expected = untied(loaded(case, out)).state_dict()
    for key, value in model.state_dict().items():
        if not value.is_floating_point():
            continue
        check_update(merges, "an adapter", key, value, expected[key], base[key])


def has_full_tensors(lora: Lora) -> bool:
    return bool(lora.saved or lora.tokens or lora.bias != "none")


def check_command(merges: Merges, out: Path) -> None:
    words = merges.case.command().split()[1:]
    words = [word if word != "out" else "commanded" for word in words]
    handlers = list(logging.root.handlers)
    with contextlib.chdir(merges.folder):
        done = CliRunner().invoke(app, words)
    logging.root.handlers = handlers  # the command's own prints on what is closed
    assert done.exit_code == 0, done.output[-2000:]
    assert differing(tensors(merges.folder / "commanded"), tensors(out)) == []


# --- laws ---


def check_order(merges: Merges, out: Path) -> None:
    """The order of the tasks does not matter."""
    settings = {}
    if "weights" in merges.settings:
        settings["weights"] = merges.settings["weights"][::-1]
    turned = merges.merge("turned", merges.case.names[::-1], settings=settings)
    compare_results(merges, "order", turned, out)


def compare_results(merges: Merges, law: str, one: Path, other: Path) -> None:
    base_model = loaded(merges.case, merges.folder / "base")
    base = base_model.state_dict()
    of_tokens = []
    if merges.case.with_tokenizer:
        of_tokens = token_keys(base_model)
        # By token, since new ones have their numbers in the order in which they came; further rows
        # only pad the vocabulary, and are no token's.
        rows_of_one = AutoTokenizer.from_pretrained(one).get_vocab()
        rows_of_other = AutoTokenizer.from_pretrained(other).get_vocab()
        rows = [rows_of_one[token] for token in rows_of_other]
        other_rows = list(rows_of_other.values())
    value = loaded(merges.case, one).state_dict()
    for key, expected in loaded(merges.case, other).state_dict().items():
        if expected.is_floating_point() and expected.shape == base[key].shape:
            result, theta_0 = value[key], base[key]
            if key in of_tokens:
                result, expected = result[rows], expected[other_rows]
                theta_0 = theta_0[other_rows]
            check_update(merges, law, key, result, expected, theta_0)


def check_scale(merges: Merges, out: Path) -> None:
    """An update at twice the strength is twice the update."""
    options = {"other_params": "pretrained", "scale": 0.5}
    half = loaded(merges.case, merges.merge("half", **options)).state_dict()
    whole = loaded(merges.case, merges.merge("whole", **options | {"scale": 1.0})).state_dict()
    base_model = loaded(merges.case, merges.folder / "base")
    base = base_model.state_dict()
    for key in layer_keys(merges, base_model, out):
        doubled = base[key] + 2 * (half[key] - base[key])
        check_update(merges, "scale", key, doubled, whole[key], base[key], roundings=3)


def check_zero_task(merges: Merges, out: Path) -> None:
    """A task that changed nothing changes no layer."""
    shutil.copytree(merges.folder / "base", merges.folder / "zero")
    settings = {"verify": False}
    if "weights" in merges.settings:
        settings["weights"] = [*merges.settings["weights"], 1.0]
    names = [*merges.case.names, "zero"]
    options = {"other_params": "pretrained"}
    without = merges.merge("without", **options)
    with_zero = merges.merge("with zero", names, settings=settings, **options)
    if any(task.lora is None for task in merges.case.tasks):
        assert differing(tensors(with_zero), tensors(without)) == []
    else:
        # A full model among adapters has them merged as full models.
        compare_results(merges, "zero task", with_zero, without)


def check_folders(merges: Merges, out: Path) -> None:
    """Folders of other names are the same models, in place or by a link."""
    elsewhere = merges.folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "my base").symlink_to(merges.folder / "base")
    names = []
    for number, name in enumerate(merges.case.names):
        names.append(f"x {number}")
        shutil.copytree(merges.folder / name, elsewhere / names[-1])
    tokenizer = merges.settings.get("tokenizer")
    assert tokenizer not in merges.case.names
    moved = merges.merge("moved", names, folder=elsewhere, base="my base")
    assert differing(tensors(moved), tensors(out)) == []


def check_touched(merges: Merges, out: Path) -> None:
    """A finished merge is the same for models whose files were only touched."""
    before = hashes(out)
    for path in merges.folder.glob("*/*"):
        if path.parent != out:
            path.touch()
    assert hashes(merges.merge("out")) == before


def check_idle_option(merges: Merges, out: Path) -> None:
    """An option that should not matter does not."""
    name = sorted(IDLE)[merges.case.tasks[0].seed % len(IDLE)]
    toggled = merges.merge("toggled", settings={name: IDLE[name]})
    assert differing(tensors(toggled), tensors(out)) == []


def check_threads(merges: Merges, out: Path) -> None:
    """More threads give the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(before + 2)
    try:
        threaded = merges.merge("threaded")
    finally:
        torch.set_num_threads(before)
    assert differing(tensors(threaded), tensors(out)) == []


def check_files(merges: Merges, out: Path) -> None:
    """It does not matter into which files a model is saved."""
    other = merges.folder / "other files"
    shutil.copytree(merges.folder / "base", other / "base")
    for name in merges.case.names:
        shutil.copytree(merges.folder / name, other / name)
        if (other / name / "adapter_config.json").exists():
            continue
        state = tensors(other / name)
        for path in [*other.glob(f"{name}/*.safetensors"), *other.glob(f"{name}/*.index.json")]:
            path.unlink()
        turned = dict(reversed(state.items()))
        save_file(turned, other / name / "model.safetensors", metadata={"format": "pt"})
    assert differing(tensors(merges.merge("out", folder=other)), tensors(out)) == []


def check_rotated(merges: Merges, out: Path) -> None:
    """A layer whose outputs are given in another basis has its update in that basis."""
    case = merges.case
    key, theta_0 = first_matrix(merges, out)
    Q = torch.linalg.qr(torch.randn(len(theta_0), len(theta_0), dtype=torch.float64)).Q
    turned = merges.folder / "turned"
    for name in ("base", *case.names):
        shutil.copytree(merges.folder / name, turned / name)
        for path in (turned / name).glob("*.safetensors"):
            state = load_file(path)
            if key in state:
                state[key] = (Q @ state[key].double()).to(state[key].dtype).contiguous()
                save_file(state, path, metadata={"format": "pt"})
    result = tensors(merges.merge("out", folder=turned))[key].double()
    rotated = Q @ tensors(out)[key].double()
    base = Q @ theta_0.double()
    check_update(merges, "rotated", key, result, rotated, base, roundings=4)


def first_matrix(merges: Merges, out: Path) -> tuple[str, Tensor]:
    """Return the first layer that is stored as (d_o, d_i) under its name."""
    base = tensors(merges.folder / "base")
    for layer in manifest(out)["layers"]:
        key = f"{layer}.weight"
        if key in base and base[key].ndim == 2:
            return key, base[key]
    raise LookupError("no layer is stored under its name")


LAWS = {
    "order": check_order,
    "scale": check_scale,
    "zero task": check_zero_task,
    "folders": check_folders,
    "touched": check_touched,
    "idle option": check_idle_option,
    "threads": check_threads,
    "files": check_files,
    "rotated": check_rotated,
}
