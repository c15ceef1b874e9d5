"""Image folders of one's own as tasks of FusionBench's CLIP task pool."""

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, Features, Image, Value
from fusion_bench.taskpool import CLIPVisionModelTaskPool
from fusion_bench.tasks.clip_classification import get_classnames_and_templates
from lightning import Fabric
from omegaconf import OmegaConf

from fusion_bench_nufilt.continual import Evaluator
from fusion_bench_nufilt.continual.taskpools.local_tasks import load_image_task
from fusion_bench_nufilt.demo import TASKS, demo_folder, load_test_dataset, load_vision_model


def write_folders(folder, task):
    """The pictures of a demo task as PNG files, one subfolder a class."""
    for number, item in enumerate(load_test_dataset(task)):
        place = folder / TASKS[task].classes[item["label"]]
        place.mkdir(parents=True, exist_ok=True)
        item["image"].save(place / f"{number}.png")


def write_dataset(folder, task):
    """The same as a saved data set, in the demo's order of classes, which the labels have no names
    for.
    """
    pictures = list(load_test_dataset(task))
    columns = {
        "image": [item["image"] for item in pictures],
        "label": [item["label"] for item in pictures],
    }
    features = Features({"image": Image(), "label": Value("int64")})
    Dataset.from_dict(columns, features=features).save_to_disk(folder)


def evaluator(test_datasets):
    pool = CLIPVisionModelTaskPool(
        OmegaConf.create(test_datasets),
        processor=str(demo_folder() / "clip"),
        clip_model=str(demo_folder() / "clip"),
        dataloader_kwargs={"batch_size": 16},
    )
    pool._fabric_instance = Fabric(devices=1, accelerator="cpu")
    return Evaluator(pool)


def scores(test_datasets):
    report = evaluator(test_datasets).report(load_vision_model("shapes"), list(test_datasets))
    return [report[task] for task in test_datasets]


def entry(name, path, **options):
    target = "fusion_bench_nufilt.continual.taskpools.local_tasks.load_image_task"
    return {
        "_target_": target,
        "name": name,
        "path": str(path),
        "template": TASKS["shapes"].template,
        **options,
    }


def test_folders_and_saved_data_sets_score_as_the_same_pictures_do_through_the_demo(demo, tmp_path):
    write_folders(tmp_path / "png", "shapes")
    write_dataset(tmp_path / "saved", "shapes")
    demo_task = {"_target_": "fusion_bench_nufilt.demo.load_test_dataset", "task": "shapes"}
    my_folders = entry("my_folders", tmp_path / "png")
    classnames = list(TASKS["shapes"].classes)
    my_saved = entry("my_saved", tmp_path / "saved", classnames=classnames)
    builtin, folders, saved = scores(
        {"shapes": demo_task, "my_folders": my_folders, "my_saved": my_saved}
    )
    assert folders["accuracy"] == saved["accuracy"] == builtin["accuracy"]
    assert folders["loss"] == pytest.approx(builtin["loss"])
    assert saved["loss"] == pytest.approx(builtin["loss"])


def test_pools_that_share_a_tasks_name_score_each_with_its_own_classes(demo, tmp_path):
    write_folders(tmp_path, "shapes")  # whose classes are in another order than the demo's
    demo_task = {"_target_": "fusion_bench_nufilt.demo.load_test_dataset", "task": "shapes"}
    pools = {"of the demo": {"shapes": demo_task}, "mine": {"shapes": entry("shapes", tmp_path)}}
    alone = {name: scores(pool)[0] for name, pool in pools.items()}
    for first, second in (pools, reversed(pools)):
        evaluators = {}
        for name in (first, second):
            evaluators[name] = evaluator(pools[name])
            evaluators[name].description  # noqa: B018 -- this sets the pool up
        for name in (first, second):
            report = evaluators[name].report(load_vision_model("shapes"), ["shapes"])
            assert report["shapes"] == alone[name], (first, name)


def test_class_names_are_the_subfolders_and_the_template_makes_the_prompt(demo, tmp_path):
    write_folders(tmp_path, "shapes")
    dataset = load_image_task("things", str(tmp_path), "a sketch of a {}, quickly")
    classnames, (template,) = get_classnames_and_templates("things")
    assert classnames == sorted(TASKS["shapes"].classes)
    assert template("heart") == "a sketch of a heart, quickly"
    assert dataset.column_names == ["image", "label"]
    heart = classnames.index("heart")
    theirs = {item["image"].tobytes() for item in load_test_dataset("shapes") if item["label"] == 4}
    assert {item["image"].tobytes() for item in dataset if item["label"] == heart} == theirs


def test_words_in_the_names_of_files_and_folders_mean_nothing(demo, tmp_path):
    """`datasets`' own reader of image folders would take "train" and "test" for splits."""
    picture = load_test_dataset("shapes")[0]["image"]
    for name in ("train/test_1.png", "test/train_1.png", "val [1]/2.png", "val [1]/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        picture.save(tmp_path / name, format="png")
    dataset = load_image_task("odd", str(tmp_path), "{}")
    assert get_classnames_and_templates("odd")[0] == ["test", "train", "val [1]"]
    assert list(dataset["label"]) == [0, 1, 2]


def saved(folder, **columns):
    Dataset.from_dict(columns).save_to_disk(folder)
    return folder


def test_what_can_not_be_a_task_is_refused_with_the_reason(tmp_path):
    def refused(path, message, template="a {}", **options):
        with pytest.raises(ValueError, match=rf"task 'mine': .*{message}"):
            load_image_task("mine", str(path), template, **options)

    images = np.zeros((3, 4), dtype=np.uint8).tolist()
    refused(tmp_path, r"'a heart' has no \{\}", template="a heart")
    refused(
        tmp_path / "nowhere", "nowhere' has neither subfolders with images.* nor a saved data set"
    )
    DatasetDict(train=Dataset.from_dict({"image": images})).save_to_disk(tmp_path / "splits")
    refused(tmp_path / "splits", "several splits")
    refused(
        saved(tmp_path / "a", image=images, digit=[1, 2, 3]), "no column label, only image, digit"
    )
    refused(
        saved(tmp_path / "b", image=images, label=[0, 1, 2]),
        "labels in .* have no names.*: give classnames",
    )
    refused(
        saved(tmp_path / "c", image=images, label=[0, 1, 2]),
        "label 2 .* not one of 0 to 1",
        classnames=["a", "b"],
    )
    refused(
        saved(tmp_path / "d", image=images, label=["a", "b", "c"]),
        "label 'a' .* 0 to 2",
        classnames=list("abc"),
    )
