"""KnOTS-TIES, of which FusionBench implements only the alignment."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from fusion_bench import BaseAlgorithm, BaseModelPool, auto_register_config
from fusion_bench.method.knots.knots_utils import subspace_alignment
from fusion_bench.method.ties_merging.ties_merging_utils import (
    disjoint_merge,
    resolve_sign,
    topk_values_mask,
)
from torch import Tensor, nn

from fusion_bench_nufilt.continual.models import (
    PRETRAINED,
    as_pool,
    load_model,
    load_stored,
    refuse_missing_keys,
)
from fusion_bench_nufilt.models.fit import check_module
from fusion_bench_nufilt.models.layers import select_layers
from fusion_bench_nufilt.utils.tensors import to_compute_dtype

MergeFunc = Literal["sum", "mean", "max"]


@auto_register_config
class KnotsTiesMergingAlgorithm(BaseAlgorithm):
    r"""KnOTS-TIES (Stoica et al., "Model merging with SVD to tie the Knots", ICLR 2025, arXiv
    2410.19735).

    The updates of a linear layer, side by side, have one decomposition :math:`[\tau_1 … \tau_T] = U
    S [V_1^\top … V_T^\top]`. TIES merges the :math:`V_t^\top`, and :math:`U S` maps the result
    back.

    As in NUFILT's paper, each layer is trimmed by itself, and without S; the KnOTS paper trims
    :math:`S V_t^\top` of all layers together. Parameters outside the linear layers stay as
    pretrained, and a single model's update is whole.

    Args:
        scaling_factor: the factor λ of the merged update.
        threshold: the percentage of each model's largest entries that TIES keeps.
        merge_func: how TIES joins entries of the elected sign: ``sum`` in NUFILT's paper, ``mean``
            in that of KnOTS.
    """

    # These are set by auto_register_config.
    scaling_factor: float
    threshold: float
    merge_func: MergeFunc

    def __init__(
        self,
        scaling_factor: float = 0.3,
        threshold: float = 20,
        merge_func: MergeFunc = "sum",
        **kwargs: Any,
    ) -> None:
        if not 0 < threshold <= 100:
            raise ValueError(
                "threshold is the per cent of entries to keep, above 0 and at most 100, got "
                f"{threshold}"
            )
        if merge_func not in get_args(MergeFunc):
            raise ValueError(
                f"merge_func must be one of {', '.join(get_args(MergeFunc))}, got {merge_func!r}"
            )
        super().__init__(**kwargs)

    @torch.no_grad()
    def run(self, modelpool: BaseModelPool | Mapping[str, nn.Module]) -> nn.Module:
        """Merge all models of a pool at once into its pretrained model, which is changed."""
        modelpool = as_pool(modelpool)
        pretrained, missing_keys = load_model(modelpool, PRETRAINED)
        layers = select_layers(pretrained, "all-linear")
        keys = {view.key for view in layers.values()}
        missing_keys = [key for key in missing_keys if key in keys]
        refuse_missing_keys(PRETRAINED, missing_keys, can_exclude=False)
        models = [load_stored(modelpool, name, keys) for name in modelpool.model_names]
        for name, model in zip(modelpool.model_names, models, strict=True):
            check_module(pretrained, model, name, layers=keys)
        for view in layers.values():
            theta_0 = to_compute_dtype(view.read(pretrained))
            taus = [to_compute_dtype(view.read(model)) - theta_0 for model in models]
            tau = taus[0]
            if len(taus) > 1:
                tau = knots_ties(taus, self.threshold, self.merge_func)
            view.write(pretrained, theta_0 + self.scaling_factor * tau)
        return pretrained


def knots_ties(taus: Sequence[Tensor], threshold: float, merge_func: MergeFunc) -> Tensor:
    """Return the merged update of a layer, given each model's ``(d_o, d_i)``."""
    U, S, V = subspace_alignment(list(taus))  # U: (d_o, r); V: (r, d_i) for each model
    if not len(S):  # no model changed the layer
        return torch.zeros_like(taus[0])
    entries = torch.stack([part.flatten() for part in V])
    if threshold < 100:  # FusionBench's function can't keep all entries
        entries, _ = topk_values_mask(entries, K=threshold / 100)
    merged = disjoint_merge(entries, merge_func, resolve_sign(entries))
    return U * S @ merged.view_as(V[0])
