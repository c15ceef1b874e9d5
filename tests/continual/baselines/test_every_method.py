"""One table: what each method does with models of each family, and what it refuses."""

import inspect
from dataclasses import fields

import pytest
import torch
from fusion_bench import BaseModelPool
from fusion_bench.utils import import_object, instantiate
from omegaconf import DictConfig
from torch import nn
from torch.nn.utils import parameters_to_vector

from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.compare.configs import plain as plain_config
from fusion_bench_nufilt.compare.specs import NEED_DATA, parse_methods
from fusion_bench_nufilt.continual.baselines.fusionbench import RuleConfig
from fusion_bench_nufilt.continual.baselines.wemoe import MIXTURES
from fusion_bench_nufilt.demo import load_vision_model
from fusion_bench_nufilt.methods import METHODS
from fusion_bench_nufilt.models import select_layers
from tests.continual.baselines.helpers import (
    GLUE,
    STEPS,
    configured,
    demo_images,
    on_cpu,
    unchanged,
)
from tests.continual.helpers import noting
from tests.tiny_models import clip, finetuned, llama, t5


def plain():
    """No model of transformers."""
    body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    return nn.ModuleDict({"body": body, "norm": nn.LayerNorm(8)})


FAMILIES = {"clip": clip, "t5": t5, "llama": llama, "plain": plain}
NAMES = [*(spec.method for spec in parse_methods("all")), *NEED_DATA]
NO_IMAGES = "needs a CLIPVisionModelTaskPool"
REFUSED = {
    ("nufilt", "plain"): "name its layers, or say all-linear",
    ("adamerging", "llama"): NO_IMAGES,
    ("adamerging", "plain"): NO_IMAGES,
    ("lora_wemoe", "llama"): NO_IMAGES,
    ("lora_wemoe", "plain"): NO_IMAGES,
    ("sequential_finetuning", "t5"): "needs training data",
    ("sequential_finetuning", "llama"): "needs training data",
    ("sequential_finetuning", "plain"): "needs training data",
}
"""What does not run, and the reason that is given; everything else does."""
#: FusionBench merges CLIPs and T5s in two ways; our own methods do not know the family, and NUFILT
#: stands for them.
CASES = [("clip", name) for name in NAMES]
CASES += [("t5", name) for name in NAMES if name not in METHODS]
CASES += [(family, "nufilt") for family in ("t5", "llama")]
CASES += [(family, name) for name, family in REFUSED]
#: Of the other methods of FusionBench each second one is quick on CLIPs, and the rest on T5s.
ON_BOTH = {"nufilt", "opcm", "adamerging", "lora_wemoe", "sequential_finetuning"}
BY_TURNS = [name for name in NAMES if name not in METHODS and name not in ON_BOTH]
SLOW = [("t5", name) for name in BY_TURNS[::2]] + [("clip", name) for name in BY_TURNS[1::2]]
CASES = [
    pytest.param(*case, marks=pytest.mark.slow) if case in SLOW else case
    for case in dict.fromkeys(CASES)
]
# They merge linear layers, spectral voting the rest in another way.
LINEAR = ("knots_ties", "spectral")


def stream(family, name, request):
    """A method, two models of a family in a dict, their pool, and a task pool."""
    tasks = ["shapes", "counts"]
    base = FAMILIES[family]()
    taskpool = GLUE(tasks)
    if name in NEED_DATA and family != "t5":
        taskpool = None
    if name in NEED_DATA and family == "clip":
        request.getfixturevalue("demo")
        base = load_vision_model("_pretrained_")
        taskpool = demo_images()
    models = {"_pretrained_": base}
    for seed, task in enumerate(tasks):
        models[task] = finetuned(base, seed=seed)
    pool = models
    if name == "sequential_finetuning" and family == "clip":
        images = compose_run(["modelpool=nufilt_demo"]).modelpool.train_datasets
        pool = BaseModelPool(models, train_datasets=images)
    method = name
    if name not in METHODS:
        method = f"continual/{name}"
    options = []
    if name in STEPS:
        options.append(f"method.{STEPS[name]}=2")
    algorithm = on_cpu(instantiate(configured(method, *options)))
    return algorithm, models, pool, taskpool


