"""Data are loaded before any model, and are known by their content, by no path, name or time."""

import re
import shutil

import numpy as np
import PIL.Image
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value, load_from_disk
from fusion_bench import BaseModelPool
from fusion_bench.taskpool import CLIPVisionModelTaskPool
from lightning import Fabric
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import Subset

from fusion_bench_nufilt import LoRAWEMoE, NufiltContinualMergingAlgorithm, SequentialFineTuning
from fusion_bench_nufilt.continual import Evaluator
from fusion_bench_nufilt.continual.content import MOST_ITEMS, describe_items, load_data
from fusion_bench_nufilt.continual.taskpools.local_tasks import load_images, register_task


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


class UntouchedPool(BaseModelPool):
    """A pool none of whose models may be loaded."""

    def load_model(self, *args, **kwargs):
        pytest.fail("a model was loaded")


def untouched(**options):
    return UntouchedPool({"_pretrained_": nn.Linear(2, 2), "birds": nn.Linear(2, 2)}, **options)


def clip_taskpool(**test_datasets):
    datasets = OmegaConf.create(test_datasets)
    return CLIPVisionModelTaskPool(datasets, processor="none", clip_model="none")


def in_memory():
    """A task pool of two classes that needs nothing from elsewhere."""
    images = Dataset.from_dict({"image": [[[0]]] * 2, "label": [0, 1]})
    pool = CLIPVisionModelTaskPool(
        {"birds": images}, processor=object(), clip_model=nn.Linear(1, 1)
    )
    pool._fabric_instance = Fabric(devices=1, accelerator="cpu")
    register_task("birds", ["owl", "emu"], "a {}")
    return pool


@pytest.fixture
def birds(tmp_path):
    features = Features({"image": Value("int64"), "label": ClassLabel(names=["owl", "emu"])})
    Dataset.from_dict({"image": [0, 1], "label": [0, 1]}, features).to_parquet(
        tmp_path / "birds" / "test.parquet"
    )
    return str(tmp_path / "birds")


def loaded(path, **options):
    return {"_target_": "datasets.load_dataset", "path": path, **options}


MINE = "fusion_bench_nufilt.continual.taskpools.local_tasks.load_image_task"
WRONG = {
    "no_such_folder": loaded("no/such/folder"),
    "no_such_configuration": loaded("BIRDS", name="none"),
    "no_such_split": loaded("BIRDS", split="clean"),
    "own_images": {"_target_": MINE, "name": "birds", "path": "no/such/folder", "template": "{}"},
    "no_such_loader": {"_target_": "my.own.loader"},
}


@pytest.mark.parametrize("saves", [True, False])
def test_test_data_that_cannot_be_loaded_are_refused_before_any_model_is(birds, saves):
    for case, config in WRONG.items():
        if config.get("path") == "BIRDS":
            config = {**config, "path": birds}
        algorithm = NufiltContinualMergingAlgorithm(save_on_every_step=saves)
        with pytest.raises(
            ValueError, match=r"^task 'birds': its test data can't be loaded"
        ) as error:
            algorithm.run(untouched(), clip_taskpool(birds=config))
        assert "\n" not in str(error.value), case


@pytest.mark.parametrize("method", [SequentialFineTuning, LoRAWEMoE])
def test_training_data_that_cannot_be_loaded_are_refused_before_any_model_is(method):
    """The task pool has its data in memory."""
    pool = untouched(train_datasets=OmegaConf.create({"birds": loaded("no/such/folder")}))
    message = "^task 'birds': its training data can't be loaded: FileNotFoundError: "
    with pytest.raises(ValueError, match=message):
        method().run(pool, in_memory())


def test_a_data_set_that_the_hub_does_not_know_has_its_remedy():
    from datasets.exceptions import DatasetNotFoundError

    def refuse():
        raise DatasetNotFoundError("Dataset 'birds' doesn't exist on the Hub.")

    with pytest.raises(ValueError, match=re.escape("on the Hub: name its owner as well")):
        load_data("birds", refuse)


NAMES = ["Birds", "bi_rds", "BIRDS "]


@pytest.mark.parametrize("name", NAMES)
def test_a_task_that_is_spelled_otherwise_in_the_task_pool_is_refused_before_any_model_is_loaded(
    name,
):
    taskpool = clip_taskpool(**{name: {"_target_": "my.own.loader"}})  # it is not asked
    message = re.escape(f"has no 'birds', which is a model's name; did you mean its '{name}'?")
    with pytest.raises(ValueError, match=message):
        NufiltContinualMergingAlgorithm().run(untouched(), taskpool)


@pytest.mark.parametrize("method", [SequentialFineTuning, LoRAWEMoE])
@pytest.mark.parametrize("name", NAMES)
def test_training_data_of_another_spelling_is_refused_before_any_model_is_loaded(method, name):
    """Else a method would take its items from the test data."""
    data = {"_target_": "my.own.loader"}
    pool = untouched(train_datasets=OmegaConf.create({name: data}))
    with pytest.raises(ValueError, match=f"train_datasets has no 'birds'.*did you mean .*{name}"):
        method().run(pool, in_memory())


def test_a_task_that_the_task_pool_lacks_is_named_with_one_that_is_spelled_alike(caplog):
    """It is shown as missing; a similar name may be another task, as mnist is to kmnist."""
    Evaluator(clip_taskpool(kbirds={"_target_": "my.own.loader"})).compare_names(["birds"])
    assert (
        "the task pool has no task 'birds': its scores are missing; did you mean 'kbirds'?"
        in caplog.text
    )
