"""Data are known by their content, and by no path, name or time."""

import shutil

import numpy as np
import PIL.Image
import pytest
import torch
from datasets import Dataset, load_from_disk
from torch.utils.data import Subset

from fusion_bench_nufilt.continual.content import MOST_ITEMS, describe_items
from fusion_bench_nufilt.continual.taskpools.local_tasks import load_images


def save_pictures(folder, seed=0, count=3, classes=("cat", "dog")):
    """A folder of images with a subfolder for each class."""
    generator = np.random.default_rng(seed)
    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            PIL.Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def pictures(folder):
    return describe_items(load_images("task", str(folder)))


def test_pictures_are_the_same_in_a_copy_and_as_a_saved_data_set(tmp_path):
    folder = save_pictures(tmp_path / "images")
    saved = describe_items(load_images("task", str(folder)))
    assert saved["items"] == 6
    shutil.copytree(folder, tmp_path / "copy")
    assert pictures(tmp_path / "copy") == saved
    load_images("task", str(folder)).save_to_disk(tmp_path / "saved")
    assert describe_items(load_from_disk(tmp_path / "saved")) == saved


@pytest.mark.parametrize("change", ["replaced", "moved", "renamed class"])
def test_other_pictures_or_labels_are_other_data(tmp_path, change):
    folder = save_pictures(tmp_path / "images")
    before = pictures(folder)
    if change == "replaced":
        shutil.copy(save_pictures(tmp_path / "other", 1) / "cat" / "1.png", folder / "cat")
    elif change == "moved":
        (folder / "cat" / "1.png").rename(folder / "dog" / "9.png")
    else:
        (folder / "cat").rename(folder / "bird")
    assert pictures(folder)["sha256"] != before["sha256"]


def items(change=0):
    return [{"ids": torch.tensor([1, 2, number + change]), "text": "a"} for number in range(5)]


def test_items_of_any_data_set_are_known_by_their_content():
    assert describe_items(items()) == describe_items(items())
    assert describe_items(items()) != describe_items(items(1))
    assert describe_items(items()) != describe_items(items()[:4])
    assert describe_items(Subset(items(), [0, 1])) == describe_items(items()[:2])


def test_of_many_items_a_sample_is_read():
    many = list(range(10 * MOST_ITEMS))
    before = describe_items(Dataset.from_dict({"number": many}))
    assert before["items"] == 10 * MOST_ITEMS
    many[-10] = 0
    assert describe_items(Dataset.from_dict({"number": many})) != before
