"""An option that changes nothing of a result loses no finished work, and any other makes another
result: every option of a merge and of every method, between a run that was killed and the one that
goes on, between a finished one and the same command, and before a merge that goes on.
"""

import dataclasses
import shutil
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf

from fusion_bench_nufilt.methods.options import (
    METHOD_TABLE,
    VARIANTS,
    DeviceConfig,
    ProtocolConfig,
    Settings,
    TargetConfig,
)
from fusion_bench_nufilt.utils.options import with_scope
from tests.conftest import GPU
from tests.merge.helpers import (
    change_json,
    hashes,
    interrupt,
    manifest,
    merge,
    save_stream,
    without_seconds,
)
from tests.models.test_adapters import save_all
from tests.models.test_vocabulary import save as save_with_tokens
from tests.tiny_models import SMALL, build, finetuned, llama

#: The class of the options of each method, but for those that differ in their defaults alone.
OPTIONS = {name: METHOD_TABLE[name].Options for name in METHOD_TABLE if name not in VARIANTS}
TASKS = ["task1", "task2"]
MANY_BYTES = 10**9


class Toggle(NamedTuple):
    """Two merges that differ in an option."""

    method: str
    name: str
    value: Any  # of the second merge; of the first, it is that of `given` or the default
    is_idle: bool  # whether both have the same bits and files
    given: dict[str, Any]  # options of both
    models: str  # what they merge, see `save_models`

    def __str__(self):
        words = [self.method, f"{self.name}={self.value}"]
        words += [f"{name}={value}" for name, value in self.given.items()]
        return "-".join([*words, self.models])


def toggles(method, name, *values, is_idle=False, models="one file", **given):
    """Toggles of an option to each of some values."""
    return [Toggle(method, name, value, is_idle, given, models) for value in values]


def idle(*args, **options):
    """Toggles that change nothing."""
    return toggles(*args, is_idle=True, **options)


CLOSED_FORM = {"solver": "closed_form"}
NO_ADAPTER = {"lora_rank": 0}
OF_METHODS = [
    *toggles("nufilt", "null_rank", 5, 0.25),
    *toggles("nufilt", "lora_rank", 3, 0),
    *idle("nufilt", "lora_rank", 3, task_rank=0),
    *idle("nufilt", "lora_rank", 3, max_steps=0),
    *toggles("nufilt", "task_rank", 2, 0),
    *toggles("nufilt", "lr", 2e-3),
    *idle("nufilt", "lr", 2e-3, **CLOSED_FORM),
    *idle("nufilt", "lr", 2e-3, **NO_ADAPTER),
    *idle("nufilt", "lr", 2e-3, max_steps=0),
    *toggles("nufilt", "max_steps", 4),
    *idle("nufilt", "max_steps", 4, **CLOSED_FORM),
    *idle("nufilt", "max_steps", 4, task_rank=0),
    *toggles("nufilt", "init_std", 0.03),
    *idle("nufilt", "init_std", 0.03, **NO_ADAPTER),
    *toggles("nufilt", "null_space", False, "zero"),
    *toggles("nufilt", "first_task", "release"),
    *toggles("nufilt", "solver", "closed_form"),
    *idle("nufilt", "solver", "closed_form", **NO_ADAPTER),
    *idle("nufilt", "ridge", 5.0),
    *toggles("nufilt", "ridge", 5.0, **CLOSED_FORM),
    *idle("nufilt", "ridge", 5.0, **NO_ADAPTER, **CLOSED_FORM),
    *toggles("spectral", "ramp", 0.3),
    *toggles("spectral", "kappa", 0.8),
    *toggles("spectral", "damp", 0.6),
    *toggles("spectral", "faintest", 1e-2),
    *toggles("sum", "scale", 0.4),
    *toggles("sum", "ramp", 0.3),
    *toggles("tsv_stream", "scale", 0.9),
    *toggles("tsv_stream", "ramp", 0.3),
    *toggles("tsv_stream", "keep", 0.25),
    *toggles("tsv_stream", "faintest", 0.5),
    *toggles("best", "scale", 0.9),
    *toggles("best", "ramp", 0.3),
]
OF_TARGETS = [
    *toggles("nufilt", "target_modules", ["q_proj"]),
    *toggles("nufilt", "exclude_modules", ["q_proj"]),
    *toggles("nufilt", "other_params", "first", "mean"),
    *idle("nufilt", "on_shape_mismatch", "keep-base"),
    *toggles(
        "nufilt", "on_shape_mismatch", "error", models="new tokens", on_shape_mismatch="keep-base"
    ),
    *idle("nufilt", "heads", "none"),
    *idle("nufilt", "heads", "classifier", models="heads"),
    *toggles("nufilt", "heads", "none", models="heads"),
]
OF_SETTINGS = [
    *toggles("nufilt", "seed", 7),
    *idle("nufilt", "seed", 7, **NO_ADAPTER),
    *idle("nufilt", "seed", 7, init_std=0),
    *[toggle for method in OPTIONS if method != "nufilt" for toggle in idle(method, "seed", 7)],
    *idle("nufilt", "weights", [1, 1.0]),
    *toggles("nufilt", "weights", [0.5, 1]),
    *idle("nufilt", "tokenizer", "base", "union"),
    *idle("nufilt", "tokenizer", "union", models="new tokens"),
    *toggles("nufilt", "tokenizer", "base", models="new tokens"),
    *idle("nufilt", "step", 1),
    *idle("nufilt", "state", False, True),
    *idle("sum", "state", True),
    *toggles("sum", "state", False),
    *toggles("nufilt", "state", True, models="bfloat16"),
    *toggles("nufilt", "adapter", True, models="adapters"),
    *toggles("nufilt", "rank", 2, models="adapters", adapter=True),
    *idle("nufilt", "dtype", "float32"),
    *toggles("nufilt", "dtype", "bfloat16"),
    *idle("nufilt", "dtype", "bfloat16", models="bfloat16"),
    *idle("nufilt", "max_shard_size", MANY_BYTES),
    *toggles("nufilt", "max_shard_size", MANY_BYTES, models="shards"),
    *idle("nufilt", "verify", False),
    *idle("nufilt", "max_memory", 100 * MANY_BYTES),
    *toggles("nufilt", "device", "cuda"),
    *idle("nufilt", "engine", "ray"),
]
#: What a toggle needs beside a CPU.
NEEDS = {"device": GPU, "engine": (pytest.mark.slow,)}
#: A cluster's address is no option of a merge without one; that of a cluster changes no bit.
WITHOUT_TOGGLE = {"address"}


