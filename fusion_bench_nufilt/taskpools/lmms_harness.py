"""Scores of vision-language models by lmms-eval, which runs in an environment of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fusion_bench import BaseTaskPool, auto_register_config
from fusion_bench.mixins import LightningFabricMixin
from torch import nn
from transformers import AutoProcessor

from fusion_bench_nufilt.continual import TasksByName

from .results import by_model, first_metric

# What stands for a task where its metric is not named, the first that it has.
_METRICS = ("exact_match", "anls", "acc", "accuracy", "CIDEr")


@auto_register_config
class LMMSEvalTaskPool(LightningFabricMixin, BaseTaskPool, TasksByName):
    """Tasks of lmms-eval, one for each model of a pool.

    A model to be scored is written to a temporary folder with its processor, and read there by a process of lmms-eval.
    That may be in another environment, because a plain installation of lmms-eval brings some ninety packages and a
    torch of its own.

    Args:
        tasks: names of lmms-eval's tasks by the names of the models (``{iconqa: iconqa_val}``), or a list where these
            are the same.
        processor: folder or hub name of the processor.
        python: of the environment with lmms-eval; None: the one that runs.
        model: lmms-eval's name of the kind of model.
        include_path: folder with further tasks, as lmms-eval's ``--include_path``.
        metric: which of a task's metrics counts, without its filter; None: the first it has of exact_match, anls, acc,
            accuracy and CIDEr.
        limit: examples of each task; None: all.

    Raises:
        ValueError: the environment has no lmms-eval, or a task lacks the metric.
        RuntimeError: lmms-eval failed; with the end of what it printed.
    """

    # set by auto_register_config
    processor: str
    model: str
    include_path: str | None
    metric: str | None
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
        super().__init__(**kwargs)
        self._names = by_model(tasks)
        self._python = str(Path(python or sys.executable).expanduser().absolute())
        look = "import sys, importlib.util as util; sys.exit(util.find_spec('lmms_eval') is None)"
        try:
            subprocess.run([self._python, "-c", look], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            raise ValueError(
                f"'{self._python}' has no lmms-eval: let LMMS_EVAL_PYTHON, or `python` of the task pool, name the "
                "Python of an environment that has it, or say taskpool=dummy to merge without scores"
            ) from None

    @property
    def task_names(self) -> list[str]:
        """Of the models."""
        return list(self._names)

    def evaluate(self, model: nn.Module, tasks: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
        """Score a vision-language model.

        Args:
            model: of transformers.
            tasks: names of the models whose tasks count; None: all.

        Returns:
            ``{name: {"accuracy": score}}``, with the score that the metric gives in place of an accuracy.
        """
        names = [name for name in self._names if tasks is None or name in tasks]
        if not names:
            return {}
        with TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            of_transformers: Any = model
            of_transformers.save_pretrained(folder, safe_serialization=True)
            AutoProcessor.from_pretrained(self.processor).save_pretrained(folder)
            results = self._run(folder, sorted({self._names[name] for name in names}))
        metrics = (self.metric,) if self.metric else _METRICS
        return {name: {"accuracy": first_metric(self._names[name], results, metrics)} for name in names}

    def _run(self, folder: Path, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Results by task, of the model in a folder; further files are left beside it."""
        device, out = str(self.fabric.device), folder.parent / "results"
        command = [self._python, "-m", "lmms_eval", f"--model={self.model}", f"--tasks={','.join(tasks)}"]
        command += [f"--model_args=pretrained={folder},device_map={device}", f"--device={device}", "--batch_size=1"]
        command += [f"--output_path={out}"]
        if self.include_path is not None:
            command.append(f"--include_path={Path(self.include_path).expanduser().absolute()}")
        if self.limit is not None:
            command.append(f"--limit={self.limit}")
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            command, cwd=folder.parent, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        files = sorted(out.rglob("*results.json"))
        # It ends with 0 after errors, and counts an answer that it could not generate as a wrong one.
        if done.returncode != 0 or not files or "in generating" in done.stdout:
            raise RuntimeError(f"lmms-eval failed on {', '.join(tasks)}:\n{done.stdout[-4000:]}")
        results: dict[str, dict[str, Any]] = json.loads(files[-1].read_text())["results"]
        return results
