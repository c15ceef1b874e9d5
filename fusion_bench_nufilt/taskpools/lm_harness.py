"""Scores of language models by EleutherAI's lm-evaluation-harness."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from fusion_bench import auto_register_config
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from .harness import HarnessTaskPool, Results


@auto_register_config
class LMEvalTaskPool(HarnessTaskPool):
    """Tasks of lm-evaluation-harness (``pip install 'fusion-bench-nufilt[lm-eval]'``), one for each model of a pool.

    Tasks and their data are loaded once, when the first model is scored.

    Args:
        tasks: names of lm-eval's tasks or groups by the names of the models (``{math: gsm8k, code: humaneval}``), or
            a list where these are the same.
        tokenizer: folder or hub name of the tokenizer.
        include_path: folder with further tasks, as lm-eval's ``--include_path``.
        metric: the metric of a task that counts, without its filter; None takes the first that the task has of acc,
            exact_match, acc_norm, pass@1, mcc, f1 and bleu.
        num_fewshot: number of examples in the prompt; None is each task's own.
        limit: examples of each task, as a number or a share; None takes all.
        batch_size: examples that the model reads at once.
        apply_chat_template: whether prompts are put into the tokenizer's chat template.

    Raises:
        ValueError: lm-eval does not know a task, or the task lacks the metric; the message names it.
        ImportError: lm-eval is not installed.
    """

    metrics = ("acc", "exact_match", "acc_norm", "pass@1", "mcc", "f1", "bleu")
    # auto_register_config sets these.
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

    def run_harness(self, model: nn.Module, tasks: list[str]) -> Results:
        """Move the model to the fabric's device, and score it there."""
        manager, lm_eval = self._manager(), _lm_eval()
        scored = lm_eval.models.huggingface.HFLM(
            pretrained=model.to(self.fabric.device), tokenizer=self.tokenizer, batch_size=self.batch_size
        )
        results: Results = lm_eval.simple_evaluate(
            scored,
            tasks=tasks,
            num_fewshot=self.num_fewshot,
            limit=self.limit,
            apply_chat_template=self.apply_chat_template,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=0,
        )["results"]
        return results

    def get_test_dataloader(self, task: str) -> "DataLoader[str]":
        """Return the inputs that `nufilt analyze` uses: a task's prompts, without examples and answers.

        Args:
            task: name of the model.
        """
        if task not in self._names:
            raise ValueError(f"the task pool has no data of task '{task}', only of {', '.join(self._names)}")
        found = self._manager().load([self._names[task]])["tasks"].values()
        prompts: Any = [each.doc_to_text(document) for each in found for document in each.eval_docs]
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

        def tokenize(texts: list[str]) -> dict[str, Any]:
            return dict(tokenizer(texts, padding=True, truncation=True, return_tensors="pt"))

        return DataLoader(prompts, batch_size=self.batch_size, collate_fn=tokenize)

    def _manager(self) -> Any:
        _lm_eval()
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
    """Return an index of all tasks that keeps the tasks it loads.

    Indexing takes seconds, and a loaded task remembers its number of examples, so that each number has its own index.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path)
    load = cache(lambda names: TaskManager.load(manager, list(names)))
    manager.load = lambda names: load(tuple(names))
    return manager
