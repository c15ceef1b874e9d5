"""FusionBench's own methods under the protocol: batch methods run continually, continual ones run as they are."""

import time
from copy import copy, deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from fusion_bench import BaseModelPool, auto_register_config
from fusion_bench.utils import import_object, instantiate
from omegaconf import DictConfig
from torch import nn

from fusion_bench_nufilt.continual import ContinualMergingAlgorithm, ProtocolConfig
from fusion_bench_nufilt.continual.models import MERGED
from fusion_bench_nufilt.core.options import split_options, takes_options
from fusion_bench_nufilt.layers import check_model

from .rules import ONE_FORM, RULES, RuleConfig, Step, shifted


class _Baseline(ContinualMergingAlgorithm):
    base_method: DictConfig  # set by auto_register_config

    @property
    def name(self) -> str:
        return str(self.base_method._target_).rpartition(".")[2]

    def check_model(self, pretrained: nn.Module, model: nn.Module, name: str) -> None:
        check_model(pretrained, model, name=name)

    def make_base_method(self, taskpool: Any) -> Any:
        """Return the method of FusionBench, wired as its program would, with the task pool that it may need."""
        # Ray 2.54 and later add a parameter to the functions they decorate; FusionBench would take it for an option.
        constructor = import_object(self.base_method._target_).__init__
        getattr(getattr(constructor, "__wrapped__", constructor), "__dict__", {}).pop("__signature__", None)
        method = instantiate(self.base_method)
        method._fabric_instance = self.fabric
        method._program = SimpleNamespace(taskpool=taskpool)
        return method


@auto_register_config
@takes_options(RuleConfig, ProtocolConfig)
class BatchMethodBaseline(_Baseline):
    """A batch method of FusionBench, run continually by a rule of :mod:`fusion_bench_nufilt.baselines.rules`.

    Args:
        base_method: config of the method, with ``_target_``.
        **kwargs: options of :class:`RuleConfig` and :class:`fusion_bench_nufilt.continual.ProtocolConfig`.

    Raises:
        ValueError: a value is out of its range, or the method returns a model of another class or one that is not
            finite.
    """

    def __init__(self, base_method: DictConfig, **kwargs: Any) -> None:
        (self.how,), protocol = split_options([RuleConfig], kwargs)
        super().__init__(**protocol)

    def start(self, pretrained: nn.Module, names: list[str]) -> None:
        if self.how.chosen == "add_running" and self.first_step > 1:
            raise ValueError(
                f"{self.name}: rule=add_running goes on from the method's last result, which is not in '{MERGED}'"
            )
        self._before = pretrained

    def restore(self, step: int) -> None:
        if self.how.chosen == "add_running" and self.folder is not None and step > 1:
            self._before = deepcopy(self._before)
            self.folder.load_step(step - 1, self._before)

    def merge_step(self, step: int, name: str, pretrained: nn.Module, merged: nn.Module, task: nn.Module) -> nn.Module:
        def merge(base: nn.Module, *models: nn.Module) -> nn.Module:
            names = ["merged so far", name][-len(models) :]
            # FusionBench's methods write their result into the pretrained model that they load.
            pool = {"_pretrained_": deepcopy(base), **dict(zip(names, models, strict=True))}
            with torch.enable_grad():
                result = self.make_base_method(self.taskpool).run(BaseModelPool(pool))
            if type(result) is not type(pretrained):
                raise ValueError(
                    f"{self.name} returns a {type(result).__name__}, not a {type(pretrained).__name__}: "
                    "it can't be run continually"
                )
            return result

        if step > 1:
            models = Step(merge, pretrained, self._before, merged, task, self.how.merged_scale)
            result = RULES[self.how.chosen](models)
        elif self.how.merge_first:
            result = merge(pretrained, task)
        else:
            result = shifted(pretrained, task, pretrained, self.how.merged_scale)
        self.check_model(pretrained, result, f"merged after step {step}")
        self._before = merged
        return result


@auto_register_config
class ContinualMethodBaseline(_Baseline):
    """A continual method of FusionBench (``opcm/*``, ``dop/*``), run as it is. The protocol only observes its steps.

    Args:
        base_method: config of the method, with ``_target_``. The method passes the model of each step to its own
            ``save_merged_model``.
        form: ``paper``, which is the only form.
        **kwargs: options of the protocol, see :class:`ContinualMergingAlgorithm`.

    Raises:
        ValueError: another form is chosen, or the run is to go on from a step, which can't be done: the merged model
            does not hold all that such a method keeps between its steps.
    """

    def __init__(self, base_method: DictConfig, form: str = "paper", **kwargs: Any) -> None:
        if form != "paper":
            raise ValueError(ONE_FORM)
        if kwargs.get("resume"):
            raise ValueError(f"{self.name} keeps more than the merged model: resume=true can't go on with it")
        super().__init__(**kwargs)

    def merge_stream(self, modelpool: BaseModelPool, pretrained: nn.Module, names: list[str]) -> nn.Module:
        if MERGED in modelpool.all_model_names:
            raise ValueError(f"{self.name} starts from the pretrained model, not from '{MERGED}'")
        begin = time.perf_counter()

        def observe(merged: nn.Module, index: int) -> None:
            nonlocal begin
            self.finish_step(index + 1, merged, time.perf_counter() - begin)
            begin = time.perf_counter()

        # FusionBench reads the test sets of a CLIP pool even if it does not score; here, the protocol scores any pool.
        method = self.make_base_method(SimpleNamespace(_test_datasets=None))
        method.seed, method.shuffle_order = self.seed, self.shuffle_order
        method.save_on_every_step, method.evaluate_on_every_step = True, False
        method.save_merged_model = observe
        pool = copy(modelpool)
        pool._models = deepcopy(modelpool._models)  # some methods write into the first model that they load
        with torch.enable_grad():
            return method.run(pool)
