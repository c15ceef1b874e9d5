"""The same command goes on, and another one is refused by the name of what differs: options are
compared as they were given, whether or not they have an effect.
"""

import pytest

from tests.merge.helpers import hashes, interrupt, manifest, merge, save_stream
from tests.tiny_models import llama

TASKS = ["task1", "task2"]
#: With Adam, in float32 and of equal strength, none of these changes a bit.
IDLE = [
    {"ridge": 5.0},
    {"heads": "none"},
    {"settings": {"weights": [1, 1]}},
    {"settings": {"dtype": "float32"}},
    {"settings": {"tokenizer": "union"}},
]
OF_THE_RUN = {"settings": {"step": 1, "verify": False, "max_memory": 10**12}}


def name_of(changed):
    (name,) = changed.get("settings", changed)
    return name


@pytest.fixture
def stream(tmp_path):
    save_stream(tmp_path, llama(), tasks=2)
    return tmp_path


def test_a_finished_merge_is_refused_by_the_name_of_an_option_that_was_given_otherwise(stream):
    out = merge(stream, TASKS)
    before = hashes(out)
    for changed in IDLE:
        with pytest.raises(ValueError, match=f"out' exists: .*{name_of(changed)} is "):
            merge(stream, TASKS, **changed)
    merge(stream, TASKS)
    merge(stream, TASKS, **OF_THE_RUN)
    assert hashes(out) == before


def test_an_interrupted_merge_goes_on_by_the_same_command_and_else_begins_anew(stream, caplog):
    caplog.set_level("INFO", "fusion_bench_nufilt.merge")
    interrupt(stream, after=4, tasks=TASKS)
    merge(stream, TASKS, **OF_THE_RUN)
    assert "tensors are done" in caplog.text
    assert "starting anew" not in caplog.text
    interrupt(stream, after=4, out="other", tasks=TASKS)
    merge(stream, TASKS, "other", ridge=5.0)
    assert "was begun otherwise: settings.ridge is 10.0 there and 5.0 here" in caplog.text


def test_a_merge_that_goes_on_is_told_which_option_of_its_stream_is_another(stream):
    merge(stream, ["task1"], "merged", settings={"weights": [1]})
    for number, changed in enumerate(({"ridge": 5.0}, {"settings": {"dtype": "float32"}})):
        out = merge(stream, ["task2"], f"other {number}", "merged", **changed)
        (warning,) = manifest(out)["warnings"]
        assert (
            f"settings differ from those that 'merged' was made with: {name_of(changed)} is "
            in (warning)
        )
    out = merge(stream, ["task2"], "same", "merged", settings={"weights": [0.5]})
    assert manifest(out)["warnings"] == []
