"""NUFILT against its formulas, against reference numbers, and on models of many families."""

import json
import tempfile
import unittest
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from lightning import Fabric
from lightning.fabric.loggers import TensorBoardLogger
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    ConvNextConfig,
    ConvNextModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetModel,
    T5Config,
    T5ForConditionalGeneration,
)

from fusion_bench.constants import PROJECT_ROOT_PATH
from fusion_bench.method import NUFILTMerging
from fusion_bench.method.nufilt import FusionConfig, fuse_layer, fusion, layers, step
from fusion_bench.method.nufilt.layers import select_layers
from fusion_bench.method.nufilt.subspace import top_right_singular_vectors

# of the stream in `test_reference_numbers`, by an implementation that agrees with the
# authors' reference vectors
REFERENCE = {
    "norm of the update": 1.1708987789053829,
    "first weight": 0.09553690339204804,
    "last weight": 0.5887122895581297,
    "loss before": 0.1352386963293633,
    "loss after": 0.13304431056956512,
}
SIZES = dict(
    hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
)
SMALL = dict(null_rank=4, lora_rank=3, task_rank=2, max_steps=5)


def clip():
    return CLIPVisionModel(CLIPVisionConfig(**SIZES, image_size=16, patch_size=8))


def t5():
    sizes = dict(vocab_size=30, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    return T5ForConditionalGeneration(T5Config(**sizes, feed_forward_proj="gated-gelu"))


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=30))


def mixtral():
    experts = dict(num_local_experts=3, num_key_value_heads=2)
    return MixtralForCausalLM(MixtralConfig(**SIZES, **experts, vocab_size=30))


def gpt2():
    sizes = dict(vocab_size=30, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    return GPT2Model(GPT2Config(**sizes))


def resnet():
    return ResNetModel(
        ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 1])
    )


def convnext():
    return ConvNextModel(
        ConvNextConfig(num_stages=2, hidden_sizes=[8, 16], depths=[1, 2])
    )


class OpenCLIP(nn.Module):
    """Named as the vision towers of open_clip are."""

    def __init__(self):
        super().__init__()
        block = nn.Module()
        block.attn = nn.MultiheadAttention(16, 2)
        block.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(16, 32), "c_proj": nn.Linear(32, 16)}
        )
        self.visual = nn.Module()
        self.visual.transformer = nn.Module()
        self.visual.transformer.resblocks = nn.ModuleList([block, deepcopy(block)])


class Odd(nn.Module):
    """Layers that are held in rarer ways: packed experts, and keys of another size."""

    def __init__(self, transposed=True):
        super().__init__()
        shapes = [(3, 12, 8), (3, 8, 6)]
        if transposed:
            shapes = [(3, 8, 12), (3, 6, 8)]
        experts = nn.Module()
        experts.gate_up_proj = nn.Parameter(torch.randn(shapes[0]))
        experts.down_proj = nn.Parameter(torch.randn(shapes[1]))
        moe = nn.Module()
        moe.weight = nn.Parameter(torch.randn(2, 5, 4))
        moe.output_size = 5
        block = nn.Module()
        block.experts = experts
        block.moe = moe
        block.attn = nn.MultiheadAttention(8, 2, kdim=4, vdim=4)
        self.blocks = nn.ModuleList([block])


