"""Small models with data, without FusionBench's own pools."""

from itertools import zip_longest
from types import SimpleNamespace

import numpy as np
import torch
from torch.utils.data import DataLoader

from fusion_bench_nufilt.pages.names import kind

LOSS_COLUMNS = ["method", "step", "task", "layer"]
for prefix in ("", "relative_", "data_free_"):
    LOSS_COLUMNS += [f"{prefix}stability", f"{prefix}plasticity"]


def pictures(count, seed=0, batch_size=4):
    """A loader of (picture, label) for :func:`tests.tiny_models.clip`."""
    drawn = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    return DataLoader([(picture, 0) for picture in drawn], batch_size=batch_size)


def sentences(lengths, longest=9, batch_size=3):
    """A loader of padded token lists for :func:`tests.tiny_models.t5`."""
    rows = []
    for number, length in enumerate(lengths):
        ids = torch.randint(1, 50, (longest,), generator=torch.Generator().manual_seed(number))
        mask = (torch.arange(longest) < length).long()
        rows.append({"input_ids": ids * mask, "attention_mask": mask, "labels": ids[:2]})
    return DataLoader(rows, batch_size=batch_size)


def pair_rows(layers, names, columns, values, curves=None, chances=None):
    """Rows of values ``(layers, names, names)``, and of curves ``(layers, names, names, ranks)``
    over ranks 1, 2, …; ``chances`` are those of the layers.
    """
    rows = []
    for i, j, k in np.ndindex(values.shape):
        layer = layers[i]
        row = {"layer": layer, "kind": kind(layer), columns[0]: names[j], columns[1]: names[k]}
        row |= {columns[2]: values[i, j, k], "chance": (chances or {}).get(layer, 0.25)}
        if curves is not None:
            row["by_rank"] = dict(enumerate(curves[i, j, k].tolist(), 1))
        rows.append(row)
    return rows


def loss_row(*values, **others):
    """What is measured of a layer after a step; what is not given is not known."""
    return dict(zip_longest(LOSS_COLUMNS, values)) | others


def second_moment(X):
    """C, ``(d_i, d_i)``, of inputs ``(N, d_i)``, one in each row."""
    return X.mT @ X / len(X)


def pool_of(loaders):
    """The least that a task pool must have."""
    return SimpleNamespace(
        _test_datasets=dict.fromkeys(loaders), get_test_dataloader=loaders.__getitem__
    )
