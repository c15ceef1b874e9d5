"""One table: what each method does with models of each family, and what it refuses."""

from types import SimpleNamespace

import pytest
import torch
from fusion_bench import BaseModelPool
from fusion_bench.compat.taskpool import TaskPool as V01TaskPool
from fusion_bench.utils import instantiate
from lightning import Fabric
from omegaconf import OmegaConf
from torch import nn

from fusion_bench_nufilt.baselines.wemoe import MIXTURES
from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.compare.specs import NEED_DATA, parse_methods
from fusion_bench_nufilt.demo import load_vision_model
from fusion_bench_nufilt.layers import select_layers
from tests.baselines.glue import GLUE
from tests.baselines.test_fusionbench import configured
from tests.models import clip, finetuned, llama, t5


class Plain(nn.Module):
    """No model of transformers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.norm = nn.LayerNorm(8)


FAMILIES = {"clip": clip, "t5": t5, "llama": llama, "plain": Plain}
NAMES = [*(spec.method for spec in parse_methods("all")), *NEED_DATA]
NO_IMAGES = "needs a CLIPVisionModelTaskPool"
REFUSED = {
    ("nufilt", "plain"): "name its layers, or say all-linear",
    **{("adamerging", family): NO_IMAGES for family in ("llama", "plain")},
    **{("lora_wemoe", family): "experts are known for" for family in ("llama", "plain")},
    **{("sequential_finetuning", family): "needs training data" for family in ("t5", "llama", "plain")},
}
"""What does not run, and the reason that is given; everything else does."""
LINEAR = ("knots_ties", "spectral")  # they merge linear layers, spectral accumulation the rest in another way
STEPS = {"dop": "base_method.num_steps", "wudi": "base_method.iter_num", "adamerging": "base_method.max_steps"}
STEPS |= {"lora_wemoe": "max_steps", "sequential_finetuning": "num_steps"}


class ScoresByTask(V01TaskPool):
    """A pool that is not CLIP's, as that of Flan-T5."""

    def __init__(self, tasks):
        super().__init__(OmegaConf.create({"tasks": [{"name": task} for task in tasks]}))

    def load_task(self, name):
        return SimpleNamespace(evaluate=lambda model: {"accuracy": 0.5})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_method_merges_and_scores_every_family_or_says_why_not(family, name, request):
    tasks = ["shapes", "counts"]
    base, taskpool = FAMILIES[family](), ScoresByTask(tasks)
    if name in NEED_DATA and family == "clip":
        base, taskpool = clip_with_images(request)
    elif name in NEED_DATA and family == "t5":
        taskpool = GLUE(tasks)
    models = {"_pretrained_": base} | {task: finetuned(base, seed=i) for i, task in enumerate(tasks)}
    algorithm = instantiate(config(name))
    algorithm._fabric_instance = Fabric(devices=1, accelerator="cpu")
    if name == "sequential_finetuning" and family == "clip":
        images = compose_run(["modelpool=nufilt_demo"]).modelpool.train_datasets
        models = BaseModelPool(models, train_datasets=images)
    if why := REFUSED.get((name, family)):
        with pytest.raises(ValueError, match=why):
            algorithm.run(models, taskpool)
        return
    merged = algorithm.run(models, taskpool)
    assert algorithm.matrix.missing == []
    assert type(merged) is (MIXTURES[type(base)] if name == "lora_wemoe" else type(base))
    assert all(torch.isfinite(parameter).all() for parameter in merged.parameters())
    if name == "lora_wemoe":
        return  # its parameters have other names
    changed = {key for key, value in merged.named_parameters() if not torch.equal(value, base.get_parameter(key))}
    if name == "nufilt":
        expected = {view.key for view in select_layers(base).values()}
    elif name in LINEAR:
        expected = {view.key for view in select_layers(base, "all-linear").values()}
    else:
        left = "class_embedding" if name == "dop" else "nothing"
        expected = {key for key, _ in base.named_parameters() if not key.endswith(left)}
    assert expected <= changed


def config(name):
    method = name if name == "nufilt" else f"continual/{name}"
    return configured(method, *([f"method.{STEPS[name]}=2"] if name in STEPS else []))


def clip_with_images(request):
    """The tower and the task pool of the demo."""
    request.getfixturevalue("demo")
    taskpool = instantiate(compose_run(["taskpool=nufilt_demo"]).taskpool)
    taskpool._fabric_instance = Fabric(devices=1, accelerator="cpu")
    return load_vision_model("_pretrained_"), taskpool
