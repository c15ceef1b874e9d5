"""Methods as they are configured, and pools that download nothing."""

from contextlib import contextmanager
from copy import deepcopy
from types import SimpleNamespace

import torch
from datasets import Dataset
from fusion_bench.compat.taskpool.flan_t5_glue_text_generation import (
    FlanT5GLUETextGenerationTaskPool,
)
from fusion_bench.utils import instantiate
from lightning import Fabric
from omegaconf import OmegaConf

from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.utils.overrides import key_value

#: The option for the number of steps, of the methods that have an optimiser.
STEPS = {
    "nufilt": "max_steps",
    "dop": "base_method.num_steps",
    "wudi": "base_method.iter_num",
    "adamerging": "base_method.max_steps",
    "lora_wemoe": "max_steps",
    "sequential_finetuning": "num_steps",
}


class GLUE(FlanT5GLUETextGenerationTaskPool):
    """A pool like that of Flan-T5: tasks of a few random texts with answers of one token."""

    tokenizer = SimpleNamespace(pad_token_id=0)

    def __init__(self, tasks=("cola", "sst2")):
        super().__init__(OmegaConf.create({"tasks": [{"name": task} for task in tasks]}))

    def load_task(self, name):
        generator = torch.Generator().manual_seed(len(name))
        ids = torch.randint(2, 50, (12, 8), generator=generator).tolist()
        labels = [[i % 2 + 5, 1] for i in range(12)]
        columns = {"input_ids": ids, "attention_mask": [[1] * 6 + [0] * 2] * 12, "labels": labels}
        data = Dataset.from_dict(columns)
        return SimpleNamespace(
            dataset={}, test_dataset=data, evaluate=lambda model: {"accuracy": 0.5}
        )


def on_cpu(algorithm):
    algorithm._fabric_instance = Fabric(devices=1, accelerator="cpu")
    return algorithm


def demo_images():
    """The demo's task pool."""
    return on_cpu(instantiate(compose_run(["taskpool=nufilt_demo"]).taskpool))


def configured(method, *overrides):
    """The config of a method. Options are set on the composed config, since Hydra takes long to
    compose another.
    """
    options = [word for word in overrides if word.startswith("method.")]
    others = [word for word in overrides if not word.startswith("method.")]
    config = compose_run([f"method={method}", *others]).method
    for key, value in map(key_value, options):
        OmegaConf.update(config, key.removeprefix("method."), value)
    return config


def baseline(name, *overrides):
    return on_cpu(instantiate(configured(f"continual/{name}", *overrides)))


def same(model, other):
    """Whether two models have the same bits."""
    others = other.state_dict()
    return all(torch.equal(value, others[key]) for key, value in model.state_dict().items())


@contextmanager
def unchanged(models):
    """Check that none of these models is written."""
    before = deepcopy(models)
    yield
    assert all(same(model, before[name]) for name, model in models.items())
