"""Sequential fine-tuning, against a computation of its own."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from fusion_bench import BaseModelPool
from fusion_bench.utils import instantiate

from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.continual.baselines import SequentialFineTuning
from fusion_bench_nufilt.demo import (
    TASKS,
    load_clip,
    load_processor,
    load_train_dataset,
    load_vision_model,
    to_pixels,
)
from fusion_bench_nufilt.demo.train import Recipe, text_features
from tests.continual.baselines.helpers import demo_images, on_cpu

TWO = ("shapes", "digits")


@pytest.fixture
def pools(demo):
    """Of two of the demo's tasks; each has one batch of 64 training images."""
    config = compose_run(["modelpool=nufilt_demo"]).modelpool
    config.models = {name: config.models[name] for name in ("_pretrained_", *TWO)}
    return instantiate(config), demo_images()


def algorithm(kind=SequentialFineTuning, **options):
    return on_cpu(
        kind(shuffle_order=False, learning_rate=1e-3, num_steps=3, **{"batch_size": 64} | options)
    )


def test_it_is_adam_with_a_cosine_on_one_task_after_another(pools):
    tuned = algorithm().run(*pools)
    clip = load_clip()
    tower = load_vision_model("_pretrained_")
    for task in TWO:
        text = text_features(clip, load_processor().tokenizer, TASKS[task].prompts()).detach()
        pictures = list(load_train_dataset(task))
        images = torch.stack([to_pixels(picture["image"]) for picture in pictures])
        labels = torch.tensor([picture["label"] for picture in pictures])
        optimizer = torch.optim.Adam(tower.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
        for _ in range(3):
            features = F.normalize(
                clip.visual_projection(tower(pixel_values=images).pooler_output), dim=-1
            )
            optimizer.zero_grad()
            F.cross_entropy(clip.logit_scale.exp().detach() * features @ text.T, labels).backward()
            optimizer.step()
            schedule.step()
    pretrained = load_vision_model("_pretrained_")
    for name, weight in tower.named_parameters():
        if name.endswith("k_proj.bias"):
            # changes nothing in a softmax: its gradient is rounding, of which Adam makes full steps
            continue
        moved = (weight - pretrained.get_parameter(name)).norm()
        assert (tuned.get_parameter(name) - weight).norm() < 0.02 * moved, name


def test_it_is_refused_before_any_work_without_data(pools):
    modelpool, taskpool = pools
    with pytest.raises(
        ValueError, match=r"SequentialFineTuning.*no train_datasets of shapes, digits"
    ):
        algorithm().run(BaseModelPool(modelpool._models), taskpool, on_step=pytest.fail)
    with pytest.raises(ValueError, match="needs a CLIPVisionModelTaskPool, got NoneType"):
        algorithm().run(modelpool, on_step=pytest.fail)
    del taskpool._test_datasets["digits"]
    with pytest.raises(ValueError, match="CLIPVisionModelTaskPool with digits"):
        algorithm().run(modelpool, taskpool, on_step=pytest.fail)


@pytest.mark.parametrize(
    "models", ["base-patch32_TA8", "base-patch16_TALL14", "large-patch14_TALL20"]
)
def test_the_papers_models_come_with_training_data_of_every_task(models):
    pool = compose_run([f"modelpool=clip-vit-{models}"]).modelpool
    assert pool.models.keys() - {"_pretrained_"} == pool.train_datasets.keys()
    assert {dataset.split for dataset in pool.train_datasets.values()} == {"train"}


@pytest.mark.parametrize(
    ("modelpool", "recipe"),
    [("nufilt_demo", (5e-4, 90, 64)), ("clip-vit-base-patch32_TA8", (1e-5, 4000, 128))],
)
def test_the_recipe_is_that_of_the_single_models(modelpool, recipe):
    method = compose_run(
        ["method=continual/sequential_finetuning", f"modelpool={modelpool}"]
    ).method
    assert (method.learning_rate, method.num_steps, method.batch_size) == recipe
    if modelpool == "nufilt_demo":
        assert recipe == (Recipe().finetune_lr, Recipe().finetune_steps, Recipe().batch)
