"""One table: what each method does with models of each family, and what it refuses."""

from types import SimpleNamespace

import pytest
import torch
from fusion_bench.compat.taskpool import TaskPool as V01TaskPool
from fusion_bench.utils import instantiate
from lightning import Fabric
from omegaconf import OmegaConf
from torch import nn

from fusion_bench_nufilt.compare import Methods, compose_run
from fusion_bench_nufilt.compare.configs import NEED_DATA
from fusion_bench_nufilt.demo import load_vision_model
from fusion_bench_nufilt.layers import select_layers
from tests.models import clip, finetuned, llama, t5


class Plain(nn.Module):
    """No model of transformers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.norm = nn.LayerNorm(8)


FAMILIES = {"clip": clip, "t5": t5, "llama": llama, "plain": Plain}
NAMES = [*Methods().all(), *NEED_DATA]
NO_DATA = "needs a CLIPVisionModelTaskPool|needs training data|experts are known for"
REFUSED = {
    ("nufilt", "plain"): "name its layers, or say all-linear",
    **{
        (name, family): NO_DATA for name in NEED_DATA for family in FAMILIES if (name, family) != ("adamerging", "clip")
    },
}
"""What does not run on models and scores alone, and the reason that is given; everything else does. What the methods
that need data do with it is tested with them."""
LINEAR = ("knots_ties", "spectral")  # they merge linear layers, spectral accumulation the rest in another way
STEPS = {"dop": "num_steps", "wudi": "iter_num", "adamerging": "max_steps"}


class ScoresByTask(V01TaskPool):
    """A pool that is not CLIP's, as that of Flan-T5."""

    def __init__(self, tasks):
        super().__init__(OmegaConf.create({"tasks": [{"name": task} for task in tasks]}))

    def load_task(self, name):
        return SimpleNamespace(evaluate=lambda model: {"accuracy": 0.5})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_method_merges_and_scores_every_family_or_says_why_not(family, name, request):
    tasks = ["shapes", "counts", "digits"]
    base, taskpool = FAMILIES[family](), ScoresByTask(tasks)
    if (name, family) == ("adamerging", "clip"):
        base, taskpool = clip_with_images(request)
    models = {"_pretrained_": base} | {task: finetuned(base, seed=i) for i, task in enumerate(tasks)}
    method = f"method={name}" if name == "nufilt" else f"method=continual/{name}"
    quick = [f"method.base_method.{STEPS[name]}=2"] if name in STEPS else []
    algorithm = instantiate(compose_run([method, *quick]).method)
    algorithm._fabric_instance = Fabric(devices=1, accelerator="cpu")
    if why := REFUSED.get((name, family)):
        with pytest.raises(ValueError, match=why):
            algorithm.run(models, taskpool)
        return
    merged = algorithm.run(models, taskpool)
    assert algorithm.matrix.missing == []
    assert type(merged) is type(base)
    assert all(torch.isfinite(parameter).all() for parameter in merged.parameters())
    changed = {key for key, value in merged.named_parameters() if not torch.equal(value, base.get_parameter(key))}
    if name == "nufilt":
        expected = {view.key for view in select_layers(base).values()}
    elif name in LINEAR:
        expected = {view.key for view in select_layers(base, "all-linear").values()}
    else:
        left = "class_embedding" if name == "dop" else "nothing"
        expected = {key for key, _ in base.named_parameters() if not key.endswith(left)}
    assert expected <= changed


def clip_with_images(request):
    """The tower and the task pool of the demo."""
    request.getfixturevalue("demo")
    taskpool = instantiate(compose_run(["taskpool=nufilt_demo"]).taskpool)
    taskpool._fabric_instance = Fabric(devices=1, accelerator="cpu")
    return load_vision_model("_pretrained_"), taskpool