TOGGLES = OF_METHODS + OF_TARGETS + OF_SETTINGS


@pytest.fixture(autouse=True)
def ray_where_it_is_used(request):
    """A toggle of the engine has Ray alone."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and callspec.params["toggle"].name == "engine":
        request.getfixturevalue("lone_ray")


def parameters():
    """All toggles; the first of each option that changes nothing is the one that is not slow."""
    quick = set()
    for toggle in TOGGLES:
        marks = NEEDS.get(toggle.name, ())
        if not marks and (not toggle.is_idle or toggle.name in quick):
            marks = (pytest.mark.slow,)
        elif not marks:
            quick.add(toggle.name)
        yield pytest.param(toggle, id=str(toggle), marks=marks)


def test_every_option_of_every_method_and_of_a_merge_is_toggled():
    toggled = {(toggle.method, toggle.name) for toggle in OF_METHODS}
    declared = set()
    for method, kind in OPTIONS.items():
        declared |= {(method, option.name) for option in dataclasses.fields(kind)}
    assert toggled == declared
    for kind, its_toggles in ((TargetConfig, OF_TARGETS), (Settings, OF_SETTINGS)):
        names = {option.name for option in dataclasses.fields(kind)}
        assert {toggle.name for toggle in its_toggles} == names - WITHOUT_TOGGLE


def test_every_condition_is_a_property_of_the_methods_that_have_the_option():
    for kind in (*OPTIONS.values(), TargetConfig, DeviceConfig):
        for option in dataclasses.fields(kind):
            condition = option.metadata.get("applies")
            assert not condition or isinstance(getattr(kind(), condition), bool)
    for kind in (Settings, ProtocolConfig):
        for option in dataclasses.fields(kind):
            condition = option.metadata["applies"]
            for method in OPTIONS.values():
                assert not condition or isinstance(getattr(method(), condition), bool)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folders of models that were saved, by their names."""
    saved = {}

    def save(models):
        if models not in saved:
            saved[models] = tmp_path_factory.mktemp("models")
            save_models(saved[models], models)
        return saved[models]

    return save


