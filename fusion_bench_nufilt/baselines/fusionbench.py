"""FusionBench's own methods under the protocol: its batch methods run continually, its continual ones as they are."""

import time
from copy import copy, deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from fusion_bench import BaseModelPool, auto_register_config
from fusion_bench.utils import instantiate
from omegaconf import DictConfig
from torch import nn

from fusion_bench_nufilt.continual import ContinualMergingAlgorithm
from fusion_bench_nufilt.continual.stream import MERGED
from fusion_bench_nufilt.layers import check_model


class _Baseline(ContinualMergingAlgorithm):
    base_method: DictConfig  # set by auto_register_config

    @property
    def name(self) -> str:
        return str(self.base_method._target_).rpartition(".")[2]

    def check_model(self, pretrained: nn.Module, model: nn.Module, name: str) -> None:
        matrices = [key for key, parameter in pretrained.named_parameters() if parameter.ndim == 2]
        check_model(pretrained, model, matrices, name=name)

    def make_base_method(self, taskpool: Any) -> Any:
        """The method of FusionBench, wired as its program would, with a task pool for what it needs one for."""
        method = instantiate(self.base_method)
        method._fabric_instance = self.fabric
        method._program = SimpleNamespace(taskpool=taskpool)
        return method


@auto_register_config
class BatchMethodBaseline(_Baseline):
    r"""A batch method of FusionBench, run continually.

    At step t it merges a pool of :math:`\theta_0` and two models, what is merged so far and the new one; its result is
    the new merged model. At step 1 it merges the first model alone.

    Args:
        base_method: config of the method, with ``_target_``.
        merged_scale: :math:`\lambda`; the method is given :math:`\theta_0 + \tilde\tau / \lambda` for what is merged so
            far. With the factor by which a method scales its result, the running vector is the unscaled one: task
            arithmetic and MagMax then give what they give for all models at once.
        **kwargs: the protocol, see :class:`ContinualMergingAlgorithm`.

    Raises:
        ValueError: the method returns another kind of model than it was given, or one that is not finite.
    """

    merged_scale: float  # set by auto_register_config

    def __init__(self, base_method: DictConfig, merged_scale: float = 1.0, **kwargs: Any) -> None:
        if not merged_scale > 0:
            raise ValueError(f"merged_scale must be above 0, got {merged_scale!r}")
        super().__init__(**kwargs)

    def merge_step(self, step: int, name: str, pretrained: nn.Module, merged: nn.Module, task: nn.Module) -> nn.Module:
        # FusionBench's methods write their result into the pretrained model that they load.
        models = {"_pretrained_": deepcopy(pretrained)}
        if step > 1:
            models["merged so far"] = self._unscaled(pretrained, merged)
        models[name] = task
        with torch.enable_grad():
            taskpool = None if self.evaluator is None else self.evaluator.taskpool  # of test-time methods
            result = self.make_base_method(taskpool).run(BaseModelPool(models))
        if type(result) is not type(pretrained):
            raise ValueError(
                f"{self.name} returns a {type(result).__name__}, not a {type(pretrained).__name__}: "
                "it can't be run continually"
            )
        self.check_model(pretrained, result, f"merged after step {step}")
        return result

    def _unscaled(self, pretrained: nn.Module, merged: nn.Module) -> nn.Module:
        if self.merged_scale == 1:
            return merged
        theta_0 = pretrained.state_dict()
        for key, value in merged.state_dict().items():
            if value.is_floating_point():
                wide = torch.promote_types(value.dtype, torch.float32)
                base = theta_0[key].to(wide)
                value.copy_(base + (value.to(wide) - base) / self.merged_scale)
        return merged


@auto_register_config
class ContinualMethodBaseline(_Baseline):
    """A continual method of FusionBench (``opcm/*``, ``dop/*``), run as it is: only its steps are observed.

    Args:
        base_method: config of the method, with ``_target_``; it hands each step's model to its ``save_merged_model``.
        **kwargs: the protocol, see :class:`ContinualMergingAlgorithm`.

    Raises:
        ValueError: asked to go on from a step: what such a method keeps between its steps is not in the merged model.
    """

    def __init__(self, base_method: DictConfig, **kwargs: Any) -> None:
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

        # FusionBench reads the test sets of a CLIP pool even where it is not to score: the protocol scores, any pool.
        method = self.make_base_method(SimpleNamespace(_test_datasets=None))
        method.seed, method.shuffle_order = self.seed, self.shuffle_order
        method.save_on_every_step, method.evaluate_on_every_step = True, False
        method.save_merged_model = observe
        pool = copy(modelpool)
        pool._models = deepcopy(modelpool._models)  # some write into the first model that they load
        with torch.enable_grad():
            return method.run(pool)
