"""NUFILT against its formulas, computed word for word, and on models."""

import json
import tempfile
import unittest
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import torch
from lightning import Fabric
from lightning.fabric.loggers import TensorBoardLogger
from omegaconf import OmegaConf
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    T5Config,
    T5ForConditionalGeneration,
)

from fusion_bench.constants import PROJECT_ROOT_PATH
from fusion_bench.method import NUFILTMerging
from fusion_bench.method.nufilt import StepConfig, fuse_layer, select_layers
from fusion_bench.method.nufilt.step import initial_A

SMALL = dict(null_rank=4, lora_rank=3, task_rank=2, max_steps=5)


def clip() -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, image_size=16, patch_size=8)
    config = CLIPVisionConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)
    return CLIPVisionModel(config)


def t5() -> nn.Module:
    sizes = dict(vocab_size=30, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    return T5ForConditionalGeneration(T5Config(**sizes, feed_forward_proj="gated-gelu"))


@torch.no_grad()
def finetuned(model: nn.Module, seed: int) -> nn.Module:
    copy = deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in copy.parameters():
        parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return copy


def plain_step(theta_0, theta, theta_t, config, A) -> Tensor:
    """A step as the paper has it: full SVD, P formed, the loss as printed, autograd."""
    tau = theta_t - theta_0
    tau_merged = theta - theta_0
    if not tau_merged.any():
        return theta_t
    V_p = torch.linalg.svd(tau_merged, full_matrices=False).Vh[: config.null_rank].T
    V_t = torch.linalg.svd(tau, full_matrices=False).Vh[: config.task_rank].T
    P = torch.eye(tau.shape[1], dtype=tau.dtype)
    if config.null_space == "zero":
        P = torch.zeros_like(P)
    elif config.null_space:
        P = P - V_p @ V_p.T
    A = A.clone().requires_grad_()
    B = torch.zeros(tau.shape[1], len(A), dtype=tau.dtype, requires_grad=True)
    T = torch.cat([tau @ V_t, tau_merged @ V_p], dim=1)
    V = torch.cat([V_t, V_p], dim=1)
    adam = torch.optim.Adam([A, B], lr=config.lr)
    for _ in range(config.max_steps):
        M = tau_merged + tau @ P + tau @ B @ A
        loss = (T - M @ V).square().sum()
        adam.zero_grad()
        loss.backward()
        adam.step()
    return theta + tau @ (P + B @ A).detach()


class TestNUFILT(unittest.TestCase):
    def merge(self, base: nn.Module, **options) -> nn.Module:
        models = dict(_pretrained_=base, a=finetuned(base, 1), b=finetuned(base, 2))
        return NUFILTMerging(**{**SMALL, **options}).run(models)

    def test_steps_agree_with_the_formulas(self):
        for shape in ((24, 16), (16, 16), (6, 16)):
            for null_space in (True, False, "zero"):
                ranks = dict(null_rank=6, lora_rank=4, task_rank=3, max_steps=20)
                config = StepConfig(**ranks, null_space=null_space)
                generator = torch.Generator().manual_seed(0)
                draw = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
                theta_0 = merged = expected = draw[0]
                for step in (1, 2, 3):
                    theta_t = theta_0 + 0.1 * draw[step]
                    A = initial_A("layer", shape[1], config, 42, step).double()
                    weights = (theta_0, merged, theta_t)
                    merged, _ = fuse_layer("layer", *weights, config, step=step)
                    expected = plain_step(theta_0, expected, theta_t, config, A)
                    error = (merged - expected).norm() / (theta_t - theta_0).norm()
                    self.assertLess(error, 1e-9, (shape, null_space, step))

    def test_the_chosen_layers_are_merged_and_the_rest_is_left(self):
        for base, target, count in ((clip(), "auto", 10), (t5(), "auto", 36)):
            layers = select_layers(base, target)
            self.assertEqual(len(layers), count)
            merged = self.merge(base, target_modules=target).state_dict()
            for key, value in base.state_dict().items():
                is_layer = key.removesuffix(".weight") in layers
                self.assertEqual(torch.equal(value, merged[key]), not is_layer, key)

    def test_layers_that_are_not_there_are_named(self):
        self.assertEqual(len(select_layers(t5(), ["q", "wo"])), 2 * 2 + 2 * 3)
        for target, text in ((["q_prj"], "'q_prj'"), ("x", "'x'"), ("auto", "Linear")):
            with self.assertRaisesRegex(ValueError, text):
                select_layers(nn.Linear(3, 3), target)

    def test_a_seed_is_an_order_and_a_result_for_any_number_of_threads(self):
        threads = torch.get_num_threads()
        merged = []
        for seed, count in ((7, 1), (7, 2), (8, 1)):
            torch.set_num_threads(count)
            model = self.merge(clip(), seed=seed)
            merged.append(nn.utils.parameters_to_vector(model.parameters()))
        torch.set_num_threads(threads)
        self.assertTrue(torch.equal(merged[0], merged[1]))
        self.assertFalse(torch.equal(merged[0], merged[2]))

    def test_a_model_that_does_not_fit_is_named(self):
        broken = finetuned(clip(), 1)
        name = next(iter(select_layers(broken)))
        broken.get_submodule(name).weight.data[0, 0] = float("nan")
        for model, text in ((broken, f"{name}' has NaN"), (t5(), "got None")):
            with self.assertRaisesRegex(ValueError, f"'bad'.*{text}"):
                NUFILTMerging().run({"_pretrained_": clip(), "bad": model})

    def test_options_are_those_of_the_configuration_and_are_checked(self):
        folder = Path(PROJECT_ROOT_PATH) / "fusion_bench_config" / "method" / "nufilt"
        config = OmegaConf.to_container(OmegaConf.load(folder / "nufilt.yaml"))
        config.pop("_target_")
        defaults = OmegaConf.to_container(NUFILTMerging().config)
        self.assertEqual(config, {key: defaults[key] for key in config})
        with self.assertRaisesRegex(ValueError, "null_rank"):
            NUFILTMerging(null_rank=-1)

    def test_what_a_run_leaves_behind(self):
        algorithm = NUFILTMerging(**SMALL, shuffle_order=False)
        evaluate = lambda model: {"type": type(model).__name__}
        taskpool = SimpleNamespace(evaluate=evaluate)
        algorithm._program = SimpleNamespace(taskpool=taskpool)
        base = clip()
        with tempfile.TemporaryDirectory() as folder:
            logger = TensorBoardLogger(folder, name="", version="")
            algorithm.fabric = Fabric(accelerator="cpu", devices=1, loggers=logger)
            algorithm.run({"_pretrained_": base, "a": finetuned(base, 1)})
            logger.finalize("success")  # its thread writes into the folder until then
            read = lambda name: json.loads((Path(folder) / name).read_text())
            self.assertEqual(read("model_names.json"), ["a"])
            self.assertEqual(read("report_0.json"), {"type": "CLIPVisionModel"})
            self.assertEqual(len(read("layers_0.json")), 10)
            CLIPVisionModel.from_pretrained(f"{folder}/checkpoints/merged_model_0")


if __name__ == "__main__":
    unittest.main()
