"""KnOTS-TIES, of which FusionBench has the alignment alone."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from fusion_bench import BaseAlgorithm, BaseModelPool, auto_register_config
from fusion_bench.method.knots.knots_utils import subspace_alignment
from fusion_bench.method.ties_merging.ties_merging_utils import disjoint_merge, resolve_sign, topk_values_mask
from torch import Tensor, nn

from fusion_bench_nufilt.layers import check_model

log = logging.getLogger(__name__)

MergeFunc = Literal["sum", "mean", "max"]


@auto_register_config
class KnotsTiesMergingAlgorithm(BaseAlgorithm):
    r"""KnOTS-TIES (Stoica et al., "Model merging with SVD to tie the Knots", ICLR 2025, arXiv 2410.19735).

    The task vectors of a weight, side by side, have one decomposition :math:`[\tau_1 … \tau_T] = U [S V_1^\top … S
    V_T^\top]`. TIES merges the aligned parts :math:`S V_t^\top`, and U maps the result back.

    As in the paper's own runs, S goes with the parts and each model's entries are trimmed over all weights together.
    Every 2-D parameter is aligned. The others (the paper merges LoRA adapters, which have none) go through a TIES of
    their own, since their entries are not on the scale of aligned ones. Buffers stay the pretrained model's.

    Args:
        scaling_factor: λ, on the merged task vector.
        threshold: per cent of each model's entries that TIES keeps, the largest.
        merge_func: how TIES joins entries of the elected sign; the continual comparison's is ``sum``, the KnOTS
            paper's ``mean``.

    Raises:
        ValueError: a value out of its range.
    """

    # set by auto_register_config
    scaling_factor: float
    threshold: float
    merge_func: MergeFunc

    def __init__(
        self, scaling_factor: float = 0.3, threshold: float = 20, merge_func: MergeFunc = "sum", **kwargs: Any
    ) -> None:
        if not 0 < threshold <= 100:
            raise ValueError(f"threshold is the per cent of entries to keep, above 0 and at most 100, got {threshold}")
        if merge_func not in get_args(MergeFunc):
            raise ValueError(f"merge_func must be one of {', '.join(get_args(MergeFunc))}, got {merge_func!r}")
        super().__init__(**kwargs)

    @torch.no_grad()
    def run(self, modelpool: BaseModelPool | Mapping[str, nn.Module]) -> nn.Module:
        """Merge all models of a pool at once into its pretrained model, which is written and returned.

        Raises:
            ValueError: a model lacks a 2-D weight of the pretrained one, or a value is of another shape or not finite.
        """
        if not isinstance(modelpool, BaseModelPool):
            modelpool = BaseModelPool(dict(modelpool))
        pretrained = modelpool.load_pretrained_model()
        weights = dict(pretrained.named_parameters())
        matrices = [name for name, weight in weights.items() if weight.ndim == 2]
        task_vectors = []
        for model_name in modelpool.model_names:
            model = modelpool.load_model(model_name)
            check_model(pretrained, model, matrices, name=model_name)
            task_vectors.append(
                {name: _widen(model.get_parameter(name)) - _widen(weight) for name, weight in weights.items()}
            )
        log.info("merging %d task vectors: %d matrices aligned", len(task_vectors), len(matrices))
        for name, tau in knots_ties(task_vectors, threshold=self.threshold, merge_func=self.merge_func).items():
            weights[name].copy_(_widen(weights[name]) + self.scaling_factor * tau)
        return pretrained


def knots_ties(
    task_vectors: Sequence[Mapping[str, Tensor]], *, threshold: float, merge_func: MergeFunc
) -> dict[str, Tensor]:
    """The merged task vector of several, each a dict of tensors with the same names and shapes; 2-D ones are aligned.

    Args:
        task_vectors: one or more.
        threshold: per cent of the entries that TIES keeps.
        merge_func: of TIES.
    """
    stacks = {name: torch.stack([tau[name] for tau in task_vectors]) for name in task_vectors[0]}
    U, aligned, others = {}, {}, {}
    for name, stack in stacks.items():
        if stack.ndim == 3:
            U[name], S, V = subspace_alignment(list(stack), eps=1e-5)  # U: (d_o, r); V: (r, d_i) a model
            aligned[name] = S[:, None] * torch.stack(V)
        else:
            others[name] = stack
    parts = _ties(aligned, threshold, merge_func)
    return {name: U[name] @ part for name, part in parts.items()} | _ties(others, threshold, merge_func)


def _ties(stacks: Mapping[str, Tensor], threshold: float, merge_func: MergeFunc) -> dict[str, Tensor]:
    """TIES over all tensors (models, …) as one vector a model, by FusionBench's functions."""
    sizes = [stack[0].numel() for stack in stacks.values()]
    if not sum(sizes):
        return {name: stack[0] for name, stack in stacks.items()}
    rows = [stack.reshape(len(stack), size) for stack, size in zip(stacks.values(), sizes, strict=True)]
    entries = torch.cat(rows, dim=1)
    if threshold < 100:  # FusionBench's function cannot keep all
        entries, _ = topk_values_mask(entries, K=threshold / 100)
    merged = disjoint_merge(entries, merge_func, resolve_sign(entries))
    parts = merged.split(sizes)
    return {name: part.view_as(stack[0]) for (name, stack), part in zip(stacks.items(), parts, strict=True)}


def _widen(weight: Tensor) -> Tensor:
    return weight.to(torch.promote_types(weight.dtype, torch.float32))
