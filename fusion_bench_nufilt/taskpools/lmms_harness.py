"""Scores of vision-language models by lmms-eval, which runs in an environment of its own."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fusion_bench import auto_register_config
from torch import nn
from transformers import AutoProcessor
from typing_extensions import TypedDict

from fusion_bench_nufilt.storage.json_files import read_json

from .harness import HarnessTaskPool, Results

_HAS_LMMS_EVAL = "import sys, importlib.util as util; sys.exit(util.find_spec('lmms_eval') is None)"


class _ResultsFile(TypedDict):
    results: Results


@auto_register_config
class LMMSEvalTaskPool(HarnessTaskPool):
    """Tasks of lmms-eval, one for each model of a pool.

    The model and its processor are written to a temporary folder, from which a process of lmms-eval reads them. It may
    run in another environment, because a plain installation of lmms-eval brings some ninety packages and a torch of
    its own.

    Args:
        tasks: names of lmms-eval's tasks by the names of the models (``{iconqa: iconqa_val}``), or a list where these
            are the same.
        processor: folder or hub name of the processor.
        python: the Python of the environment with lmms-eval; None is the one that runs.
        model: lmms-eval's name of the kind of model.
        include_path: folder with further tasks, as lmms-eval's ``--include_path``.
        metric: the metric of a task that counts, without its filter; None takes the first that the task has of
            exact_match, anls, acc, accuracy and CIDEr.
        limit: examples of each task; None takes all.

    Raises:
        ValueError: the environment has no lmms-eval, or a task lacks the metric.
        RuntimeError: lmms-eval failed; the message has the end of its output.
    """

    metrics = ("exact_match", "anls", "acc", "accuracy", "CIDEr")
    # auto_register_config sets these.
    processor: str
    model: str
    include_path: str | None
    limit: int | None

    def __init__(
        self,
        tasks: Mapping[str, str] | Sequence[str],
        processor: str,
        python: str | None = None,
        model: str = "llava_hf",
        include_path: str | None = None,
        metric: str | None = None,
        limit: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(tasks, metric, **kwargs)
        self._python = str(Path(python or sys.executable).expanduser().absolute())
        try:
            subprocess.run([self._python, "-c", _HAS_LMMS_EVAL], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            raise ValueError(
                f"'{self._python}' has no lmms-eval: let LMMS_EVAL_PYTHON, or `python` of the task pool, name the "
                "Python of an environment that has it, or say taskpool=dummy to merge without scores"
            ) from None

    def run_harness(self, model: nn.Module, tasks: list[str]) -> Results:
        """Save the model to a temporary folder, and have lmms-eval score it there."""
        with TemporaryDirectory() as temporary:
            folder, out = Path(temporary) / "model", Path(temporary) / "results"
            of_transformers: Any = model
            of_transformers.save_pretrained(folder, safe_serialization=True)
            AutoProcessor.from_pretrained(self.processor).save_pretrained(folder)
            environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
            done = subprocess.run(
                self._command(folder, out, tasks),
                cwd=temporary,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            files = sorted(out.rglob("*results.json"))
            # It ends with 0 after errors, and counts an answer that it could not generate as a wrong one.
            if done.returncode != 0 or not files or "in generating" in done.stdout:
                raise RuntimeError(f"lmms-eval failed on {', '.join(tasks)}:\n{done.stdout[-4000:]}")
            content = read_json(files[-1], _ResultsFile, "lmms-eval wrote it")
            assert content is not None
            return content["results"]

    def _command(self, folder: Path, out: Path, tasks: list[str]) -> list[str]:
        device = str(self.fabric.device)
        command = [self._python, "-m", "lmms_eval", f"--model={self.model}", f"--tasks={','.join(tasks)}"]
        command += [f"--model_args=pretrained={folder},device_map={device}", f"--device={device}", "--batch_size=1"]
        command += [f"--output_path={out}"]
        if self.include_path is not None:
            command.append(f"--include_path={Path(self.include_path).expanduser().absolute()}")
        if self.limit is not None:
            command.append(f"--limit={self.limit}")
        return command
