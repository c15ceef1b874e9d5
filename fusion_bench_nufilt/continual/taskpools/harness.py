"""Task pools that score with an evaluation harness, which is imported or run only when needed."""

import json
import logging
import os
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from fusion_bench import BaseTaskPool, auto_register_config
from fusion_bench.mixins import LightningFabricMixin
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoProcessor, AutoTokenizer
from typing_extensions import TypedDict

from fusion_bench_nufilt.continual.content import load_data
from fusion_bench_nufilt.continual.evaluation import TasksByName
from fusion_bench_nufilt.utils.files import expanded, read_json

log = logging.getLogger(__name__)

#: Metrics by task, such as ``{"acc,none": 0.5, "acc_stderr,none": 0.01}``; the part after the comma
#: is a filter.
Results = dict[str, dict[str, Any]]


#: Shares, whatever the task: they are at most 1, and a task's own version that is above has another
#: scale.
_SHARES = ("acc", "acc_norm", "accuracy", "anls", "exact_match", "pass@1")
#: The scales of metrics that lm-eval computes of all items, by its functions in `api/metrics.py`.
_LM_EVAL_SCALES = {"bleu": 100, "chrf": 100, "chrfpp": 100, "f1_score": 1, "matthews_corrcoef": 1}


def _scale_of_share(metric: str, value: float) -> float | None:
    return 1 if metric in _SHARES and 0 <= value <= 1 else None


