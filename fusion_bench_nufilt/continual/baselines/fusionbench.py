"""FusionBench's methods under the protocol: batch methods by a rule, continual ones as they are."""

import logging
from collections.abc import Callable, Iterator, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, Literal

import torch
from fusion_bench import BaseModelPool, auto_register_config
from fusion_bench.utils import import_object, instantiate
from omegaconf import DictConfig
from torch import Tensor, nn

from fusion_bench_nufilt.continual import ContinualMergingAlgorithm
from fusion_bench_nufilt.continual.models import MERGED
from fusion_bench_nufilt.continual.precision import (
    dtypes_of,
    round_to,
    tensors_of,
    widen,
    widened,
)
from fusion_bench_nufilt.continual.stopwatch import CHECKING, LOADING, MERGING
from fusion_bench_nufilt.methods.options import ProtocolConfig
from fusion_bench_nufilt.utils.files import Manifest
from fusion_bench_nufilt.utils.manifest import load_state
from fusion_bench_nufilt.utils.options import (
    check_choices,
    check_positive,
    option,
    options_of,
    takes_options,
)
from fusion_bench_nufilt.utils.tensors import compute_dtype

from .task_data import TaskData, data_of_run

log = logging.getLogger(__name__)
RuleName = Literal["at_once", "add", "add_running", "restart", "on_top"]

_SO_FAR = "merged so far"  # the name of that model in the pools of the methods


