"""Scores of language models by EleutherAI's lm-evaluation-harness."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from fusion_bench import BaseTaskPool, auto_register_config
from fusion_bench.mixins import LightningFabricMixin
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from fusion_bench_nufilt.continual import TasksByName

from .results import by_model, first_metric

# What stands for a task where its metric is not named, the first that it has.
_METRICS = ("acc", "exact_match", "acc_norm", "pass@1", "mcc", "f1", "bleu")


@auto_register_config
class LMEvalTaskPool(LightningFabricMixin, BaseTaskPool, TasksByName):
    """Tasks of lm-evaluation-harness (``pip install 'fusion-bench-nufilt[lm-eval]'``), one for each model of a pool.

    Tasks and their data are loaded once, at the first score.

    Args:
        tasks: names of lm-eval's tasks or groups by the names of the models (``{math: gsm8k, code: humaneval}``), or
            a list where these are the same.
        tokenizer: folder or hub name of the tokenizer.
        include_path: folder with further tasks, as lm-eval's ``--include_path``.
        metric: which of a task's metrics counts, without its filter; None: the first it has of acc, exact_match,
            acc_norm, pass@1, mcc, f1 and bleu.
        num_fewshot: examples in the prompt; None: as each task says.
        limit: examples of each task, a number or a share of them; None: all.
        batch_size: of the model.
        apply_chat_template: put prompts into the tokenizer's chat template.

    Raises:
        ValueError: a task that lm-eval does not know, or one without the metric; names it.
        ImportError: lm-eval is not installed.
    """

    # set by auto_register_config
    tasks: Any
    tokenizer: str
    include_path: str | None
    metric: str | None
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
        super().__init__(**kwargs)
        self._names = by_model(tasks)

    @property
    def task_names(self) -> list[str]:
        """Of the models."""
        return list(self._names)

    def evaluate(self, model: nn.Module, tasks: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
        """Score a causal language model.

        Args:
            model: of transformers; is moved to the fabric's device.
            tasks: names of the models whose tasks count; None: all.

        Returns:
            ``{name: {"accuracy": score}}``, with the score that the metric gives in place of an accuracy.
        """
        lm_eval = _lm_eval()
        names = [name for name in self._names if tasks is None or name in tasks]
        if not names:
            return {}
        manager = self._manager()
        scored = lm_eval.models.huggingface.HFLM(
            pretrained=model.to(self.fabric.device), tokenizer=self.tokenizer, batch_size=self.batch_size
        )
        results = lm_eval.simple_evaluate(
            scored,
            tasks=sorted({self._names[name] for name in names}),
            num_fewshot=self.num_fewshot,
            limit=self.limit,
            apply_chat_template=self.apply_chat_template,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=0,
        )["results"]
        metrics = (self.metric,) if self.metric else _METRICS
        return {name: {"accuracy": first_metric(self._names[name], results, metrics)} for name in names}

    def get_test_dataloader(self, task: str) -> "DataLoader[str]":
        """A task's prompts without examples and answers, tokenized and padded: what `nufilt analyze` looks at.

        Args:
            task: name of the model.
        """
        if task not in self._names:
            raise ValueError(f"the task pool has no data of task '{task}', only of {', '.join(self._names)}")
        _lm_eval()
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        found = self._manager().load([self._names[task]])["tasks"].values()
        prompts: Any = [each.doc_to_text(document) for each in found for document in each.eval_docs]

        def tokenize(texts: list[str]) -> dict[str, Any]:
            return dict(tokenizer(texts, padding=True, truncation=True, return_tensors="pt"))

        return DataLoader(prompts, batch_size=self.batch_size, collate_fn=tokenize)

    def _manager(self) -> Any:
        manager = _task_manager(self.include_path, self.num_fewshot)
        if unknown := sorted(set(self._names.values()) - {*manager.all_tasks, *manager.all_groups}):
            raise ValueError(f"lm-eval knows no task '{unknown[0]}'; include_path names a folder with more")
        return manager


def _lm_eval() -> Any:
    try:
        import lm_eval.models.huggingface
    except ImportError as error:
        raise ImportError(f"{error}; scores by lm-eval need: pip install 'fusion-bench-nufilt[lm-eval]'") from error
    return lm_eval


@cache
def _task_manager(include_path: str | None, num_fewshot: int | None) -> Any:
    """An index of all tasks, which takes seconds, that keeps what it loads; tasks remember the number of examples."""
    from lm_eval.tasks import TaskManager

    class KeepingTaskManager(TaskManager):
        def __init__(self) -> None:
            super().__init__(include_path=include_path)
            self._kept: dict[tuple[str, ...], Any] = {}

        def load(self, names: list[str]) -> Any:
            key = tuple(names)
            if key not in self._kept:
                self._kept[key] = super().load(names)
            return self._kept[key]

    return KeepingTaskManager()
