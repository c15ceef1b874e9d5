"""Methods that walk a model's modules merge a parameter once, however many modules hold it."""

import pytest
import torch
import transformers as hf
from omegaconf import DictConfig
from torch import nn

from fusion_bench_nufilt.continual.baselines import ContinualMethodBaseline
from tests.continual.baselines.helpers import on_cpu
from tests.continual.helpers import pool
from tests.tiny_models import T5, build

pytestmark = pytest.mark.oldest

OPCM = {"alpha": 0.5}
DOP = {"num_steps": 1, "alpha": 0.8, "ema_beta": 0.999, "svd_epsilon": 0.99999}
METHODS = {
    "opcm": {"_target_": "fusion_bench.method.opcm.opcm.OPCMForCLIP", **OPCM},
    "opcm_general": {"_target_": "fusion_bench.method.opcm.opcm_general.OPCM", **OPCM},
    "dop": {"_target_": "fusion_bench.method.dop.dop.ContinualDOPForCLIP", **DOP},
    "dop_general": {"_target_": "fusion_bench.method.dop.dop_general.DOPMerging", **DOP},
}


def t5(modules, tied):
    """A T5 whose embedding is one module, as with transformers 4, or three, as with transformers 5;
    its head has the embedding's parameter or one of its own.
    """
    model = build(hf.T5ForConditionalGeneration, hf.T5Config(**{**T5, "num_layers": 1}), 0)
    for stack in (model.encoder, model.decoder):
        if modules == 1:
            stack.embed_tokens = model.shared
        else:
            stack.embed_tokens = nn.Embedding(*model.shared.weight.shape)
            stack.embed_tokens.weight = model.shared.weight
    if tied:
        model.lm_head.weight = model.shared.weight
    else:
        model.lm_head.weight = nn.Parameter(model.shared.weight.detach().flip(0).clone())
        model.config.tie_word_embeddings = False
    return model


def algorithm(name, **options):
    return ContinualMethodBaseline(DictConfig(METHODS[name]), shuffle_order=False, **options)


def merge(name, models):
    return on_cpu(algorithm(name)).run(models)


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("name", METHODS)
def test_a_parameter_that_several_modules_hold_is_merged_once(name, tied):
    models = pool(3, t5(modules=3, tied=tied))
    merged = merge(name, models)
    base, *tasks = [model.shared.weight for model in models.values()]
    update = merged.shared.weight - base
    if name.startswith("opcm"):  # the sum of the task vectors, at the tasks' mean length
        expected = sum(tasks) - len(tasks) * base
        expected = expected * update.norm() / expected.norm()
        assert 0.5 < update.norm() / (tasks[0] - base).norm() < 2
    else:  # the mean of what is merged and the next task
        expected = tasks[0]
        for task in tasks[1:]:
            expected = (expected + task) / 2
        expected = expected - base
    torch.testing.assert_close(update, expected, rtol=1e-3, atol=1e-5)
    assert {"lm_head", "encoder.embed_tokens"} <= {name for name, _ in merged.named_modules()}


@pytest.mark.parametrize("name", ["opcm", "dop"])
def test_a_model_whose_embedding_is_three_modules_is_merged_like_one_with_one(name):
    one = merge(name, pool(3, t5(modules=1, tied=False)))
    three = merge(name, pool(3, t5(modules=3, tied=False)))
    torch.testing.assert_close(three.state_dict(), one.state_dict(), rtol=0, atol=0)
