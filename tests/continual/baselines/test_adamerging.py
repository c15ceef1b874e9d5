"""Layer-wise AdaMerging on the new task's images, against a computation of its own."""

from itertools import chain, islice, repeat
from types import SimpleNamespace

import pytest
import torch
from fusion_bench import BaseModelPool
from fusion_bench.utils import instantiate
from torch.func import functional_call

from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.continual.baselines.adamerging import NewTaskAdaMergingAlgorithm
from fusion_bench_nufilt.continual.baselines.task_data import Images, task_data
from fusion_bench_nufilt.demo import (
    TASKS,
    load_clip,
    load_processor,
    load_test_dataset,
    load_train_dataset,
    load_vision_model,
    to_pixels,
)
from fusion_bench_nufilt.demo.train import text_features
from tests.continual.baselines.helpers import GLUE, baseline, demo_images, on_cpu
from tests.tiny_models import finetuned, t5


@pytest.fixture
def pools(demo):
    """The demo's task pool, its pretrained tower, and two others far enough from it for their
    weights to matter.
    """
    pretrained = load_vision_model("_pretrained_")
    models = {
        "merged": finetuned(pretrained, 1, scale=0.2),
        "shapes": finetuned(pretrained, 2, scale=0.2),
    }
    return BaseModelPool({"_pretrained_": pretrained} | models), demo_images()


def algorithm(taskpool, **options):
    made = on_cpu(NewTaskAdaMergingAlgorithm(**options))
    made._program = SimpleNamespace(taskpool=taskpool)
    return made


def entropy(vision, weights, images):
    """Mean entropy of the predictions on images of shapes."""
    clip = load_clip()
    text = text_features(clip, load_processor().tokenizer, TASKS["shapes"].prompts())
    features = clip.visual_projection(functional_call(vision, weights, (images,)).pooler_output)
    logits = clip.logit_scale.exp() * torch.nn.functional.normalize(features, dim=-1) @ text.T
    return torch.distributions.Categorical(logits=logits).entropy().mean()


def test_it_is_adam_on_the_entropy_of_the_new_tasks_predictions(pools):
    modelpool, taskpool = pools
    lr = 0.01
    steps = 6
    options = {
        "lr": lr,
        "max_steps": steps,
        "batch_size": 12,
        "samples_per_class": None,
        "seed": 5,
    }
    taskpool.setup()
    # No images of another task are seen.
    taskpool.test_datasets = {"shapes": taskpool.test_datasets["shapes"]}
    with torch.no_grad():  # as under the protocol
        merged = algorithm(taskpool, **options).run(modelpool)

    pretrained, first, second = [
        dict(modelpool.load_model(name).named_parameters()) for name in modelpool._models
    ]
    coefficients = torch.full((2, len(pretrained)), 0.3, requires_grad=True)

    def weights():
        values = {}
        for number, (name, theta_0) in enumerate(pretrained.items()):
            tau_1 = (first[name] - theta_0).detach()
            tau_2 = (second[name] - theta_0).detach()
            lambda_1, lambda_2 = coefficients[:, number]
            values[name] = theta_0.detach() + (lambda_1 * tau_1 + lambda_2 * tau_2)
        return values

    generator = torch.Generator().manual_seed(5)
    images = torch.stack([to_pixels(item["image"]) for item in load_test_dataset("shapes")])
    batches = torch.utils.data.DataLoader(images, batch_size=12, shuffle=True, generator=generator)
    optimizer = torch.optim.Adam([coefficients], lr=lr)
    tower = modelpool.load_model("_pretrained_")
    for batch in islice(chain.from_iterable(repeat(batches)), steps):
        optimizer.zero_grad()
        entropy(tower, weights(), batch).backward()
        optimizer.step()
    assert (coefficients - 0.3).abs().max() > lr
    for name, weight in weights().items():
        if name.endswith("k_proj.bias"):
            # changes nothing in a softmax: its gradient is rounding, of which Adam makes full steps
            continue
        torch.testing.assert_close(merged.get_parameter(name), weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rule", "kept"), [("on_top", 1), ("restart", 0)])
def test_the_papers_rule_keeps_what_is_merged_and_that_of_its_code_drops_it(pools, rule, kept):
    modelpool, taskpool = pools
    options = [
        f"method.rule={rule}",
        "method.base_method.max_steps=0",
        "method.shuffle_order=false",
    ]
    models = dict(
        zip(("_pretrained_", "digits", "shapes"), modelpool._models.values(), strict=True)
    )
    merged = baseline("adamerging", *options).run(models, taskpool)
    theta_0, digits, shapes = [model.state_dict() for model in models.values()]
    for name, value in merged.state_dict().items():
        first_tau = digits[name] - theta_0[name]
        second_tau = shapes[name] - theta_0[name]
        expected = theta_0[name] + 0.3 * (kept * first_tau + second_tau)
        torch.testing.assert_close(value, expected)


def pixels_of(pictures):
    return {to_pixels(item["image"]).numpy().tobytes() for item in pictures}


def test_five_items_of_each_class_are_drawn_once_and_none_of_them_is_scored(demo, note_calls):
    batches = note_calls(Images, "logits", lambda _, model, batch: batch[0])
    config = compose_run(["modelpool=nufilt_demo"]).modelpool
    config.models = {name: config.models[name] for name in ("_pretrained_", "shapes")}
    options = ["method.base_method.max_steps=8", "method.evaluate=last"]
    baseline("adamerging", *options).run(instantiate(config), demo_images())
    seen = torch.cat(batches)
    drawn = {image.numpy().tobytes() for image in seen}
    assert len(drawn) <= 5 * len(TASKS["shapes"].prompts()) < len(seen)
    assert drawn <= pixels_of(load_train_dataset("shapes"))
    assert drawn.isdisjoint(pixels_of(load_test_dataset("shapes")))


def test_flan_t5_is_trained_on_its_training_split_if_there_is_one():
    pool = GLUE()
    task = pool.load_task("cola")
    task.dataset = {"train": task.test_dataset.select([0, 1])}
    pool.load_task = lambda name: task
    models = BaseModelPool({"_pretrained_": t5(), "cola": t5()})
    assert len(task_data("", pool, "cola", models).dataset) == 2
    task.dataset = {}
    assert task_data("", pool, "cola", models).dataset is task.test_dataset


def test_without_test_data_it_is_refused(pools):
    modelpool, taskpool = pools
    with pytest.raises(
        ValueError, match="AdaMerging needs a CLIPVisionModelTaskPool, got NoneType"
    ):
        NewTaskAdaMergingAlgorithm().run(modelpool)
    del taskpool._test_datasets["shapes"]
    with pytest.raises(ValueError, match="AdaMerging needs a CLIPVisionModelTaskPool with shapes"):
        algorithm(taskpool).run(modelpool)
    with pytest.raises(
        ValueError, match="AdaMerging needs data of 'shapes'; the task pool has cola, sst2"
    ):
        algorithm(GLUE()).run(modelpool)
