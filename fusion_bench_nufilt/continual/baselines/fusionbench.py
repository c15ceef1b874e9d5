"""FusionBench's methods under the protocol: batch methods by a rule, continual ones as they are."""

import time
from collections import defaultdict
from collections.abc import Iterator
from copy import copy, deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from fusion_bench import BaseModelPool, auto_register_config
from fusion_bench.utils import import_object, instantiate
from omegaconf import DictConfig
from torch import nn

from fusion_bench_nufilt.continual import ContinualMergingAlgorithm, ProtocolConfig
from fusion_bench_nufilt.continual.data_sets import check_train_sets
from fusion_bench_nufilt.continual.models import MERGED, PRETRAINED
from fusion_bench_nufilt.utils.manifest import load_state
from fusion_bench_nufilt.utils.options import (
    check_choices,
    check_positive,
    option,
    options_of,
    split_options,
    takes_options,
)
from fusion_bench_nufilt.utils.schemas import Manifest
from fusion_bench_nufilt.utils.tensors import wide_dtype

RuleName = Literal["at_once", "add", "add_running", "restart", "on_top"]

ONE_FORM = (
    "form=released is for methods whose released code has another formula than the paper; this "
    "method has one form"
)


@dataclass(frozen=True)
class RuleConfig:
    """The formula by which a batch method is run continually."""

    form: Literal["paper", "released"] = option(
        "paper",
        "The formula: the paper's (rule), or that of the authors' code (released_rule).",
    )
    rule: RuleName = option(
        "at_once",
        "The result, where M(θ; …) is what the method makes of a model θ and task vectors: at_once "
        "M(θ0; τ̃/λ, τ), "
        "add θ + M(θ0; τ̃, τ) - θ0, add_running the same with the method's last result for τ̃, "
        "restart M(θ0; τ), on_top M(θ; τ).",
    )
    released_rule: RuleName | None = option(
        None, "The rule of form=released; null if the method has one form."
    )
    merged_scale: float = option(
        1.0, "The factor λ by which the method scales its result.", symbol="λ"
    )
    merge_first: bool = option(
        False, "Apply the method to the first model, too, instead of taking θ0 + λ τ."
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "merged_scale")
        if self.form == "released" and self.released_rule is None:
            raise ValueError(ONE_FORM)

    @property
    def chosen(self) -> RuleName:
        """The rule of the chosen form."""
        return {"paper": self.rule, "released": self.released_rule}[self.form] or self.rule


@torch.no_grad()
def shifted(theta: nn.Module, to: nn.Module, base: nn.Module, scale: float = 1) -> nn.Module:
    r"""Return a new model :math:`\theta + s (\theta_{to} - \theta_{base})`, rounded once to the
    weights' dtype.
    """
    if theta is base and scale == 1:
        return deepcopy(to)
    model, above, below = deepcopy(theta), to.state_dict(), base.state_dict()
    values = {}
    for key, value in model.state_dict().items():
        if value.is_floating_point():
            wide = wide_dtype(value)
            difference = above[key].to(value.device, wide) - below[key].to(value.device, wide)
            values[key] = value.to(wide) + scale * difference
    model.load_state_dict(values, strict=False)
    return model


def walk_tied_parameters_once(model: nn.Module) -> nn.Module:
    """Make ``model.named_modules()`` leave out each module whose parameters an earlier one holds.

    FusionBench's continual methods write every parameter of every module, and so merge one that
    several modules hold several times: an embedding and the head that is tied to it, and the
    embeddings of a T5, which are three modules since transformers 5.
    """
    vars(model)["named_modules"] = MethodType(_modules_with_parameters_of_their_own, model)
    return model