class HarnessTaskPool(LightningFabricMixin, BaseTaskPool, TasksByName):
    """One task of an evaluation harness for each model of a pool."""

    metrics: ClassVar[tuple[str, ...]]

    def __init__(
        self, tasks: Mapping[str, str] | Sequence[str], metric: str | None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if not isinstance(tasks, Mapping):
            tasks = {name: name for name in tasks}
        self._names = dict(tasks)  # the harness's task by model
        self.task_names = list(self._names)  # those of the models
        self._metrics = self.metrics if metric is None else (metric,)
        self._warned: set[str] = set()

    def evaluate(
        self, model: nn.Module, tasks: Sequence[str] | None = None, limit: int | None = None
    ) -> dict[str, dict[str, float]]:
        """Return ``{name: {"accuracy": score}}``, whatever metric the score is, as a fraction.

        A metric of unknown scale, or one that is better if lower, is no score: it is returned under
        its own name.
        """
        names = self._names
        if tasks is not None:
            names = {name: task for name, task in self._names.items() if name in tasks}
        if not names:
            return {}
        results = self.run_harness(model, sorted(set(names.values())), limit)
        scores = {}
        for name, task in names.items():
            metric, value = self._chosen(task, results[task])
            scale = self.scale(task, metric, value)
            if scale is not None:
                scores[name] = {"accuracy": value / scale}
                continue
            scores[name] = {metric: value}
            if name not in self._warned:
                self._warned.add(name)
                log.warning(
                    "task '%s': %s = %g, whose scale is not known, or which is better if lower: it "
                    "is shown in reports, and in no mean",
                    name,
                    metric,
                    value,
                )
        return scores

    @abstractmethod
    def scale(self, task: str, metric: str, value: float) -> float | None:
        """Return what a metric of a task is at its best, such as 1 or 100; None if that is not
        known, or if it is better the lower it is.
        """

    @abstractmethod
    def run_harness(self, model: nn.Module, tasks: list[str], limit: int | None) -> Results:
        """Return the harness's results on ``limit`` examples of each task, by default the
        pool's.
        """

    def _chosen(self, task: str, results: dict[str, Any]) -> tuple[str, float]:
        """Return the metric that counts, and its value."""
        values: dict[str, Any] = {}
        for key, value in results.items():
            metric, comma, _ = key.partition(",")
            if comma:
                values.setdefault(metric, value)  # of a metric's filters, the first one counts
        for metric in self._metrics:
            if metric in values:
                return metric, float(values[metric])
        metrics = sorted(metric for metric in values if "_stderr" not in metric)
        raise ValueError(
            f"task '{task}' has no metric {' or '.join(self._metrics)}, only {', '.join(metrics)}"
        )


@auto_register_config
class LMEvalTaskPool(HarnessTaskPool):
    """Tasks of lm-evaluation-harness (``pip install 'fusion-bench-nufilt[lm-eval]'``), one for each
    model of a pool.

    They are loaded once, before the first model; a ValueError says whether lm-eval, a task, its
    data or the metric is missing.

    Args:
        tasks: lm-eval's task or group by model (``{math: gsm8k, code: humaneval}``), or a list of
            equal names.
        tokenizer: folder or hub name of the tokenizer.
        include_path: folder with further tasks, like lm-eval's ``--include_path``.
        metric: the metric that counts, without its filter; None: the first of ``metrics`` that a
            task has. One of unknown scale is shown in reports and in no mean.
        num_fewshot: examples in the prompt; None: each task's own number.
        limit: examples of each task, as a number or a share; None: all.
        batch_size: examples that the model reads at once.
        apply_chat_template: whether prompts are put into the tokenizer's chat template.
    """

    metrics = ("acc", "exact_match", "acc_norm", "pass@1", "mcc", "f1", "bleu")
    # These, and all other arguments, are set by auto_register_config.
    tokenizer: str
    include_path: str | None
    num_fewshot: int | None
    limit: int | float | None
    batch_size: int
    apply_chat_template: bool

    def __init__(
        self,
        tasks: Mapping[str, str] | Sequence[str],
        tokenizer: str,
        include_path: str | None = None,
        metric: str | None = None,
        num_fewshot: int | None = None,
        limit: int | float | None = None,
        batch_size: int = 8,
        apply_chat_template: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(tasks, metric, **kwargs)
        self._loaded: dict[str, list[Any]] = {}  # lm-eval's tasks by its name, or a group

    def run_harness(self, model: nn.Module, tasks: list[str], limit: int | None) -> Results:
        lm_eval = _lm_eval()
        language_model = lm_eval.models.huggingface.HFLM(
            pretrained=model.to(self.fabric.device),
            tokenizer=self.tokenizer,
            batch_size=self.batch_size,
        )
        report = lm_eval.simple_evaluate(
            language_model,
            tasks=list(chain.from_iterable(map(self._load, tasks))),
            num_fewshot=self.num_fewshot,
            limit=self.limit if limit is None else limit,
            apply_chat_template=self.apply_chat_template,
            task_manager=self._manager(),
            log_samples=False,
            bootstrap_iters=0,
        )
        results: Results = report["results"]
        return results

    def scale(self, task: str, metric: str, value: float) -> float | None:
        # Of a group, all tasks must have one scale.
        scales = set()
        for loaded_task in self._leaves(task):
            scales.add(_scale_in_task(loaded_task, metric, value))
        return scales.pop() if len(scales) == 1 else None

    def get_test_dataloader(self, task: str) -> "DataLoader[str]":
        """Return the inputs for `nufilt analyze`: the prompts of a task, without examples and
        answers.
        """
        prompts: Any = []
        for loaded_task in self._leaves(self._names[task]):
            prompts += [loaded_task.doc_to_text(document) for document in loaded_task.eval_docs]
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

        def tokenize(texts: list[str]) -> dict[str, Any]:
            return dict(tokenizer(texts, padding=True, truncation=True, return_tensors="pt"))

        return DataLoader(prompts, batch_size=self.batch_size, collate_fn=tokenize)

    def load_test_data(self) -> dict[str, Sequence[Any]]:
        data: dict[str, Sequence[Any]] = {}
        for name, task in self._names.items():
            documents: list[Any] = []
            for loaded_task in load_data(name, partial(self._leaves, task)):
                documents += loaded_task.eval_docs
            data[name] = documents
        return data

    def _leaves(self, task: str) -> list[Any]:
        """Return the tasks of one of lm-eval's names, more than one if it is a group."""
        return list(self._manager().load(self._load(task))["tasks"].values())

    def _load(self, task: str) -> list[Any]:
        """Load what has one of lm-eval's names, once."""
        if task not in self._loaded:
            loaded = self._manager().load([task])
            group = loaded["groups"].get(task)
            self._loaded[task] = [group] if group else list(loaded["tasks"].values())
        return self._loaded[task]

    def _manager(self) -> Any:
        manager = _task_manager(self.include_path)
        names = {*manager.all_tasks, *manager.all_groups}
        for task in sorted(self._names.values()):
            if task not in names:
                raise ValueError(
                    f"lm-eval knows no task '{task}'; include_path names a folder with more"
                )
        return manager


def _scale_in_task(task: Any, metric: str, value: float) -> float | None:
    """Return the scale of a metric by the function with which lm-eval aggregates it for a task."""
    if not task.higher_is_better().get(metric, True):
        return None
    aggregate = task.aggregation().get(metric)
    # lm-eval takes the mean of what a task's own metric adds to its results.
    if aggregate is None:
        return _scale_of_share(metric, value)
    if aggregate.__module__ != "lm_eval.api.metrics":
        return None
    if aggregate.__name__ in ("mean", "nanmean"):
        return _scale_of_share(metric, value)
    return _LM_EVAL_SCALES.get(aggregate.__name__)


def _lm_eval() -> Any:
    try:
        import lm_eval.models.huggingface
        import lm_eval.tasks
    except ImportError as error:
        raise ValueError(
            f"{error}; scores by lm-eval need: pip install 'fusion-bench-nufilt[lm-eval]'"
        ) from error
    return lm_eval


@cache
def _task_manager(include_path: str | None) -> Any:
    """Return an index of all tasks, which takes seconds."""
    return _lm_eval().tasks.TaskManager(include_path=include_path)


class _ResultsFile(TypedDict):
    results: Results


#: A program for lmms-eval's environment: it loads tasks and their data, and ends with a line on
#: what fails.
_LOAD_TASKS = """
import json, sys
from lmms_eval.tasks import TaskManager
further, *tasks = json.loads(sys.argv[1])
manager = TaskManager(include_path=further)
for task in tasks:
    if task not in manager.all_tasks:
        sys.exit(f"lmms-eval knows no task '{task}'; include_path names a folder with more")
    try:
        manager.load_task_or_group([task])
    except Exception as error:
        words = " ".join(str(error).split())
        sys.exit(f"lmms-eval can't load task '{task}': {type(error).__name__}: {words}")
"""


@auto_register_config
class LMMSEvalTaskPool(HarnessTaskPool):
    """Tasks of lmms-eval, one for each model of a pool.

    The model and its processor are written to a temporary folder for a process of lmms-eval. That
    may run in another environment, since it installs some ninety packages and its own torch. Before
    any model is loaded, a ValueError says whether lmms-eval, a task or its data is missing; a
    RuntimeError has the end of its output if it fails.

    Args:
        tasks: lmms-eval's task by model, as in :class:`LMEvalTaskPool`.
        processor: folder or hub name of the processor.
        python: the Python of the environment with lmms-eval; None: this one.
        model: lmms-eval's name for the type of model.
        include_path: folder with further tasks, like lmms-eval's ``--include_path``; None: this
            project's.
        metric: the metric that counts, without its filter; None: the first of ``metrics`` that a
            task has. One of unknown scale is shown in reports and in no mean.
        limit: examples of each task; None: all.
    """

    metrics = ("exact_match", "anls", "acc", "accuracy", "CIDEr")
    processor: str  # set by auto_register_config

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
        task_folder = include_path or Path(__file__).with_name("lmms_tasks")
        self._task_folder = str(expanded(task_folder).absolute())
        self._options = [
            f"--model={model}",
            "--batch_size=1",
            f"--include_path={self._task_folder}",
        ]
        if limit is not None:
            self._options.append(f"--limit={limit}")
        self._python = str(expanded(python or sys.executable).absolute())
        try:
            subprocess.run(
                [self._python, "-c", "import lmms_eval"], check=True, capture_output=True
            )
        except (OSError, subprocess.CalledProcessError):
            raise ValueError(
                f"'{self._python}' has no lmms-eval: let LMMS_EVAL_PYTHON, or `python` of the task "
                "pool, name the Python of an environment that has it, or say taskpool=dummy to "
                "merge without scores"
            ) from None

    def load_test_data(self) -> dict[str, Sequence[Any]]:
        words = json.dumps([self._task_folder, *sorted(set(self._names.values()))])
        with TemporaryDirectory() as temporary:
            process = self._run([self._python, "-c", _LOAD_TASKS, words], temporary)
        if process.returncode != 0:
            raise ValueError(process.stdout.strip().splitlines()[-1])
        return {}  # they are in the other environment

    def scale(self, task: str, metric: str, value: float) -> float | None:
        if metric == "CIDEr":  # 1 by convention, and above it in rare cases
            return 1
        return _scale_of_share(metric, value)

    def _run(self, command: list[str], folder: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the environment of lmms-eval, without this one's packages."""
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        return subprocess.run(
            command,
            cwd=folder,
            env=environment,
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run_harness(self, model: Any, tasks: list[str], limit: int | None) -> Results:
        with TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            out = Path(temporary) / "results"
            model.save_pretrained(folder, safe_serialization=True)
            AutoProcessor.from_pretrained(self.processor).save_pretrained(folder)
            device = str(self.fabric.device)
            command = [self._python, "-m", "lmms_eval", *self._options]
            command.append(f"--model_args=pretrained={folder},device_map={device}")
            command.append(f"--device={device}")
            command.append(f"--tasks={','.join(tasks)}")
            command.append(f"--output_path={out}")
            if limit is not None:
                command.append(f"--limit={limit}")  # of two, the last one counts
            process = self._run(command, temporary)
            files = sorted(out.rglob("*results.json"))
            # lmms-eval exits with 0 after errors, and counts an answer that it could not generate
            # as wrong.
            failed = process.returncode != 0 or "in generating" in process.stdout
            if failed or not files:
                raise RuntimeError(
                    f"lmms-eval failed on {', '.join(tasks)}:\n{process.stdout[-4000:]}"
                )
            content = read_json(files[-1], _ResultsFile, "lmms-eval wrote it")
            assert content is not None
            return content["results"]
