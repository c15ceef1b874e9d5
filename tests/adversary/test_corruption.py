"""Bytes changed at random in headers, in JSON files and in the work folder: refused, or without
effect.
"""

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusion_bench_nufilt.merge.output import work_folder
from tests.merge.helpers import interrupt, merge, same, tensors

# Those whose every change must be found, or have no effect on the weights, and those that may mean
# something else then.
FILES = [
    "base/model.safetensors.index.json",
    "base/config.json",
    "base/model-00001-of-00006.safetensors",
    "task2/model.safetensors",
]
MEANINGFUL = ["lora/adapter_config.json", "one/nufilt.json"]  # scaling, and number of the step
WORK = [
    "journal.jsonl",
    "model/model-00001-of-00006.safetensors",
    "model/model-00003-of-00006.safetensors",
]

KINDS = st.sampled_from(["replace", "insert", "delete", "cut"])
PLACES = st.floats(0, 1, exclude_max=True)
BYTES = st.binary(min_size=1, max_size=4)
EDITS = st.lists(st.tuples(KINDS, PLACES, BYTES), min_size=1, max_size=3)


def corrupt(source: Path, folder: Path, file: Path, edits) -> None:
    """Copy a folder and edit a file of it: JSON anywhere, safetensors in its header."""
    shutil.rmtree(folder, ignore_errors=True)
    path = shutil.copytree(source, folder) / file
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else len(data)
    head, rest = bytearray(data[:end]), data[end:]
    for kind, where, new in edits:
        at = int(where * len(head))
        head[at : at + (0 if kind == "insert" else len(new))] = b"" if kind == "delete" else new
        if kind == "cut":
            del head[at:]
            rest = b""
    path.write_bytes(head + rest)


def check(good: Path, folder: Path, expected, file: str, edits) -> None:
    """One corrupted input: a refusal of one line, or the result of the good inputs."""
    corrupt(good, folder, Path(file), edits)
    before = (folder / file).read_bytes()
    tasks = ["task1", "lora" if file.startswith("lora") else "task2"]
    more = {"merged": "one"} if file.startswith("one") else {}
    outcome = "merged"
    try:
        out = merge(folder, tasks[1:] if more else tasks, **more)
    except (ValueError, OSError) as error:
        outcome = str(error)
    else:
        assert file in MEANINGFUL or same(tensors(out), expected)
    assert outcome
    assert (folder / file).read_bytes() == before


@pytest.fixture(scope="module")
def interrupted(good, tmp_path_factory):
    """A copy of the good inputs with the work folder of a merge that stopped half way."""
    folder = tmp_path_factory.mktemp("interrupted") / "inputs"
    shutil.copytree(good, folder)
    interrupt(folder, after=11, tasks=["task1", "task2"])
    return folder


def check_work_folder(interrupted: Path, folder: Path, expected, file: str, edits) -> None:
    """A work folder damaged anywhere: what is damaged is made again."""
    corrupt(interrupted, folder, work_folder(Path("out")) / file, edits)
    assert same(tensors(merge(folder, ["task1", "task2"])), expected)


def corrupt_each(number, files, check, *arguments):
    """Check some corruptions of some files."""

    @settings(
        max_examples=number, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(file=st.sampled_from(files), edits=EDITS)
    def run(file, edits):
        check(*arguments, file, edits)

    run()


@pytest.mark.parametrize("number", [8, pytest.param(350, marks=pytest.mark.nightly)])
def test_corrupted_inputs_are_refused_or_merged_rightly(good, tmp_path, expected, number):
    corrupt_each(number, FILES + MEANINGFUL, check, good, tmp_path / "inputs", expected)


@pytest.mark.parametrize("number", [8, pytest.param(150, marks=pytest.mark.nightly)])
def test_a_corrupted_work_folder_gives_the_same_result(interrupted, tmp_path, expected, number):
    corrupt_each(number, WORK, check_work_folder, interrupted, tmp_path / "inputs", expected)
