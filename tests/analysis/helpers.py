"""Small models with data, without FusionBench's own pools."""

from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, Dataset

from tests.models import clip, t5


class Samples(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def pictures(count, seed=0, batch_size=4):
    """A loader of (picture, label) for :func:`tests.models.clip`."""
    drawn = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    return DataLoader(Samples([(picture, 0) for picture in drawn]), batch_size=batch_size)


def sentences(lengths, longest=9, batch_size=3):
    """A loader of padded token lists for :func:`tests.models.t5`."""
    rows = []
    for number, length in enumerate(lengths):
        ids = torch.randint(1, 50, (longest,), generator=torch.Generator().manual_seed(number))
        mask = (torch.arange(longest) < length).long()
        rows.append({"input_ids": ids * mask, "attention_mask": mask, "labels": ids[:2]})
    return DataLoader(Samples(rows), batch_size=batch_size)


def second_moment(X):
    """C, ``(d_i, d_i)``, of inputs ``(N, d_i)``, one in each row."""
    return X.mT @ X / len(X)


def pool_of(loaders):
    """The least that a task pool must have."""
    return SimpleNamespace(_test_datasets=dict.fromkeys(loaders), get_test_dataloader=loaders.__getitem__)


__all__ = ["clip", "pictures", "pool_of", "second_moment", "sentences", "t5"]
