"""What can't be loaded is told before any model is."""

import re

import pytest
from datasets import ClassLabel, Dataset, Features, Value
from fusion_bench import BaseModelPool
from fusion_bench.taskpool import CLIPVisionModelTaskPool
from omegaconf import OmegaConf
from torch import nn

from fusion_bench_nufilt import LoRAWEMoE, NufiltContinualMergingAlgorithm, SequentialFineTuning
from fusion_bench_nufilt.continual import Evaluator
from fusion_bench_nufilt.continual.data_sets import check_test_sets, check_train_sets
from tests.continual.baselines.helpers import GLUE


class UntouchedPool(BaseModelPool):
    """A pool none of whose models may be loaded."""

    def load_model(self, *args, **kwargs):
        pytest.fail("a model was loaded")


def untouched(**options):
    return UntouchedPool({"_pretrained_": nn.Linear(2, 2), "birds": nn.Linear(2, 2)}, **options)


def clip_taskpool(**test_datasets):
    datasets = OmegaConf.create(test_datasets)
    return CLIPVisionModelTaskPool(datasets, processor="none", clip_model="none")


@pytest.fixture
def birds(tmp_path):
    features = Features({"image": Value("int64"), "label": ClassLabel(names=["owl", "emu"])})
    Dataset.from_dict({"image": [0, 1], "label": [0, 1]}, features).to_parquet(
        tmp_path / "birds" / "test.parquet"
    )
    return str(tmp_path / "birds")


def loaded(path, **options):
    return {"_target_": "datasets.load_dataset", "path": path, **options}


WRONG = {
    "no_such_folder": (loaded("no/such/folder"), "'no/such/folder'"),
    "no_such_configuration": (loaded("BIRDS", name="none"), "BuilderConfig 'none' not found"),
    "no_such_split": (
        loaded("BIRDS", split="test[:1]+clean"),
        "it has no split 'clean', only test: correct it in",
    ),
    "inside_another_loader": (
        {"_target_": "split", "dataset": loaded("no/such/folder")},
        "'no/such/folder'",
    ),
    "own_images": (
        {
            "_target_": "fusion_bench_nufilt.continual.taskpools.local_tasks.load_image_task",
            "name": "birds",
            "path": "no/such/folder",
            "template": "a {}",
        },
        "'no/such/folder'",
    ),
}


def wrong(case, birds):
    config, expected = WRONG[case]
    if "path" in config:
        config = {**config, "path": config["path"].replace("BIRDS", birds)}
    return config, expected


@pytest.mark.parametrize("case", WRONG)
def test_test_data_that_cannot_be_loaded_is_refused_before_any_model_is(case, birds):
    config, expected = wrong(case, birds)
    with pytest.raises(
        ValueError, match=f"^task 'birds': its data set .*{re.escape(expected)}"
    ) as error:
        NufiltContinualMergingAlgorithm().run(untouched(), clip_taskpool(birds=config))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", [SequentialFineTuning, LoRAWEMoE])
def test_training_data_that_cannot_be_loaded_is_refused_before_any_model_is(method):
    pool = untouched(train_datasets=OmegaConf.create({"birds": loaded("no/such/folder")}))
    with pytest.raises(ValueError, match=r"^task .birds.: its data set .no/such/folder."):
        method().run(pool)


@pytest.mark.parametrize("split", [None, "test", "test[:50%]", "test+test[1:]", "all"])
def test_what_can_be_loaded_passes(birds, split):
    check_test_sets(clip_taskpool(birds=loaded(birds, split=split)))


@pytest.mark.parametrize(
    "keys", [{"_convert_": "all"}, {"_recursive_": False}, {"_partial_": True}, {"_args_": []}]
)
def test_the_keys_of_hydra_are_not_arguments_of_the_loader(birds, tmp_path, keys):
    Dataset.from_dict({"image": [0], "label": [0]}).save_to_disk(tmp_path / "saved")
    on_disk = {"_target_": "datasets.load_from_disk", "dataset_path": str(tmp_path / "saved")}
    for config in (loaded(birds, split="test"), on_disk):
        check_test_sets(clip_taskpool(birds={**config, **keys}))


def test_a_path_among_the_positional_arguments_is_looked_up(birds, tmp_path):
    for target in ("datasets.load_dataset", "datasets.load_from_disk"):
        config = {"_target_": target, "_args_": [str(tmp_path / "none")], "_convert_": "all"}
        with pytest.raises(ValueError, match=f"its data set '{tmp_path}/none'"):
            check_test_sets(clip_taskpool(birds=config))
    check_test_sets(clip_taskpool(birds={"_target_": "datasets.load_dataset", "_args_": [birds]}))


def test_data_in_memory_and_unknown_loaders_are_left_to_the_pool():
    check_test_sets(CLIPVisionModelTaskPool({"birds": [1, 2]}, processor="none", clip_model="none"))
    check_test_sets(clip_taskpool(birds={"_target_": "my.own.loader", "path": "no/such/folder"}))
    check_train_sets(untouched())
    check_test_sets(object())


def test_a_name_without_an_owner_that_the_hub_does_not_know_has_its_remedy(monkeypatch):
    from datasets.exceptions import DatasetNotFoundError

    def refuse(*args, **kwargs):
        raise DatasetNotFoundError(
            "Dataset 'birds' doesn't exist on the Hub or cannot be accessed."
        )

    monkeypatch.setattr("datasets.load_dataset_builder", refuse)
    with pytest.raises(
        ValueError, match=re.escape("cannot be accessed: name its owner as well (OWNER/birds)")
    ):
        check_test_sets(clip_taskpool(birds=loaded("birds")))


NAMES = ["Birds", "bi_rds", "BIRDS "]


@pytest.mark.parametrize("name", NAMES)
def test_a_task_that_is_spelled_otherwise_in_the_task_pool_is_refused_before_any_model_is_loaded(
    name,
):
    taskpool = clip_taskpool(**{name: {"_target_": "my.own.loader"}})
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
        method().run(pool)


def test_a_task_that_the_task_pool_lacks_is_named_before_any_model_is_loaded(caplog):
    """It is shown as missing; a similar name may be another task, as mnist is to kmnist."""
    taskpool = clip_taskpool(kbirds={"_target_": "my.own.loader"})
    with pytest.raises(pytest.fail.Exception, match="a model was loaded"):
        NufiltContinualMergingAlgorithm().run(untouched(), taskpool)
    assert (
        "the task pool has no task 'birds': its scores are missing; did you mean 'kbirds'?"
        in caplog.text
    )


def test_names_that_the_task_pool_has_in_either_form_are_the_same(caplog):
    for name in ("glue-cola", "cola"):
        Evaluator(GLUE(["cola"])).compare_names([name])
    assert caplog.text == ""