@dataclass(frozen=True)
class RuleConfig:
    """The formula by which a batch method is run continually."""

    rule: RuleName = option(
        "at_once",
        "The result, where M(θ; …) is what the method makes of a model θ and task vectors: at_once "
        "M(θ0; τ̃/λ, τ), "
        "add θ + M(θ0; τ̃, τ) - θ0, add_running the same with the method's last result for τ̃, "
        "restart M(θ0; τ), on_top M(θ; τ).",
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


@torch.no_grad()
def shifted(theta: nn.Module, to: nn.Module, base: nn.Module, scale: float = 1) -> nn.Module:
    r"""Return a new model :math:`\theta + s (\theta_{to} - \theta_{base})`, rounded once to the
    weights' dtype.
    """
    if theta is base and scale == 1:
        return deepcopy(to)
    model = deepcopy(theta)
    above = to.state_dict()
    below = base.state_dict()
    values = {}
    for key, value in model.state_dict().items():
        if value.is_floating_point():  # position ids and the like stay
            wide = compute_dtype(value)
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

    def make_base_method(self, taskpool: Any, data: Mapping[str, TaskData] | None = None) -> Any:
        """Return FusionBench's method, set up as by its program, with data that are loaded
        already.
        """
        # Ray 2.54 adds a parameter to functions that it decorates, which FusionBench would take for
        # an option.
        constructor = import_object(self.base_method._target_).__init__
        constructor = getattr(constructor, "__wrapped__", constructor)
        attributes = getattr(constructor, "__dict__", {})
        if "_ray_trace_ctx" in str(attributes.get("__signature__")):
            del attributes["__signature__"]
        method = instantiate(self.base_method)
        method._fabric_instance = self.fabric
        method._program = SimpleNamespace(
            taskpool=taskpool, stopwatch=self.stopwatch, task_data=data or {}
        )
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
        super().__init__(**kwargs)

    def training_data(self) -> dict[str, Any]:
        needs_data = getattr(import_object(self.base_method._target_), "uses_training_data", False)
        self._data = data_of_run(self) if needs_data else {}
        return {name: data.dataset for name, data in self._data.items()}

    def start(self, pretrained: nn.Module, names: list[str]) -> None:
        self.rule_config = options_of(RuleConfig, self)
        self._merged_before = pretrained  # the merged model before the last step

    @property
    def _is_running(self) -> bool:
        """Whether a step depends on the model before the last step, too."""
        return self.rule_config.rule == "add_running"

    def state(self) -> dict[str, Tensor]:
        if not self._is_running:
            return {}
        return {name: tensor.detach() for name, tensor in tensors_of(self._merged_before)}

    def go_on_from(self, folder: Path | None, manifest: Manifest) -> None:
        if not self._is_running:
            return
        state = {} if folder is None else load_state(folder)
        self._merged_before = deepcopy(self._merged_before)
        for name, tensor in tensors_of(self._merged_before):
            if name not in state:
                raise ValueError(
                    f"{self.name}: rule=add_running goes on from a result that is not in '{MERGED}'"
                )
            tensor.data.copy_(state[name])

    def merge_step(
        self, step: int, name: str, pretrained: nn.Module, merged: nn.Module, task: nn.Module
    ) -> nn.Module:
        # FusionBench decomposes what it is given, in its dtype.
        dtypes = dtypes_of(pretrained)
        with widened(pretrained, merged, task, self._merged_before):
            result = self._merge_step(step, name, pretrained, merged, task)
        round_to(result, dtypes)
        with self.stopwatch.part(CHECKING):
            self.check_model(pretrained, result, f"merged after step {step}")
        self._merged_before = merged
        return result

    def _merge_step(
        self, step: int, name: str, pretrained: nn.Module, merged: nn.Module, task: nn.Module
    ) -> nn.Module:
        rule = self.rule_config.rule
        scale = self.rule_config.merged_scale
        if step == 1 and not self.rule_config.merge_first:
            result = shifted(pretrained, task, pretrained, scale)
        elif step == 1 or rule == "restart":
            result = self._merge(pretrained, {name: task})
        elif rule == "at_once":
            unscaled = shifted(pretrained, merged, pretrained, 1 / scale)
            result = self._merge(pretrained, {_SO_FAR: unscaled, name: task})
        elif rule == "add":
            merge_of_both = self._merge(pretrained, {_SO_FAR: merged, name: task})
            result = shifted(merged, merge_of_both, pretrained)
        elif rule == "add_running":
            # What the method last added, by itself.
            last_result = shifted(pretrained, merged, self._merged_before, 1 / scale)
            merge_of_both = self._merge(pretrained, {_SO_FAR: last_result, name: task})
            result = shifted(merged, merge_of_both, pretrained)
        else:  # on_top
            result = self._merge(merged, {name: shifted(merged, task, pretrained)})
        return result

    def _merge(self, base: nn.Module, models: dict[str, nn.Module]) -> nn.Module:
        """Return what FusionBench's method makes of a pretrained model and others, by name."""
        pool = BaseModelPool(
            # FusionBench's methods write their result into the pretrained model that they load.
            {"_pretrained_": deepcopy(base), **models},
            train_datasets=getattr(self.modelpool, "_train_datasets", None),
        )
        with torch.enable_grad():
            # The protocol runs without gradients, and methods such as AdaMerging train.
            result = self.make_base_method(self.taskpool, self._data).run(pool)
        if type(result) is not type(base):
            raise ValueError(
                f"{self.name} returns a {type(result).__name__}, not a {type(base).__name__}: it "
                "can't be run continually"
            )
        _undo_division_by_zero(result, base, models)
        return result


@auto_register_config
class ContinualMethodBaseline(_Baseline):
    """A continual method of FusionBench (``opcm/*``, ``dop/*``), whose steps the protocol only
    observes.

    FusionBench's loops always begin with the first model, and so does a run that was interrupted.

    Args:
        base_method: config of a method that hands its steps to its own ``save_merged_model``, with
            ``_target_``.
        **kwargs: options of :class:`fusion_bench_nufilt.continual.ProtocolConfig`.
    """

    def __init__(self, base_method: DictConfig, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    def start(self, pretrained: nn.Module, names: list[str]) -> None:
        # Of a CLIP pool, FusionBench would read the test sets, which only the protocol scores.
        self._method = self.make_base_method(SimpleNamespace(_test_datasets=None))
        if hasattr(self._method, "_optimize_weight"):  # DOP
            self._method._optimize_weight = partial(
                _optimize_unless_unchanged, self._method._optimize_weight
            )
        self._method.seed = self.seed
        self._method.shuffle_order = self.shuffle_order
        # The method hands its steps to `save_merged_model`, which `observe` stands in for.
        self._method.save_on_every_step = True
        self._method.evaluate_on_every_step = False

    def merge_stream(
        self, modelpool: BaseModelPool, pretrained: nn.Module, names: list[str]
    ) -> nn.Module:
        if MERGED in modelpool.all_model_names:
            raise ValueError(f"{self.name} starts from the pretrained model, not from '{MERGED}'")
        merged = deepcopy(pretrained)
        if self._saved_step is not None:
            if self._saved_step["step"] == self._last_step:
                self.take_saved_step(merged)
                return merged
            log.warning(
                "%s begins with the first model again: FusionBench's own loop can't go on from a "
                "step",
                self.name,
            )
        pool: Any = copy(modelpool)
        # Some methods write into the first model that they load.
        pool._models = deepcopy(modelpool._models)
        models = copy(pool)

        def load(name: str, *args: Any, **kwargs: Any) -> nn.Module:
            with self.stopwatch.part(LOADING):
                model, _ = self._load(models, name)  # which notes the digest of what is merged
                widen(model)
                return walk_tied_parameters_once(model.cpu())

        pool.load_model = load
        # Models on a GPU are merged from the CPU, since OPCM and others move layers by themselves
        # and use NumPy.
        device = next(pretrained.parameters()).device
        base = merged.cpu()
        dtypes = dtypes_of(base)
        widen(base)

        def observe(current: nn.Module, index: int) -> None:
            step = index + 1
            with self.stopwatch.part(CHECKING):
                # Each step is rounded as it is saved.
                round_to(current, dtypes)
                self.check_model(base, current, f"merged after step {step}")
                self.finish_step(step, current)
                widen(current)

        self._method.save_merged_model = observe
        with torch.enable_grad(), self.stopwatch.part(MERGING):
            result: nn.Module = self._method.run(pool).to(device)
        round_to(result, dtypes)
        del vars(result)["named_modules"]
        return result


@torch.no_grad()
def _undo_division_by_zero(
    result: nn.Module, base: nn.Module, models: Mapping[str, nn.Module]
) -> None:
    """Give parameters that a model leaves as they are in the base the base's and all updates, where
    a method divided by the length of an update that is zero.

    WUDI does. Its loss of such a task is zero, and so it is at the sum of two tasks of which one is
    zero.
    """
    values = dict(result.named_parameters())
    task_parameters = [dict(model.named_parameters()) for model in models.values()]
    for key, theta_0 in base.named_parameters():
        if key not in values or torch.isfinite(values[key]).all():
            continue
        updates = [parameters[key].to(theta_0) - theta_0 for parameters in task_parameters]
        if all(update.any() for update in updates):
            continue  # the check of the result says what is not finite
        values[key].copy_(theta_0 + sum(updates))


def _optimize_unless_unchanged(
    optimize: Callable[..., Tensor], theta_0: Tensor, weights: Mapping[str, Tensor], *args: Any
) -> Tensor:
    """Return what DOP makes of two models' weights of a layer, or the base's with both updates,
    where one of these is zero.

    DOP's loss of such a model is zero everywhere, and it divides by it. Where the other model has
    the layer, so is that model's loss.
    """
    updates = [(weight - theta_0).detach() for weight in weights.values()]
    if all(update.any() for update in updates):
        return optimize(theta_0, weights, *args)
    return theta_0.detach() + sum(updates)
