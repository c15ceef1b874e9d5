"""What is wrong with the input of a run is one line, with a remedy that works."""

import io
import logging
import re
import sys

import lightning
import pytest
import torch
from fusion_bench.utils import instantiate
from hydra import compose
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.compare.configs import PROGRAM, compose_run, config_folders
from fusion_bench_nufilt.compare.experiment import Experiment
from fusion_bench_nufilt.continual.baselines import SequentialFineTuning
from fusion_bench_nufilt.continual.errors import OneLineErrors, what_is_wrong
from fusion_bench_nufilt.continual.program import QuietTerminal

BAD = ValueError("model 'task2'\nlacks layer '\x1b[31mfc1'")
LINE = r"model 'task2' lacks layer '\x1b[31mfc1'"


def end_run(error, mode=RunMode.RUN):
    """Tell the callback that a run ended with an error; return what Hydra reports of it."""
    config = OmegaConf.create({"hydra": {"mode": mode}, "modelpool": {"models": {}}})
    result = JobReturn(status=JobStatus.FAILED)
    result.return_value = error
    OneLineErrors().on_job_end(config, result)
    with pytest.raises(Exception) as caught:  # noqa: PT011 -- of whichever kind
        result.return_value  # noqa: B018 -- it raises
    return caught.value


@pytest.mark.parametrize("method", ["nufilt", "best", "continual/stream", "continual/adamerging"])
def test_every_method_brings_the_callbacks_along(method):
    with config_folders():
        config = compose(PROGRAM, [f"method={method}"], return_hydra_config=True)
    callbacks = [instantiate(callback) for callback in config.hydra.callbacks.values()]
    assert [type(callback) for callback in callbacks] == [OneLineErrors, QuietTerminal]


def test_a_run_ends_with_the_line():
    with pytest.raises(SystemExit) as caught:
        end_run(BAD)
    assert caught.value.code == LINE


def test_in_a_sweep_the_line_is_logged_and_the_other_runs_go_on(caplog):
    error = end_run(BAD, RunMode.MULTIRUN)
    assert isinstance(error, CompactHydraException)
    assert str(error) == LINE
    assert LINE in caplog.text


def test_a_mistake_in_the_code_and_hydras_full_error_stay_what_they_are(monkeypatch):
    mistake = AttributeError("no such thing")
    assert end_run(mistake) is mistake
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert end_run(BAD) is BAD


def test_the_log_file_has_the_trace_that_the_terminal_does_not_show(tmp_path):
    root = logging.getLogger()
    terminal = io.StringIO()
    file = logging.FileHandler(tmp_path / "cli.log")
    handlers = [logging.StreamHandler(terminal), file]
    for handler in handlers:
        root.addHandler(handler)
    try:
        OneLineErrors().on_job_start(OmegaConf.create({"modelpool": {"models": {}}}))
        logging.error("failed", exc_info=BAD)  # as FusionBench does
        logging.error("failed", exc_info=AttributeError("a mistake"))
    finally:
        for handler in handlers:
            root.removeHandler(handler)
        file.close()
    assert "task2" in (tmp_path / "cli.log").read_text()
    assert "task2" not in terminal.getvalue()
    assert "a mistake" in terminal.getvalue()


@pytest.mark.parametrize("algorithm", [NufiltContinualMergingAlgorithm, SequentialFineTuning])
def test_an_option_of_a_wrong_value_is_a_value_error_that_names_it(algorithm):
    with pytest.raises(ValueError, match=r"^seed must be a whole number, got None$"):
        algorithm(seed=None)


WRONG = {
    "modelpool.models must give each model a name, got 7": {"modelpool": {"models": 7}},
    "Recursive interpolation detected full_key: modelpool.seed object_type=dict": {
        "modelpool": {"seed": "${.seed}"}
    },
    "Interpolation key 'no' not found full_key: taskpool[0] object_type=list": {
        "modelpool": {},
        "taskpool": ["${no}"],
    },
}


@pytest.mark.parametrize("line", WRONG)
def test_what_is_wrong_with_the_configuration_of_a_pool_is_named(line):
    config = OmegaConf.create(WRONG[line])
    error = AttributeError("'int' object has no attribute 'keys'")
    try:
        OmegaConf.resolve(config)
    except OmegaConfBaseException as of_omegaconf:
        error = of_omegaconf
    assert what_is_wrong(error, config) == line


def line_of(section, config):
    with pytest.raises(Exception) as caught:  # noqa: PT011 -- of whichever kind
        instantiate(OmegaConf.select(config, section), _recursive_=False)
    return what_is_wrong(caught.value, config)