def random_model(make, seed=0):
    torch.manual_seed(seed)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # some are left at zero
            parameter.copy_(0.1 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def finetuned(model, seed):
    copy = deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in copy.parameters():
        parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return copy


def stream(d_o, d_i, tasks=3, seed=0):
    """A pretrained layer and its fine-tuned versions, in float64."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)
    theta_0 = draw(d_o, d_i)
    return theta_0, list(theta_0 + 0.1 * draw(tasks, d_o, d_i))


def fuse(theta_0, theta, theta_t, config, step=1):
    return fuse_layer("layer", theta_0, theta, theta_t, config, step=step)


def plain_step(theta_0, theta, theta_t, config, A) -> Tensor:
    """A step as the paper has it: full SVD, P formed, the loss as printed, autograd."""
    tau = theta_t - theta_0
    tau_merged = theta - theta_0
    V_p = torch.linalg.svd(tau_merged, full_matrices=False).Vh[: config.null_rank].T
    V_t = torch.linalg.svd(tau, full_matrices=False).Vh[: config.task_rank].T
    P = torch.eye(tau.shape[1], dtype=tau.dtype)
    if config.null_space == "zero":
        P = torch.zeros_like(P)
    elif config.null_space:
        P = P - V_p @ V_p.T
    tau_P = tau @ P
    if not tau_merged.any():  # the first task
        if config.first_task == "paper":
            return theta_t.clone()
        return theta + tau_P
    A = A.clone().requires_grad_()
    B = torch.zeros(tau.shape[1], len(A), dtype=tau.dtype, requires_grad=True)
    T = torch.cat([tau @ V_t, tau_merged @ V_p], dim=1)
    V = torch.cat([V_t, V_p], dim=1)
    adam = torch.optim.Adam([A, B], lr=config.lr)
    for _ in range(config.max_steps):
        M = tau_merged + tau_P + tau @ B @ A
        loss = (T - M @ V).square().sum()
        adam.zero_grad()
        loss.backward()
        adam.step()
    return theta + tau_P + (tau @ B @ A).detach()


class TestStep(unittest.TestCase):
    CONFIG = FusionConfig(null_rank=6, lora_rank=4, task_rank=3, max_steps=20)

    def test_agrees_with_the_formulas(self):
        for d_o, d_i in ((24, 16), (16, 16), (12, 20), (6, 16)):
            for null_space in (True, False, "zero"):
                with self.subTest(d_o=d_o, d_i=d_i, null_space=null_space):
                    config = FusionConfig(
                        **{**vars(self.CONFIG), "null_space": null_space}
                    )
                    theta_0, tasks = stream(d_o, d_i)
                    ours = plain = theta_0
                    for t, theta_t in enumerate(tasks, 1):
                        A = step.initial_A("layer", d_i, config, 42, t).double()
                        ours, _ = fuse(theta_0, ours, theta_t, config, t)
                        plain = plain_step(theta_0, plain, theta_t, config, A)
                        error = (ours - plain).norm() / (theta_t - theta_0).norm()
                        self.assertLess(error, 1e-9)

    def test_reference_numbers(self):
        i = torch.arange(12, dtype=torch.float64)[:, None]
        j = torch.arange(8, dtype=torch.float64)
        merged = theta_0 = torch.sin(i + 3 * j)
        config = FusionConfig(null_rank=3, lora_rank=2, task_rank=2)
        for t in (1, 2, 3):
            theta_t = theta_0 + 0.1 * torch.sin(t * i * j + t)
            A = 0.02 * torch.cos(torch.arange(2, dtype=torch.float64)[:, None] + t * j)
            if t == 1:  # taken whole
                merged = theta_t
                continue
            stack = [each[None] for each in (theta_0, merged, theta_t - theta_0, A)]
            how = dict(is_first_task=False, float64=False)
            (merged,), measures = step.fuse_stack(*stack, config, **how)
        values = {
            "norm of the update": (merged - theta_0).norm(),
            "first weight": merged[0, 0],
            "last weight": merged[-1, -1],
            "loss before": measures["loss_before"],
            "loss after": measures["loss_after"],
        }
        for name, expected in REFERENCE.items():
            self.assertAlmostEqual(
                values[name].item(), expected, delta=1e-9 * abs(expected)
            )

    def test_the_first_model_is_taken_as_it_is(self):
        theta_0, (theta_t, *_) = stream(10, 8)
        merged, _ = fuse(theta_0, theta_0, theta_t, self.CONFIG)
        self.assertTrue(torch.equal(merged, theta_t))

    def test_the_released_run_drops_the_first_coordinates_of_the_first_model(self):
        theta_0, (theta_t, *_) = stream(10, 8)
        config = FusionConfig(null_rank=3, first_task="release")
        merged, measures = fuse(theta_0, theta_0, theta_t, config)
        torch.testing.assert_close(merged[:, :3], theta_0[:, :3])
        torch.testing.assert_close(merged[:, 3:], theta_t[:, 3:])
        self.assertEqual(measures["protected_rank"], 3)

    def test_the_filter_leaves_the_protected_directions_alone(self):
        theta_0, (first, second, _) = stream(10, 8)
        config = FusionConfig(null_rank=3, lora_rank=0)
        merged, _ = fuse(theta_0, first, second, config, step=2)
        V_p = torch.linalg.svd(first - theta_0).Vh[:3].T
        torch.testing.assert_close(
            (merged - first) @ V_p, torch.zeros(10, 3, dtype=torch.float64)
        )

    def test_a_task_that_changed_nothing_changes_nothing(self):
        theta_0, (first, *_) = stream(10, 8)
        merged, measures = fuse(theta_0, first, theta_0, self.CONFIG, step=2)
        self.assertTrue(torch.equal(merged, first))
        self.assertEqual(measures["filtered_share"], 0)

    def test_the_adapter_lowers_the_loss(self):
        theta_0, (first, second, _) = stream(10, 8)
        _, measures = fuse(theta_0, first, second, self.CONFIG, step=2)
        self.assertLess(measures["loss_after"], measures["loss_before"])

    def test_the_number_of_threads_does_not_change_a_bit(self):
        base = random_model(clip)
        pool = {"_pretrained_": base, "a": finetuned(base, 1), "b": finetuned(base, 2)}
        before = torch.get_num_threads()
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(NUFILTMerging(**SMALL).run(pool))
        self.assertEqual(torch.get_num_threads(), 2)
        torch.set_num_threads(before)
        for weight, expected in zip(*(model.parameters() for model in results)):
            self.assertTrue(torch.equal(weight, expected))

    def test_values_out_of_their_range_are_named(self):
        bad = dict(null_rank=-1, lora_rank=1.5, lr=0, null_space="no", first_task="x")
        for name, value in bad.items():
            with self.subTest(name), self.assertRaisesRegex(ValueError, name):
                FusionConfig(**{name: value})


class TestSingularVectors(unittest.TestCase):
    def matrix(self, d_o, d_i, values):
        torch.manual_seed(0)
        U = torch.linalg.qr(torch.randn(d_o, len(values), dtype=torch.float64)).Q
        V = torch.linalg.qr(torch.randn(d_i, len(values), dtype=torch.float64)).Q
        return (U * values @ V.T).float(), V.float()

    def test_few_of_a_large_matrix(self):
        tau, V = self.matrix(300, 280, 0.9 ** torch.arange(100, dtype=torch.float64))
        for X in (tau, tau.T @ tau):
            W = top_right_singular_vectors(X[None], 4)[0]
            torch.testing.assert_close((W.T @ V[:, :4]).abs(), torch.eye(4))

    def test_equal_singular_values_need_the_full_solver(self):
        tau = torch.eye(256)[None]
        W = top_right_singular_vectors(tau, 4)[0]
        torch.testing.assert_close(W.T @ W, torch.eye(4))

    def test_a_steep_spectrum_is_solved_in_float64(self):
        tau, V = self.matrix(40, 30, 10.0 ** -torch.arange(8, dtype=torch.float64))
        theta_0 = torch.zeros_like(tau)
        with self.assertLogs(fusion.log, "WARNING") as logs:
            _, measures = fuse(theta_0, tau, tau.flip(0), FusionConfig(null_rank=6), 2)
        self.assertIn("layer 'layer'", logs.output[0])
        self.assertEqual(measures["protected_rank"], 6)

    def test_a_layer_without_singular_vectors_is_named(self):
        theta_0, (first, second, _) = stream(10, 8)
        failing = torch.linalg.LinAlgError("no convergence")
        with patch.object(step, "top_right_singular_vectors", side_effect=failing):
            with self.assertRaisesRegex(ValueError, "'layer'.*no convergence"):
                fuse(theta_0, first, second, FusionConfig(), step=2)

    def test_a_rank_of_zero_is_no_vector(self):
        V = top_right_singular_vectors(torch.randn(1, 5, 4), 0)
        self.assertEqual(V.shape, (1, 4, 0))


class TestLayers(unittest.TestCase):
    #: numbers of matrices, and of those that are no whole parameter
    COUNTS = {
        clip: (10, 0),
        t5: (36, 0),
        llama: (14, 0),
        gpt2: (8, 0),
        resnet: (11, 0),
        convnext: (7, 0),
        OpenCLIP: (10, 6),
        Odd: (12, 8),
    }

    def test_auto_finds_the_layers_of_every_family(self):
        for make, (count, parts) in self.COUNTS.items():
            with self.subTest(make.__name__):
                model = random_model(make)
                found = select_layers(model)
                self.assertEqual(len(found), count)
                whole = [
                    layer.stored == model.get_parameter(layer.key).shape
                    for layer in found.values()
                ]
                self.assertEqual(whole.count(False), parts)

    def test_mixtral_is_merged_nearly_whole(self):
        model = random_model(mixtral)
        share, in_blocks = layers.merged_shares(model, select_layers(model))
        self.assertGreater(share, 0.9)
        self.assertGreater(in_blocks, 0.98)

    def test_a_layer_maps_its_inputs_to_its_outputs(self):
        x = torch.randn(3, 16)
        model = random_model(gpt2)
        (layer,) = select_layers(model, ["h.0.attn.c_attn"]).values()
        module = model.h[0].attn.c_attn
        torch.testing.assert_close(x @ layer.read(model).T + module.bias, module(x))
        model = random_model(OpenCLIP)
        packed = model.visual.transformer.resblocks[0].attn.in_proj_weight
        layer = select_layers(model)["visual.transformer.resblocks.0.attn.in_proj.k"]
        self.assertTrue(torch.equal(layer.read(model), packed[16:32]))

    def test_what_is_written_is_read_again(self):
        for make in self.COUNTS:
            model = random_model(make)
            for name, layer in select_layers(model).items():
                with self.subTest(make.__name__, layer=name):
                    matrix = torch.randn(layer.shape)
                    layer.write(model, matrix)
                    self.assertTrue(torch.equal(layer.read(model), matrix))

    def test_packed_experts_are_told_apart(self):
        for transposed in (True, False):
            model = random_model(lambda: Odd(transposed))
            found = select_layers(model, ["experts"])
            shapes = {layer.shape for layer in found.values()}
            self.assertEqual(shapes, {(12, 8), (8, 6)})

    def test_layers_are_named_as_people_like(self):
        model = random_model(llama)
        q = {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"}
        self.assertEqual(set(select_layers(model, ["q_proj"])), q)
        self.assertEqual(set(select_layers(model, r".*q_proj")), q)
        every = set(select_layers(model, "all-linear"))
        self.assertNotIn("lm_head", every)
        self.assertEqual(set(select_layers(model, "all-linear", ["q_proj"])), every - q)

    def test_what_can_not_be_merged_is_named(self):
        model = random_model(llama)
        for target in (["q_prj"], ["q_proj", "x"], ["proj"], ["self_attn"]):
            with self.assertRaisesRegex(ValueError, "names no layer"):
                select_layers(model, target)
        with self.assertRaisesRegex(ValueError, "leave no layer"):
            select_layers(model, ["q_proj"], ["q_proj"])
        with self.assertRaisesRegex(ValueError, "knows no layer"):
            select_layers(nn.Linear(3, 3))
        quantised = nn.Linear(3, 3)
        quantised.weight = nn.Parameter(torch.zeros(9, dtype=torch.uint8), False)
        with self.assertRaisesRegex(ValueError, "quantised"):
            select_layers(nn.Sequential(quantised))

    def test_a_weight_that_modules_share_comes_once(self):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        self.assertEqual(list(select_layers(model, "all-linear")), ["0"])


class TestModels(unittest.TestCase):
    def merge(self, make, **options):
        base = random_model(make)
        pool = {f"task_{i}": finetuned(base, i) for i in range(3)}
        merged = NUFILTMerging(**{**SMALL, **options}).run(
            {"_pretrained_": base, **pool}
        )
        return base, list(pool.values()), merged

    def test_one_class_merges_the_layers_of_every_family_and_leaves_the_rest(self):
        for make in (*TestLayers.COUNTS, mixtral):
            with self.subTest(make.__name__):
                base, _, merged = self.merge(make)
                keys = {layer.key for layer in select_layers(base).values()}
                for key, value in base.state_dict().items():
                    same = torch.equal(value, merged.state_dict()[key])
                    self.assertEqual(same, key not in keys, key)

    def test_other_parameters_are_averaged_or_the_first_tasks(self):
        options = dict(shuffle_order=False, target_modules=["in_proj.q", "c_fc"])
        key = "visual.transformer.resblocks.0.attn.in_proj_weight"
        _, tasks, merged = self.merge(OpenCLIP, other_params="mean", **options)
        mean = sum(task.state_dict()[key] for task in tasks) / 3
        value = merged.state_dict()[key]
        torch.testing.assert_close(value[16:], mean[16:])  # k and v; q is merged
        self.assertGreater((value[:16] - mean[:16]).norm(), 0.01)
        _, tasks, merged = self.merge(OpenCLIP, other_params="first", **options)
        key = "visual.transformer.resblocks.0.attn.out_proj.weight"
        self.assertTrue(
            torch.equal(merged.state_dict()[key], tasks[0].state_dict()[key])
        )

    def test_a_seed_is_an_order_and_a_result(self):
        vectors = []
        for seed in (7, 7, 8):
            _, _, merged = self.merge(clip, seed=seed)
            vectors.append(nn.utils.parameters_to_vector(merged.parameters()))
        one, again, other = vectors
        self.assertTrue(torch.equal(one, again))
        self.assertFalse(torch.equal(one, other))

    def test_bfloat16_stays_bfloat16(self):
        base = random_model(llama).to(torch.bfloat16)
        merged = NUFILTMerging(max_steps=2).run(
            {"_pretrained_": base, "a": finetuned(base, 1), "b": finetuned(base, 2)}
        )
        self.assertEqual(
            {parameter.dtype for parameter in merged.parameters()}, {torch.bfloat16}
        )

    def test_a_model_that_does_not_fit_is_named(self):
        base = random_model(llama)
        broken = finetuned(base, 1)
        broken.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
        other = random_model(clip)
        for model, what in ((broken, "layers.1.mlp.up_proj"), (other, "got nothing")):
            with self.assertRaisesRegex(ValueError, f"'bad'.*{what}"):
                NUFILTMerging().run({"_pretrained_": base, "bad": model})

    def test_a_small_share_is_a_warning(self):
        model = nn.Module()
        model.vision = random_model(clip)
        model.text = nn.ModuleList([nn.ModuleDict({"odd": nn.Bilinear(40, 40, 40)})])
        with self.assertLogs("fusion_bench.method.nufilt", "WARNING") as logs:
            NUFILTMerging(**SMALL).run(
                {"_pretrained_": model, "a": finetuned(model, 1)}
            )
        self.assertIn("of those in blocks", logs.output[0])


class TestOptions(unittest.TestCase):
    def test_attributes_are_read_at_run_time(self):
        base = random_model(clip)
        pool = {"_pretrained_": base, "a": finetuned(base, 1), "b": finetuned(base, 2)}
        expected = NUFILTMerging(**{**SMALL, "null_rank": 9}).run(pool)
        algorithm = NUFILTMerging(**SMALL)
        algorithm.null_rank = 9
        self.assertEqual(algorithm.config.null_rank, 9)
        for a, b in zip(algorithm.run(pool).parameters(), expected.parameters()):
            self.assertTrue(torch.equal(a, b))

    def test_the_names_of_the_release_are_understood(self):
        names = dict(lora_r=1, null_r=2, grad_r=3, lora_layer=["q_proj"])
        with self.assertLogs("fusion_bench.method.nufilt", "WARNING") as logs:
            config = NUFILTMerging(**names).config
        self.assertIn("'lora_r' is called 'lora_rank' here", "".join(logs.output))
        self.assertEqual(
            (config.lora_rank, config.null_rank, config.task_rank), (1, 2, 3)
        )
        self.assertEqual(config.target_modules, ["q_proj"])

    def test_a_value_out_of_its_range_is_named(self):
        for name, value in {"null_rank": -1, "other_params": "none"}.items():
            with self.subTest(name), self.assertRaisesRegex(ValueError, name):
                NUFILTMerging(**{name: value})

    def test_the_config_has_every_option(self):
        folder = Path(PROJECT_ROOT_PATH) / "fusion_bench_config" / "method" / "nufilt"
        config = OmegaConf.to_container(OmegaConf.load(folder / "nufilt.yaml"))
        self.assertEqual(config.pop("_target_"), "fusion_bench.method.NUFILTMerging")
        self.assertTrue(config.pop("evaluate_on_every_step"))  # as OPCM's and DOP's
        defaults = OmegaConf.to_container(NUFILTMerging().config)
        self.assertFalse(defaults.pop("evaluate_on_every_step"))
        defaults = {key: x for key, x in defaults.items() if not key.startswith("_")}
        self.assertEqual(config, defaults)


class ImagePool:
    """A stand-in for CLIPVisionModelTaskPool, which is set up anew for each step."""

    def __init__(self):
        self._is_setup = True
        self._test_datasets = DictConfig({"b": 2, "a": 1, "c": 3})

    def evaluate(self, model):
        return {"tasks": list(self._test_datasets), "anew": not self._is_setup}


class TextPool:
    """A stand-in for FlanT5GLUETextGenerationTaskPool."""

    _all_task_names = ["b", "a", "c"]

    def evaluate(self, model):
        return {"tasks": list(self._all_task_names)}


class TestRun(unittest.TestCase):
    def run_with(self, taskpool, base, folder):
        names = ("a", "b")
        if isinstance(taskpool, TextPool):
            names = ("glue-a", "b")
        models = {name: finetuned(base, i) for i, name in enumerate(names)}
        algorithm = NUFILTMerging(
            **SMALL, shuffle_order=False, evaluate_on_every_step=True
        )
        algorithm._program = SimpleNamespace(taskpool=taskpool)
        logger = TensorBoardLogger(folder, name="", version="")
        algorithm.fabric = Fabric(accelerator="cpu", devices=1, loggers=logger)
        merged = algorithm.run({"_pretrained_": base, **models})
        logger.finalize("success")  # its thread writes into the folder until then
        return merged

    def test_what_a_run_leaves_behind(self):
        with tempfile.TemporaryDirectory() as folder:
            taskpool = ImagePool()
            merged = self.run_with(taskpool, random_model(clip), folder)
            read = lambda name: json.loads((Path(folder) / name).read_text())
            self.assertEqual(read("model_names.json"), ["a", "b"])
            self.assertEqual(read("report_0.json"), {"tasks": ["a"], "anew": True})
            self.assertEqual(read("report_1.json"), {"tasks": ["a", "b"], "anew": True})
            self.assertEqual(len(read("layers_1.json")), 10)
            saved = CLIPVisionModel.from_pretrained(
                Path(folder) / "checkpoints" / "merged_model_1"
            )
            for a, b in zip(saved.parameters(), merged.parameters()):
                self.assertTrue(torch.equal(a, b))
        self.assertEqual(set(taskpool._test_datasets), {"a", "b", "c"})

    def test_text_tasks_are_those_seen_and_any_other_pool_is_asked_for_all(self):
        other = SimpleNamespace(evaluate=lambda model: {"tasks": "all"})
        for taskpool, reports in (
            (TextPool(), (["a"], ["b", "a"])),
            (other, ("all",) * 2),
        ):
            with tempfile.TemporaryDirectory() as folder:
                self.run_with(taskpool, random_model(t5), folder)
                for step, tasks in enumerate(reports):
                    report = (Path(folder) / f"report_{step}.json").read_text()
                    self.assertEqual(json.loads(report), {"tasks": tasks})

    def test_a_model_without_save_pretrained_is_saved_as_a_state_dict(self):
        with tempfile.TemporaryDirectory() as folder:
            taskpool = SimpleNamespace(evaluate=lambda model: {})
            merged = self.run_with(taskpool, random_model(OpenCLIP), folder)
            state = torch.load(Path(folder) / "checkpoints" / "merged_model_1.pt")
            for key, value in merged.state_dict().items():
                self.assertTrue(torch.equal(state[key], value))

    def test_a_device_without_an_eigenvalue_solver_is_replaced_by_the_cpu(self):
        base = random_model(clip)
        algorithm = NUFILTMerging(**SMALL)
        mps = dict(device=torch.device("mps"), _loggers=[], log=lambda *_, **__: None)
        algorithm.fabric = SimpleNamespace(**mps, is_global_zero=True)
        with self.assertLogs("fusion_bench.method.nufilt", "WARNING") as logs:
            algorithm.run({"_pretrained_": base, "a": finetuned(base, 1)})
        self.assertIn("mps has no eigenvalue solver", logs.output[0])


if __name__ == "__main__":
    unittest.main()
