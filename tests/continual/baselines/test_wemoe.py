"""LoRA-WEMoE: its experts, its gates, and the model that holds them."""

import pytest
import torch
from fusion_bench import BaseModelPool
from fusion_bench.method.adamerging.entropy_loss import entropy_loss
from transformers import CLIPVisionConfig, CLIPVisionModel

from fusion_bench_nufilt.continual.baselines import LoRAWEMoE
from fusion_bench_nufilt.continual.baselines.task_data import TaskData
from fusion_bench_nufilt.continual.baselines.wemoe import (
    CLIPVisionModelWithExperts,
    WEMoEConfig,
    mixture_of,
)
from fusion_bench_nufilt.demo import load_vision_model
from tests.continual.baselines.helpers import GLUE, demo_images, on_cpu, same, unchanged
from tests.tiny_models import clip, finetuned, llama, t5

IMAGES = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
TOKENS = torch.arange(2, 20).reshape(3, 6)


def output(model, items=slice(None)):
    with torch.no_grad():
        if model.main_input_name == "pixel_values":
            return model(IMAGES[items]).pooler_output
        return model(input_ids=TOKENS[items], decoder_input_ids=TOKENS[items, :2]).logits


def mixture(base, *tasks, rank=64, batch_reduce=True, level_gates=False, **how):
    made = mixture_of(base, WEMoEConfig(batch_reduce=batch_reduce))
    torch.manual_seed(3)
    for task in tasks:
        made.add_expert(base, task, rank, **how)
    scale = 100  # so that the input matters
    if level_gates:
        scale = 0
    for _, module in made.mixtures():
        module.gate.fc.weight.data *= scale
    return made


@pytest.fixture(params=[clip, t5])
def base(request):
    return request.param()


def test_with_whole_experts_and_level_gates_it_is_task_arithmetic(base):
    tasks = [finetuned(base, seed, scale=0.1) for seed in (1, 2)]
    merged = mixture(base, *tasks, level_gates=True)
    expected = finetuned(base, 0, scale=0)
    for task in tasks:
        for name, theta_0 in base.named_parameters():
            tau = task.get_parameter(name) - theta_0
            expected.get_parameter(name).data += 0.3 * tau.detach()
    torch.testing.assert_close(output(merged), output(expected), rtol=1e-4, atol=1e-5)


def test_it_is_saved_and_loaded_whole(base, tmp_path):
    made = mixture(base, finetuned(base, 1), finetuned(base, 2), rank=4)
    made.save_pretrained(tmp_path)
    loaded = type(made).from_pretrained(tmp_path)
    assert loaded.config.experts == made.config.experts
    assert torch.equal(output(loaded), output(made))
    loaded.add_expert(base, finetuned(base, 3), 2)  # and can take up more


def test_a_new_expert_leaves_the_gate_of_the_others(base):
    made = mixture(base, finetuned(base, 1))
    before = [module.gate.fc.weight.clone() for _, module in made.mixtures()]
    made.add_expert(base, finetuned(base, 2), 64)
    for (_, module), rows in zip(made.mixtures(), before, strict=True):
        assert torch.equal(module.gate.fc.weight[:1], rows)
        assert module.gate.fc.bias.tolist() == pytest.approx([0.3, 0.3])


def test_one_gate_for_a_batch_or_one_for_each_item(base):
    tasks = [finetuned(base, seed, scale=0.3) for seed in (1, 2)]
    for batch_reduce in (False, True):
        made = mixture(base, *tasks, batch_reduce=batch_reduce)
        alone = torch.cat([output(made, slice(i, i + 1)) for i in range(3)])
        assert torch.allclose(output(made), alone, atol=1e-2) is not batch_reduce


@pytest.mark.parametrize(("rule", "millions"), [("paper", 134.7), ("released", 103.7)])
def test_the_rule_of_the_code_has_the_parameters_that_the_paper_prints_for_eight_tasks_on_vit_b_32(
    rule, millions
):
    method = LoRAWEMoE(rule=rule)
    method._mixture = CLIPVisionModelWithExperts
    config = CLIPVisionConfig()
    config.experts = {
        "ranks": list(map(method.expert_rank, range(1, 9))),
        "init_lambda": 0.3,
        "batch_reduce": True,
    }
    with torch.device("meta"):
        base = CLIPVisionModel(config)
        merged = CLIPVisionModelWithExperts(config)
    assert millions_of_parameters(base) == 87.5
    assert millions_of_parameters(merged) == millions


def millions_of_parameters(model):
    return round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1)


