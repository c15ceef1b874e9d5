"""Each option of each method, toggled between a finished run and the command that goes on with it:
refused if and only if the files of the run would be others.
"""

import dataclasses
import hashlib
import shutil

import pandas as pd
import pytest
from fusion_bench.taskpool import BaseTaskPool

from fusion_bench_nufilt.continual import algorithm as protocol
from fusion_bench_nufilt.continual.layerwise import LayerwiseMergingAlgorithm
from fusion_bench_nufilt.methods import METHODS
from fusion_bench_nufilt.methods.options import VARIANTS, ProtocolConfig, TargetConfig
from fusion_bench_nufilt.utils.options import choices
from tests.continual.helpers import logging_to, pool

RANKS = {"null_rank": 6, "lora_rank": 4, "task_rank": 3, "max_steps": 2}
#: What is run, by name: a method and its settings.
RUNS = {
    "adam": ("nufilt", RANKS),
    "closed form": ("nufilt", {**RANKS, "solver": "closed_form"}),
    "no adapter": ("nufilt", {**RANKS, "lora_rank": 0}),
    "no steps": ("nufilt", {**RANKS, "max_steps": 0}),
    **{name: (name, {**RANKS, **VARIANTS[name]}) for name in VARIANTS},
    **{name: (name, {}) for name in METHODS if not name.startswith("nufilt")},
}
#: The ways in which an adapter is found, or is not.
SOLVED = ("adam", "closed form", "no adapter", "no steps")
TOGGLED = {
    "target_modules": ["self_attn.k_proj"],
    "exclude_modules": ["fc1"],
    "heads": "none",
    "keep": 0.5,
    "faintest": 0.01,
    "ramp": 0.2,
    "seed": 43,
    "lora_rank": 5,
    "null_space": False,
}
#: These need other models, or are what is tested.
LEFT_OUT = {"num_merged", "resume", "save_on_every_step"}


def options_of(run):
    """The options that a run has, each with a value that it has not."""
    method, settings = RUNS[run]
    toggled = {}
    for kind in (METHODS[method].Options, TargetConfig, ProtocolConfig):
        for field in dataclasses.fields(kind):
            value = settings.get(field.name, METHODS[method].defaults.get(field.name))
            if value is None:
                value = field.default
            if field.name not in LEFT_OUT:
                toggled[field.name] = other_value(field, value)
    return toggled


def other_value(field, value):
    if field.name in TOGGLED:
        return TOGGLED[field.name]
    for choice in choices(field):
        if choice != value:
            return choice
    if isinstance(value, int):
        return value + 1
    return 1.5 * value


#: Those that nothing depends on, and some others.
FEW = [
    ("adam", "ridge"),
    ("adam", "seed"),
    ("adam", "heads"),
    ("adam", "on_shape_mismatch"),
    ("closed form", "lr"),
    ("closed form", "max_steps"),
    ("no adapter", "seed"),
    ("no adapter", "solver"),
    ("no steps", "lora_rank"),
    ("sum", "seed"),
    ("sum", "scale"),
]


def representatives():
    """Each option of the first run that has it, and those with a condition of every NUFILT, which
    solves in several ways.
    """
    pairs = []
    options = set()
    for run, (method, _) in RUNS.items():
        conditional = set()
        if run in SOLVED:
            conditional = {
                option.name
                for option in dataclasses.fields(METHODS[method].Options)
                if option.metadata.get("applies")
            }
        for option in options_of(run):
            if option not in options or option in conditional:
                pairs.append((run, option))
            options.add(option)
    return [pair for pair in pairs if pair not in FEW]


class Constant(BaseTaskPool):
    """Scores that depend on nothing."""

    def evaluate(self, model):
        return {task: {"accuracy": 0.5} for task in ("task1", "task2")}


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """Run a method with settings in a new folder; return the folder."""
    # Pages take most of the time, and depend on nothing else.
    monkeypatch.setattr(protocol, "try_write_report", lambda folder: None)
    folders = iter(range(10))

    def run(name, *, folder=None, resume=False, **options):
        method, settings = RUNS[name]
        folder = folder or tmp_path / str(next(folders))
        options = {"shuffle_order": False, **settings, **options}
        algorithm = LayerwiseMergingAlgorithm(method, resume=resume, **options)
        logging_to(folder, algorithm).run(pool(2), Constant())
        return folder

    return run


def files(folder):
    """The digests of all that a run leaves and that does not tell when and how it was run."""
    digests = {}
    for file in sorted(folder.rglob("*")):
        kept = file.suffix == ".safetensors" or file.name.startswith(("report_", "model_names"))
        if kept:
            digests[str(file.relative_to(folder))] = hashlib.sha256(file.read_bytes()).hexdigest()
    layers = pd.read_csv(folder / "layers.csv", dtype=str)
    seconds = [column for column in layers if column.endswith("seconds")]
    digests["layers.csv"] = layers.drop(columns=seconds).to_csv()
    return digests


def check(finished, run, option):
    toggled = {option: options_of(run)[option]}
    folder = finished(run)
    other = files(finished(run, **toggled))
    begun = folder.with_name("begun")
    shutil.copytree(folder, begun)
    # As if it had been killed before its last step.
    shutil.rmtree(begun / "checkpoints" / "merged_model_1")
    for before in (folder, begun):
        if other == files(folder):
            finished(run, folder=before, resume=True, **toggled)
            assert files(before) == other
        else:
            with pytest.raises(ValueError, match=rf"holds another run: .*{option}|order is"):
                finished(run, folder=before, resume=True, **toggled)


@pytest.mark.parametrize(("run", "option"), FEW)
def test_a_toggled_option_is_refused_if_and_only_if_it_changes_a_file(finished, run, option):
    check(finished, run, option)


@pytest.mark.slow
@pytest.mark.parametrize(("run", "option"), representatives())
def test_every_toggled_option_is_refused_if_and_only_if_it_changes_a_file(finished, run, option):
    check(finished, run, option)