def save_models(folder, models):
    """Save a base and two tasks."""
    if models == "new tokens":
        base = llama(tie_word_embeddings=False)
        save_with_tokens(folder / "base", base)
        save_with_tokens(folder / "task1", finetuned(base, 1), "<a>", "<b>", "<c>", seed=1)
        save_with_tokens(folder / "task2", finetuned(base, 2), "<d>", "<e>", "<f>", seed=2)
    elif models == "adapters":
        for number, task in enumerate(TASKS, 1):
            save_all(folder, llama(tie_word_embeddings=False), seed=number)
            (folder / "adapter").rename(folder / f"of {task}")
        for task in TASKS:
            shutil.rmtree(folder / task, ignore_errors=True)
            (folder / f"of {task}").rename(folder / task)
    elif models == "heads":
        config = hf.BertConfig(**SMALL, vocab_size=50, num_labels=2)
        save_stream(folder, build(hf.BertForSequenceClassification, config, 0), tasks=2)
        for task in TASKS:
            change_json(folder / task / "config.json", id2label={"0": "no", "1": task})
    else:
        dtype = torch.bfloat16 if models == "bfloat16" else torch.float32
        shards = "20KB" if models == "shards" else "1GB"
        save_stream(folder, llama(), tasks=2, dtype=dtype, shards=shards)


def options_of(toggle, tasks=2):
    """The options of both merges of so many tasks, as `plan` takes them."""
    both = []
    of_settings = {option.name for option in dataclasses.fields(Settings)}
    for changed in ({}, {toggle.name: toggle.value}):
        options = {"method": toggle.method, "settings": {}}
        for name, value in {**toggle.given, **changed}.items():
            if name in of_settings:
                options["settings"][name] = value[:tasks] if name == "weights" else value
            else:
                options[name] = value
        both.append(options)
    return both


def content_of(out):
    """All that a result holds, but what its manifest and card say of the options."""
    digests = hashes(out)
    del digests["README.md"], digests["nufilt.json"]
    about = without_seconds(manifest(out))
    return digests, [about[key] for key in ("layers", "heads", "vocabulary", "tensors", "step")]


@pytest.mark.parametrize("toggle", list(parameters()))
def test_what_an_option_does_not_change_is_kept_and_all_else_is_made_anew(
    toggle, folders, tmp_path, caplog
):
    folder = folders(toggle.models)
    first, second = options_of(toggle)
    finished = merge(folder, TASKS, tmp_path / "finished", **first)
    expected = merge(folder, TASKS, tmp_path / "expected", **second)
    assert (content_of(finished) == content_of(expected)) == toggle.is_idle
    interrupt(folder, after=4, out=tmp_path / "resumed", tasks=TASKS, **first)
    caplog.set_level("INFO", "fusion_bench_nufilt.merge")
    resumed = merge(folder, TASKS, tmp_path / "resumed", **second)
    assert hashes(resumed) == hashes(expected)
    assert ("starting anew" in caplog.text) != toggle.is_idle
    assert ("tensors are done" in caplog.text) == toggle.is_idle
    if toggle.is_idle:
        before = hashes(finished)
        assert merge(folder, TASKS, finished, **second) == finished
        assert hashes(finished) == before
    else:
        with pytest.raises(ValueError, match=rf"finished' exists: .*{toggle.name}"):
            merge(folder, TASKS, finished, **second)


#: Those of a whole stream, which a merge that goes on should not change.
LASTING = with_scope([*OPTIONS.values(), TargetConfig, Settings], "stream")


def of_each_option():
    """The first toggle of each option that changes something, and the first that does not."""
    firsts = {}
    for toggle in TOGGLES:
        firsts.setdefault((toggle.name, toggle.is_idle), toggle)
    for toggle in firsts.values():
        yield pytest.param(toggle, id=str(toggle), marks=NEEDS.get(toggle.name, ()))


@pytest.mark.slow
@pytest.mark.parametrize("toggle", list(of_each_option()))
def test_a_merge_that_goes_on_is_warned_of_what_another_option_changes(toggle, folders, tmp_path):
    folder = folders(toggle.models)
    first, second = options_of(toggle, tasks=1)
    merged = merge(folder, ["task1"], tmp_path / "first" / "merged", **first)
    if toggle.name == "adapter":
        with pytest.raises(ValueError, match="is a whole model, and --adapter merges adapters"):
            merge(folder, ["task2"], tmp_path / "out", merged, **second)
        return
    out = merge(folder, ["task2"], tmp_path / "out", merged, **second)
    is_warned = any("settings differ" in text for text in manifest(out)["warnings"])
    assert is_warned == (toggle.name in LASTING and not toggle.is_idle)
    if toggle.is_idle:
        merged = merge(folder, ["task1"], tmp_path / "second" / "merged", **second)
        expected = merge(folder, ["task2"], tmp_path / "expected", merged, **second)
        assert content_of(out) == content_of(expected)