def test_the_rule_of_the_code_merges_attention_alone(base):
    task = finetuned(base, 1)
    made = mixture(base, task, rank=3, attention_alone=True)
    changed = set()
    for key, theta_0 in base.named_parameters():
        value = made.get_parameter(key.replace(f".{made.mlp}.", f".{made.mlp}.base_model."))
        if not torch.equal(value, theta_0):
            changed.add(key)
            tau = task.get_parameter(key) - theta_0
            torch.testing.assert_close(value, theta_0 + 0.3 * tau)
    linear_in_attention = set()
    for key, _ in base.named_parameters():
        is_linear = "relative_attention_bias" not in key
        if is_linear and ("self_attn." in key or "Attention." in key):
            linear_in_attention.add(key)
    assert linear_in_attention
    assert changed == linear_in_attention


def test_experts_of_different_ranks_are_weighted_each_by_its_own_gate(base):
    tasks = [finetuned(base, seed, scale=0.1) for seed in (1, 2)]
    made = mixture(base, tasks[0], rank=5)
    made.add_expert(base, tasks[1], 2)
    for name, module in made.mixtures():
        merged = module.merge_weights(torch.tensor([2.0, -1.0]))
        for layer in module.A:
            key = f"{name}.{layer}.weight"
            expected = base.get_parameter(key).detach().clone()
            for task, rank, weight in zip(tasks, (5, 2), (2.0, -1.0), strict=True):
                tau = task.get_parameter(key).detach() - base.get_parameter(key).detach()
                U, S, Vh = torch.linalg.svd(tau, full_matrices=False)
                expected += weight * (U[:, :rank] * S[:rank]) @ Vh[:rank]
            torch.testing.assert_close(merged[f"{layer}.weight"], expected, rtol=1e-3, atol=1e-4)


class Numbers(TaskData):
    logits = None

    def labels(self):
        return [0] * 20 + [1] * 3 + [2] * 9


def test_a_few_items_of_each_class_are_drawn():
    data = Numbers(range(32))
    drawn = next(data.batches(32, per_class=5, seed=1)).tolist()
    labels = sorted(data.labels()[number] for number in drawn)
    assert labels == [0] * 5 + [1] * 3 + [2] * 5
    assert next(data.batches(32, per_class=5, seed=1)).tolist() == drawn
    assert next(data.batches(32, per_class=5, seed=2)).tolist() != drawn
    # The same items again and again.
    batches = data.batches(32, per_class=5, seed=1)
    assert sorted(next(batches)) == sorted(next(batches)) == sorted(drawn)


@pytest.fixture
def images(demo):
    """The demo's task pool and three of its towers."""
    towers = {name: load_vision_model(name) for name in ("_pretrained_", "digits", "shapes")}
    return towers, demo_images()


def texts():
    base = t5()
    models = {"_pretrained_": base, "glue-cola": finetuned(base, 1), "sst2": finetuned(base, 2)}
    return models, GLUE()


def run(models, taskpool, **options):
    algorithm = on_cpu(LoRAWEMoE(shuffle_order=False, rank=4, lr=0.01, **options))
    return algorithm, algorithm.run(models, taskpool)


@pytest.mark.parametrize("kind", ["images", "texts"])
def test_the_gates_alone_are_trained_and_predictions_become_certain(kind, request):
    if kind == "images":
        models, taskpool = request.getfixturevalue("images")
    else:
        models, taskpool = texts()
    with unchanged(models):
        _, start = run(models, taskpool, max_steps=0)
        algorithm, trained = run(models, taskpool, max_steps=8)
    for key, value in trained.state_dict().items():
        assert torch.equal(value, start.state_dict()[key]) is not (".gate." in key), key
    data = algorithm._data[algorithm.matrix.tasks[-1]]
    batch = next(data.batches(1000, per_class=None, seed=0))
    with torch.no_grad():
        before = entropy_loss(data.logits(start, batch))
        after = entropy_loss(data.logits(trained, batch))
    assert after < before
    assert algorithm.matrix.missing == []


def test_the_same_seed_gives_the_same_bits():
    models, taskpool = texts()
    _, one = run(models, taskpool, seed=1, max_steps=2)
    _, again = run(models, taskpool, seed=1, max_steps=2)
    _, other = run(models, taskpool, seed=2, max_steps=2)
    assert same(one, again)
    assert not same(one, other)


def test_what_it_cannot_do_is_refused_before_any_work():
    models, taskpool = texts()
    with pytest.raises(ValueError, match="_merged_"):
        run({**models, "_merged_": models["_pretrained_"]}, taskpool, num_merged=1)
    with pytest.raises(ValueError, match="needs a CLIPVisionModelTaskPool"):
        run(models, None)
    with pytest.raises(ValueError, match=r"data of 'rte'; the task pool has cola, sst2"):
        run({"_pretrained_": models["_pretrained_"], "rte": models["sst2"]}, taskpool)
    with pytest.raises(ValueError, match="LlamaForCausalLM"):
        run(BaseModelPool({"_pretrained_": llama(), "cola": llama()}), taskpool)