def _modules_with_parameters_of_their_own(
    model: nn.Module, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    earlier: set[int] = set()
    for name, module in nn.Module.named_modules(model, memo, prefix, remove_duplicate):
        parameters = {id(parameter) for parameter in module.parameters(recurse=False)}
        if parameters and parameters <= earlier and remove_duplicate:
            continue
        earlier |= parameters
        yield name, module


class _Baseline(ContinualMergingAlgorithm):
    base_method: DictConfig  # set by auto_register_config

    @property
    def name(self) -> str:
        return str(self.base_method._target_).rpartition(".")[2]

    def make_base_method(self, taskpool: Any) -> Any:
        """Return FusionBench's method, set up as by its program."""
        # Ray 2.54 adds a parameter to functions that it decorates, which FusionBench would take for
        # an option.
        constructor = import_object(self.base_method._target_).__init__
        attributes = getattr(getattr(constructor, "__wrapped__", constructor), "__dict__", {})
        if "_ray_trace_ctx" in str(attributes.get("__signature__")):
            del attributes["__signature__"]
        method = instantiate(self.base_method)
        method._fabric_instance = self.fabric
        method._program = SimpleNamespace(taskpool=taskpool)
        return method


@auto_register_config
@takes_options(RuleConfig, ProtocolConfig)
class BatchMethodBaseline(_Baseline):
    """A batch method of FusionBench, run continually by the rule of :class:`RuleConfig`.

    Args:
        base_method: config of the method, with ``_target_``.
        **kwargs: options of :class:`RuleConfig` and
            :class:`fusion_bench_nufilt.continual.ProtocolConfig`.
    """

    def __init__(self, base_method: DictConfig, **kwargs: Any) -> None:
        super().__init__(**split_options([RuleConfig], kwargs)[1])

    def check_data(self) -> None:
        if getattr(import_object(self.base_method._target_), "uses_training_data", False):
            check_train_sets(self.modelpool)

    def start(self, pretrained: nn.Module, names: list[str]) -> None:
        self.how = options_of(RuleConfig, self)
        if self.how.chosen == "add_running" and self.first_step > 1:
            raise ValueError(
                f"{self.name}: rule=add_running goes on from a result that is not in '{MERGED}'"
            )
        self._before = pretrained

    def restore(self, step: int) -> None:
        if self.how.chosen == "add_running" and self.folder is not None and step > 1:
            self._before = deepcopy(self._before)
            self.folder.load_step(step - 1, self._before)

    def merge_step(
        self, step: int, name: str, pretrained: nn.Module, merged: nn.Module, task: nn.Module
    ) -> nn.Module:
        def merge(base: nn.Module, *models: nn.Module) -> nn.Module:
            names = ["merged so far", name][-len(models) :]
            # FusionBench's methods write their result into the pretrained model that they load.
            pool = {"_pretrained_": deepcopy(base), **dict(zip(names, models, strict=True))}
            with torch.enable_grad():
                whole = BaseModelPool(
                    pool, train_datasets=getattr(self.modelpool, "_train_datasets", None)
                )
                result = self.make_base_method(self.taskpool).run(whole)
            if type(result) is not type(pretrained):
                kinds = f"a {type(result).__name__}, not a {type(pretrained).__name__}"
                raise ValueError(f"{self.name} returns {kinds}: it can't be run continually")
            return result

        rule, scale = self.how.chosen, self.how.merged_scale
        if step == 1:
            result = (
                merge(pretrained, task)
                if self.how.merge_first
                else shifted(pretrained, task, pretrained, scale)
            )
        elif rule == "at_once":
            result = merge(pretrained, shifted(pretrained, merged, pretrained, 1 / scale), task)
        elif rule == "add":
            result = shifted(merged, merge(pretrained, merged, task), pretrained)
        elif rule == "add_running":
            last = shifted(pretrained, merged, self._before, 1 / scale)  # the method's last result
            result = shifted(merged, merge(pretrained, last, task), pretrained)
        elif rule == "restart":
            result = merge(pretrained, task)
        else:
            result = merge(merged, shifted(merged, task, pretrained))
        self.check_model(pretrained, result, f"merged after step {step}")
        self._before = merged
        return result


@auto_register_config
class ContinualMethodBaseline(_Baseline):
    """A continual method of FusionBench (``opcm/*``, ``dop/*``), whose steps the protocol only
    observes.

    The numbers that it keeps in memory are saved with each step. A resumed run goes through the
    finished steps with tiny stand-ins for the models, since FusionBench's loops always begin with
    the first one.

    Args:
        base_method: config of a method that hands its steps to its own ``save_merged_model``, with
            ``_target_``.
        form: ``paper``, the only form.
        **kwargs: options of :class:`fusion_bench_nufilt.continual.ProtocolConfig`.
    """

    def __init__(self, base_method: DictConfig, form: str = "paper", **kwargs: Any) -> None:
        if form != "paper":
            raise ValueError(ONE_FORM)
        super().__init__(**kwargs)

    def start(self, pretrained: nn.Module, names: list[str]) -> None:
        # Of a CLIP pool, FusionBench would read the test sets, which only the protocol scores.
        self._method = self.make_base_method(SimpleNamespace(_test_datasets=None))
        self._method.seed, self._method.shuffle_order = self.seed, self.shuffle_order
        self._method.save_on_every_step, self._method.evaluate_on_every_step = True, False
        self._at_start = set(vars(self._method))
        self._memory: dict[str, Any] = {}

    def state(self) -> dict[str, torch.Tensor]:
        here = {
            key: value for key, value in vars(self._method).items() if key not in self._at_start
        }
        return {key: torch.as_tensor(value) for key, value in here.items() if _is_numeric(value)}

    def go_on_from(self, folder: Path | None, manifest: Manifest) -> None:
        saved = {} if folder is None else load_state(folder)
        self._memory = {key: list(value) if value.ndim else value for key, value in saved.items()}

    def merge_stream(
        self, modelpool: BaseModelPool, pretrained: nn.Module, names: list[str]
    ) -> nn.Module:
        if MERGED in modelpool.all_model_names:
            raise ValueError(f"{self.name} starts from the pretrained model, not from '{MERGED}'")
        models: Any = copy(modelpool)
        models._models = deepcopy(
            modelpool._models
        )  # some methods write into the first model that they load

        def load(name: str, *args: Any, **kwargs: Any) -> nn.Module:
            # This notes the digest of what is merged.
            return walk_tied_parameters_once(self._load(models, name)[0].cpu())

        pool = copy(models)
        pool.load_model = load
        # Models on a GPU are merged from the CPU, since OPCM and others move layers by themselves
        # and use NumPy.
        home, base = next(pretrained.parameters()).device, deepcopy(pretrained).cpu()
        merged = deepcopy(base)
        stand_ins = defaultdict[str, nn.Module](lambda: nn.Sequential(nn.Linear(2, 2)))
        if done := self._resume(merged) if self.resume else 0:
            pool.load_model = lambda name, *args, **kwargs: stand_ins[name]
        begin = time.perf_counter()

        def observe(current: nn.Module, index: int) -> None:
            nonlocal begin
            if index + 1 == done:
                _become(current, merged)
                _become(stand_ins[PRETRAINED], base)
                vars(self._method).update(self._memory)
                pool.load_model = load
            elif index + 1 > done:
                self.check_model(base, current, f"merged after step {index + 1}")
                self.finish_step(index + 1, current, time.perf_counter() - begin)
            begin = time.perf_counter()

        self._method.save_merged_model = observe
        with torch.enable_grad():
            result: nn.Module = self._method.run(pool).to(home)
        del vars(result)["named_modules"]
        return result


def _is_numeric(value: Any) -> bool:
    values = value if isinstance(value, list) and value else [value]
    return all(isinstance(each, int | float | np.number | torch.Tensor) for each in values)


def _become(stand_in: nn.Module, model: nn.Module) -> None:
    """Turn a module into another one in place, for everything that refers to it."""
    stand_in.__class__, stand_in.__dict__ = type(model), model.__dict__
    walk_tied_parameters_once(stand_in)