def test_values_that_only_the_user_knows_are_named_with_what_to_add():
    words = ["taskpool=lm_eval"]
    line = line_of("taskpool", compose_run(words))
    assert line == (
        "taskpool.tasks, taskpool.tokenizer: no value; add taskpool.tasks={MODEL: TASK}, with "
        "lm-eval's task for each model, add taskpool.tokenizer=VALUE"
    )
    added = re.findall(r"add (\S+=(?:{.*?}|\w+))", line)
    assert not OmegaConf.missing_keys(compose_run([*words, *added]).taskpool)


def test_a_wrapper_of_no_method_names_the_words_that_give_it_one():
    words = ["method=continual/batch"]
    line = line_of("method", compose_run(words))
    remedy = line.split()[-1]
    assert line == f"method.base_method: no value; name a method of FusionBench, such as {remedy}"
    assert instantiate(compose_run([*words, remedy]).method).name == "DareTaskArithmetic"


def test_an_argument_that_a_pool_needs_is_named_with_what_to_add():
    config = compose_run(["modelpool=nufilt_demo", "taskpool=nufilt_demo"])
    models = {"_pretrained_": "hub/base", "math": "hub/math"}
    config.modelpool = {"_target_": "fusion_bench.modelpool.CausalLMPool", "models": models}
    line = line_of("modelpool", config)
    assert line == (
        "modelpool lacks 'tokenizer', which CausalLMPool needs: add +modelpool.tokenizer=VALUE, or "
        "a line 'tokenizer: VALUE' to its file"
    )
    with pytest.raises(ValueError, match=re.escape(line)):
        Experiment(config).modelpool  # noqa: B018 -- it raises
    OmegaConf.update(config, "modelpool.tokenizer", "VALUE", force_add=True)
    assert Experiment(config).modelpool.model_names == ["math"]


def test_an_argument_that_the_task_pool_of_a_model_pool_needs_is_named_in_its_place():
    config = compose_run(["modelpool=nufilt_demo"])
    config.modelpool.taskpool = {"_target_": "fusion_bench.taskpool.CLIPVisionModelTaskPool"}
    line = line_of("modelpool.taskpool", config)
    assert line.startswith("modelpool.taskpool lacks 'test_datasets', which CLIPVisionModel")


def test_a_class_of_a_newer_python_says_so():
    with pytest.raises(ImportError) as caught:
        from typing import of_a_version_to_come  # noqa: F401
    line = what_is_wrong(caught.value, OmegaConf.create({}))
    assert line.startswith("this needs a newer Python, such as 3.12: cannot import name")


@pytest.mark.parametrize(
    ("logger", "package", "remedy"),
    [
        ("wandb_logger", "wandb", "pip install wandb"),
        (
            "swandb_logger",
            "swandb",
            "pip install swanlab, and add "
            "fabric.loggers._target_=swanlab.integration.pytorch_lightning.SwanLabLogger",
        ),
    ],
)
def test_a_tracker_that_is_not_installed_is_named_with_the_command_that_installs_it(
    monkeypatch, logger, package, remedy
):
    monkeypatch.setitem(sys.modules, package, None)
    words = [f"fabric/loggers={logger}", "fabric.loggers.project=one", "path.log_dir=logs"]
    config = compose_run(words)
    line = line_of("fabric.loggers", config)
    assert line == f"the package '{package}' is not installed: {remedy}"


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("accelerator", "line"),
    [
        pytest.param("cuda", r"fabric\.accelerator=cuda: .*not available", marks=NO_GPU),
        pytest.param("gpu", r"fabric\.accelerator=gpu: No supported gpu", marks=NO_GPU),
        ("tpu", r"fabric\.accelerator=tpu: .*torch_xla"),
        ("abacus", r"fabric: .*'abacus'.*Available names are"),
    ],
)
def test_a_device_that_is_not_here_is_one_line_in_every_command(monkeypatch, accelerator, line):
    monkeypatch.delenv("LT_ACCELERATOR")
    words = ["modelpool=nufilt_demo", f"fabric.accelerator={accelerator}"]
    config = compose_run(words)
    with pytest.raises(Exception) as caught:  # noqa: PT011 -- of whichever kind
        lightning.Fabric(accelerator=accelerator, devices=1)  # as a run of `fusion_bench` does
    assert re.match(line, what_is_wrong(caught.value, config))
    with pytest.raises(ValueError, match=line) as caught:
        Experiment(config).fabric  # noqa: B018 -- as a comparison and an analysis do
    if accelerator != "abacus":
        assert str(caught.value).endswith("; choose fabric.accelerator=cpu")
