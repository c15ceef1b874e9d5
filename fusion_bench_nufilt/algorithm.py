"""NUFILT as a FusionBench algorithm."""

import logging
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from fusion_bench import auto_register_config
from torch import Tensor, nn

from fusion_bench_nufilt.continual import ProtocolConfig
from fusion_bench_nufilt.continual.layerwise import Layers, LayerwiseMergingAlgorithm, split_plain
from fusion_bench_nufilt.core import FusionConfig, LayerReport, fuse_each
from fusion_bench_nufilt.core.devices import DeviceConfig
from fusion_bench_nufilt.core.options import takes_options
from fusion_bench_nufilt.layers import TargetConfig

log = logging.getLogger(__name__)


@auto_register_config
@takes_options(FusionConfig, TargetConfig, DeviceConfig, ProtocolConfig)
class NufiltContinualMergingAlgorithm(LayerwiseMergingAlgorithm):
    """Null-space filtering for data-free continual model merging (Qiu et al., ICLR 2026).

    Args:
        **kwargs: options of :class:`fusion_bench_nufilt.core.FusionConfig`,
            :class:`fusion_bench_nufilt.layers.TargetConfig`,
            :class:`fusion_bench_nufilt.core.devices.DeviceConfig` and
            :class:`fusion_bench_nufilt.continual.ProtocolConfig`.

    Raises:
        ValueError: a value out of its range, or an option that there is not; names it.

    Examples:
        >>> algorithm = NufiltContinualMergingAlgorithm(shuffle_order=False)
        >>> merged = algorithm.run({"_pretrained_": base, "digits": digits, "letters": letters})
    """

    logged = ("task_norm", "merged_norm", "filtered_share", "overlap", "loss_before", "loss_after")

    def __init__(self, **kwargs: Any) -> None:
        kinds = [FusionConfig, TargetConfig, DeviceConfig]
        (self.fusion_config, self.targets, self.device_config), protocol = split_plain(kinds, kwargs)
        super().__init__(**protocol)

    def start(self, pretrained: nn.Module, names: list[str]) -> None:
        if find_spec("fusion_bench.method.nufilt") is not None:
            log.info("this is NUFILT of fusion_bench_nufilt; FusionBench's own is method=nufilt/nufilt")
        super().start(pretrained, names)

    def fuse(
        self, step: int, pretrained: Layers, merged: Layers, task: Layers
    ) -> Iterator[tuple[str, Tensor, LayerReport]]:
        devices = self.device_config.choose(self.fabric.device)
        return fuse_each(pretrained, merged, task, self.fusion_config, seed=self.seed, step=step, device=devices)
