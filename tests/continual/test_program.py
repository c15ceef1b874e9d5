"""Which task pool scores a run; and what it is told of them."""

import io
import json
import logging
import signal

import pytest
from fusion_bench import RuntimeConstants
from omegaconf import OmegaConf
from rich.console import Console
from rich.logging import RichHandler

from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.continual.program import (
    QuietTerminal,
    refuse_several_processes,
    says_how_to_go_on,
)
from fusion_bench_nufilt.continual.taskpools.local_tasks import register_task
from fusion_bench_nufilt.utils.files import FullDiskError
from fusion_bench_nufilt.utils.logs import TerminalLog

CONFIG = OmegaConf.create({"method": {"null_rank": 8}, "hydra": {"overrides": {"task": []}}})


def test_a_task_pool_that_is_named_wins_and_a_missing_task_is_shown_as_missing(program, capfd):
    words = ("taskpool=nufilt_demo", "~taskpool.test_datasets.digits", "method.evaluate=last")
    result = json.loads((program(*words) / "accuracy_matrix.json").read_text())
    assert sorted(result["tasks"]) == ["colours", "digits", "shapes"]
    assert result["missing"] == ["digits"]
    assert result["ACC"] is not None
    assert "no score for digits" in " ".join(capfd.readouterr().out.split())


def test_the_placeholder_where_it_is_named_means_no_scores(program):
    logs = program("taskpool=dummy", "method.save_on_every_step=false")
    written = {path.name for path in logs.iterdir()}
    assert not {"accuracy_matrix.json", "checkpoints"} & written


@pytest.mark.usefixtures("pages")
def test_a_run_on_one_batch_says_so_and_gives_no_score_to_a_whole_one(program, monkeypatch, capfd):
    # The program sets it for its process.
    monkeypatch.setattr(RuntimeConstants, "debug", False)
    words = ("modelpool.taskpool.dataloader_kwargs.batch_size=4", "method.evaluate=last")
    logs = program(*words, "fast_dev_run=true")
    one_batch = "one batch of each task's test data (fast_dev_run=true)"
    assert " ".join(capfd.readouterr().out.split()).count(one_batch) == 2
    result = json.loads((logs / "accuracy_matrix.json").read_text())
    assert result["scored"] == one_batch
    assert all((4 * score).is_integer() for score in result["accuracy_matrix"][-1])
    report = json.loads((logs / "program_report.json").read_text())
    assert report["continual"]["scored"] == one_batch
    page = (logs / "index.html").read_text().replace("&#39;", "'")
    assert f"scored on {one_batch}" in page
    with pytest.raises(ValueError, match=r'scored is "one batch .* there and "all test data" here'):
        program(*words)


def test_the_log_stands_above_the_bars_without_times_and_what_the_user_chose_is_left():
    root = logging.getLogger()
    before = list(root.handlers)
    chosen = logging.StreamHandler()
    fusion_bench = RichHandler(console=Console(file=io.StringIO()), level=logging.WARNING)
    fusion_bench.addFilter(lambda record: "trace" not in record.msg)
    root.handlers[:] = [chosen, fusion_bench]
    try:
        QuietTerminal().on_job_start(CONFIG)
        first, second = root.handlers
        assert first is chosen
        assert type(second) is TerminalLog
        assert (second.console, second.level) == (fusion_bench.console, logging.WARNING)
        root.error("a trace")
        root.error("an error")
        root.info("a word")
        assert fusion_bench.console.file.getvalue().split() == ["ERROR", "an", "error"]
    finally:
        root.handlers[:] = before


def test_more_than_one_process_is_refused_before_any_is_launched():
    config = OmegaConf.create({"fabric": {"accelerator": "cpu", "devices": 3}})
    with pytest.raises(ValueError, match=r"runs in one process: set fabric\.devices=1"):
        refuse_several_processes(config)
    config.fabric.devices = 1
    refuse_several_processes(config)


def test_a_test_set_that_is_looked_up_and_then_loaded_is_no_warning(recwarn):
    for _ in range(2):
        register_task("a_task_of_mine", ["cat", "dog"], "a {}")
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize(
    ("words", "spelling"),
    [
        (["method=nufilt", "+null_rank=0.1667"], "null_rank=0.1667"),
        (["method=continual/magmax", "+save_on_every_step=false"], "save_on_every_step=False"),
        (["method=continual/stream", "+base_method=1"], "base_method=1"),
        (["method=nufilt", "seed=7"], "seed=7"),
    ],
)
def test_an_option_of_the_method_that_was_typed_as_one_of_the_program_is_refused(words, spelling):
    """Hydra puts it where nothing reads it."""
    with pytest.raises(ValueError, match=f"of the program: say method.{spelling}"):
        compose_run(words)
    method, _ = words
    compose_run([method, f"++method.{spelling}"])


def test_fusion_bench_ends_with_that_line():
    with pytest.raises(SystemExit, match=r"say method\.null_rank=5$"):
        QuietTerminal().on_job_start(OmegaConf.merge(CONFIG, {"null_rank": 5}))


def test_fusionbenchs_own_seed_and_keys_pass_beside_those_of_the_method():
    words = ["method=nufilt", "seed=7", "method.seed=7", "+mine=1", "+modelpool.seed=1"]
    assert compose_run(words).seed == 7


def test_ctrl_c_and_a_full_disk_say_how_to_go_on(caplog):
    line = "the same command with path.log_dir=logs goes on"
    with pytest.raises(SystemExit) as caught, says_how_to_go_on("logs"):
        raise KeyboardInterrupt
    assert caught.value.code == 128 + signal.SIGINT
    assert caplog.messages == [f"interrupted; {line} after the last whole step"]
    with pytest.raises(OSError, match=f"no room: {line}"), says_how_to_go_on("logs"):
        raise FullDiskError("no room")