@pytest.mark.parametrize(("family", "name"), CASES)
def test_every_method_merges_and_scores_every_family_or_says_why_not(family, name, request):
    algorithm, models, pool, taskpool = stream(family, name, request)
    base = models["_pretrained_"]
    if (name, family) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name, family]):
            algorithm.run(pool, taskpool)
        return
    steps_seen = []
    with unchanged(models):
        merged = algorithm.run(pool, taskpool, noting(steps_seen))
    assert steps_seen == [1, 2]
    assert algorithm.matrix.missing == []
    assert all(torch.isfinite(parameter).all() for parameter in merged.parameters())
    if name == "lora_wemoe":
        assert type(merged) is MIXTURES[type(base)]
        return  # its parameters have other names
    assert type(merged) is type(base)
    changed = set()
    for key, value in merged.named_parameters():
        if not torch.equal(value, base.get_parameter(key)):
            changed.add(key)
    if name == "nufilt":
        expected = {view.key for view in select_layers(base).values()}
    elif name in LINEAR:
        expected = {view.key for view in select_layers(base, "all-linear").values()}
    else:
        expected = {key for key, _ in base.named_parameters()}
        if name == "dop":
            expected = {key for key in expected if not key.endswith("class_embedding")}
    assert expected <= changed


#: A decomposition, an optimiser and a batch method; the others take half a minute in all.
QUICK = ("opcm", "dop", "ties_merging")
IN_16_BITS = [pytest.param(name, torch.bfloat16) for name in QUICK]
for name in NAMES:
    if name not in METHODS:
        IN_16_BITS.append(pytest.param(name, torch.float16, marks=pytest.mark.slow))
        if name not in QUICK:
            IN_16_BITS.append(pytest.param(name, torch.bfloat16, marks=pytest.mark.slow))


@pytest.mark.parametrize(("name", "dtype"), IN_16_BITS)
def test_every_baseline_computes_in_float32_with_models_in_16_bits(name, dtype, request):
    """The result is that of the same weights in float32, rounded at each step."""
    algorithm, models, pool, taskpool = stream("clip", name, request)
    for model in models.values():
        model.to(dtype).float()
    with unchanged(models):
        exact = algorithm.run(pool, taskpool)
    algorithm, _, _, _ = stream("clip", name, request)
    for model in models.values():
        model.to(dtype)
    with unchanged(models):
        merged = algorithm.run(pool, taskpool)
    assert {parameter.dtype for parameter in merged.parameters()} == {dtype}
    assert {parameter.dtype for parameter in exact.parameters()} == {torch.float32}
    expected = parameters_to_vector(exact.parameters())
    error = (parameters_to_vector(merged.parameters()).float() - expected).norm()
    # A few roundings: TIES and MagMax take other entries after that of the first step.
    assert error < 4 * torch.finfo(dtype).eps * expected.norm()


# Options that say how one method of FusionBench is run.
RULE = {field.name for field in fields(RuleConfig)}
# Our own methods are compared in tests/methods.
BASELINES = [name for name in NAMES if name not in METHODS]


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_made_in_python_has_the_options_of_its_yaml(name):
    written = plain_config(compose_run([f"method=continual/{name}"]).method)
    base = {key: written[key] for key in ("base_method",) if key in written}
    made = import_object(written["_target_"])(
        **{key: DictConfig(value) for key, value in base.items()}
    ).config
    options = written.keys() - {"_target_", "_recursive_", "base_method"} - RULE
    assert {key: made[key] for key in options} == {key: written[key] for key in options}
    own = base.get("base_method", {"_target_": ""})
    if own["_target_"].startswith("fusion_bench_nufilt"):
        defaults = inspect.signature(import_object(own.pop("_target_"))).parameters
        assert {key: defaults[key].default for key in own} == own
