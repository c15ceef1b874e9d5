"""NUFILT against its formulas, against reference numbers, and on models of three families."""

import tempfile
import unittest
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import torch
from lightning import Fabric
from lightning.fabric.loggers import TensorBoardLogger
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from fusion_bench.constants import PROJECT_ROOT_PATH
from fusion_bench.method import NUFILTMerging
from fusion_bench.method.nufilt import FusionConfig, fuse_layers
from fusion_bench.method.nufilt.layers.selection import select_layers

# here comes `plain_step`, the formulas word for word

# of the stream in `test_reference_numbers`, by an implementation that agrees with the authors' reference vectors
REFERENCE = {
    "norm of the update": 1.1708987789053829,
    "first weight": 0.09553690339204804,
    "last weight": 0.5887122895581297,
    "loss before": 0.1352386963293633,
    "loss after": 0.13304431056956512,
}
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def clip():
    return CLIPVisionModel(CLIPVisionConfig(**SIZES, image_size=16, patch_size=8))


def t5():
    sizes = {
        "vocab_size": 30,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
    }
    return T5ForConditionalGeneration(T5Config(**sizes, feed_forward_proj="gated-gelu"))


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=30))


def random_model(make, seed=0):
    torch.manual_seed(seed)
    return make().eval()


@torch.no_grad()
def finetuned(model, seed):
    copy, generator = deepcopy(model), torch.Generator().manual_seed(seed)
    for parameter in copy.parameters():
        parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return copy


def stream(d_o, d_i, tasks=3, seed=0):
    """A pretrained layer and its fine-tuned versions, in float64."""
    generator = torch.Generator().manual_seed(seed)
    theta_0 = torch.randn(d_o, d_i, generator=generator, dtype=torch.float64)
    update = 0.1 * torch.randn(
        tasks, d_o, d_i, generator=generator, dtype=torch.float64
    )
    return theta_0, list(theta_0 + update)


def fuse(theta_0, theta, theta_t, config, lora_A=None, step=1):
    one = lambda weight: {"layer": weight}  # noqa: E731
    A = None if lora_A is None else one(lora_A)
    weights, reports = fuse_layers(
        one(theta_0), one(theta), one(theta_t), config, step=step, lora_A=A
    )
    return weights["layer"], reports["layer"]


class TestStep(unittest.TestCase):
    CONFIG = FusionConfig(null_rank=6, lora_rank=4, task_rank=3, max_steps=20)

    def test_agrees_with_the_formulas(self):
        for d_o, d_i in ((24, 16), (16, 16), (12, 20)):
            for null_space in (True, False, "zero"):
                with self.subTest(d_o=d_o, d_i=d_i, null_space=null_space):
                    config = FusionConfig(
                        null_rank=6,
                        lora_rank=4,
                        task_rank=3,
                        max_steps=20,
                        null_space=null_space,
                    )
                    theta_0, tasks = stream(d_o, d_i)
                    ours = plain = theta_0
                    for step, theta_t in enumerate(tasks, 1):
                        generator = torch.Generator().manual_seed(step)
                        A = 0.02 * torch.randn(
                            4, d_i, generator=generator, dtype=torch.float64
                        )
                        ours, _ = fuse(theta_0, ours, theta_t, config, A, step)
                        plain = plain_step(theta_0, plain, theta_t, config, A)
                        self.assertLess(
                            (ours - plain).norm() / (theta_t - theta_0).norm(), 1e-9
                        )

    def test_reference_numbers(self):
        i, j = torch.arange(12, dtype=torch.float64)[:, None], torch.arange(
            8, dtype=torch.float64
        )
        theta_0 = torch.sin(i + 3 * j)
        merged = theta_0
        config = FusionConfig(null_rank=3, lora_rank=2, task_rank=2)
        for t in (1, 2, 3):
            theta_t = theta_0 + 0.1 * torch.sin(t * i * j + t)
            A = 0.02 * torch.cos(torch.arange(2, dtype=torch.float64)[:, None] + t * j)
            merged, report = fuse(theta_0, merged, theta_t, config, A, t)
        for number, expected in REFERENCE.items():
            with self.subTest(number):
                value = {
                    "norm of the update": (merged - theta_0).norm().item(),
                    "first weight": merged[0, 0].item(),
                    "last weight": merged[-1, -1].item(),
                    "loss before": report.loss_before,
                    "loss after": report.loss_after,
                }[number]
                self.assertAlmostEqual(value, expected, delta=1e-9 * abs(expected))

    def test_the_first_model_is_taken_as_it_is(self):
        theta_0, (theta_t, *_) = stream(10, 8)
        self.assertTrue(
            torch.equal(fuse(theta_0, theta_0, theta_t, self.CONFIG)[0], theta_t)
        )

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
        self.assertTrue(
            torch.equal(fuse(theta_0, first, theta_0, self.CONFIG, step=2)[0], first)
        )

    def test_the_adapter_lowers_the_loss(self):
        theta_0, (first, second, _) = stream(10, 8)
        _, report = fuse(theta_0, first, second, self.CONFIG, step=2)
        self.assertLess(report.loss_after, report.loss_before)


class TestModels(unittest.TestCase):
    LAYERS = {clip: 2 * 5, t5: 2 * 7 + 2 * 11, llama: 2 * 7}

    def merge(self, make, **options):
        base = random_model(make)
        pool = {
            "_pretrained_": base,
            **{f"task_{i}": finetuned(base, i) for i in range(3)},
        }
        options = {
            "null_rank": 4,
            "lora_rank": 3,
            "task_rank": 2,
            "max_steps": 5,
            **options,
        }
        return base, NUFILTMerging(**options).run(pool)

    def test_one_class_merges_the_layers_of_every_family_and_leaves_the_rest(self):
        for make, count in self.LAYERS.items():
            with self.subTest(make.__name__):
                base, merged = self.merge(make)
                layers = {view.key for view in select_layers(base).values()}
                self.assertEqual(len(layers), count)
                for key, value in base.state_dict().items():
                    self.assertEqual(
                        torch.equal(value, merged.state_dict()[key]),
                        key not in layers,
                        key,
                    )

    def test_a_seed_is_an_order_and_a_result(self):
        _, merged = self.merge(clip, seed=7)
        _, again = self.merge(clip, seed=7)
        _, other = self.merge(clip, seed=8)
        same = [
            torch.equal(a, b) for a, b in zip(merged.parameters(), again.parameters())
        ]
        self.assertTrue(all(same))
        same = [
            torch.equal(a, b) for a, b in zip(merged.parameters(), other.parameters())
        ]
        self.assertFalse(all(same))

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
        with self.assertRaisesRegex(ValueError, "broken.*layers.1.mlp.up_proj"):
            NUFILTMerging().run({"_pretrained_": base, "broken": broken})

    def test_an_option_out_of_its_range_is_named(self):
        with self.assertRaisesRegex(ValueError, "null_rank"):
            NUFILTMerging(null_rank=-1)


class Pool:
    """A stand-in for CLIPVisionModelTaskPool, which is set up anew for the tasks of each step."""

    def __init__(self):
        self._is_setup, self._test_datasets = True, DictConfig({"b": 2, "a": 1, "c": 3})

    def evaluate(self, model):
        return {"tasks": list(self._test_datasets), "anew": not self._is_setup}


class TestRun(unittest.TestCase):
    def test_what_a_run_leaves_behind(self):
        base = random_model(clip)
        models = {
            "_pretrained_": base,
            "a": finetuned(base, 1),
            "b": finetuned(base, 2),
        }
        algorithm = NUFILTMerging(
            shuffle_order=False, evaluate_on_every_step=True, max_steps=2
        )
        algorithm._program = SimpleNamespace(taskpool=Pool())
        with tempfile.TemporaryDirectory() as folder:
            logger = TensorBoardLogger(folder, name="", version="")
            algorithm.fabric = Fabric(accelerator="cpu", devices=1, loggers=logger)
            merged = algorithm.run(models)
            read = lambda name: OmegaConf.to_container(
                OmegaConf.load(Path(folder) / name)
            )  # noqa: E731
            self.assertEqual(read("model_names.json"), ["a", "b"])
            self.assertEqual(read("report_0.json"), {"tasks": ["a"], "anew": True})
            self.assertEqual(read("report_1.json"), {"tasks": ["a", "b"], "anew": True})
            self.assertEqual(len(read("layers_1.json")), 10)
            saved = CLIPVisionModel.from_pretrained(
                Path(folder) / "checkpoints" / "merged_model_1"
            )
            for a, b in zip(saved.parameters(), merged.parameters()):
                self.assertTrue(torch.equal(a, b))
        self.assertEqual(
            set(algorithm._program.taskpool._test_datasets), {"a", "b", "c"}
        )

    def test_the_config_has_every_option_with_its_default(self):
        file = (
            Path(PROJECT_ROOT_PATH)
            / "fusion_bench_config"
            / "method"
            / "nufilt"
            / "nufilt.yaml"
        )
        config = OmegaConf.to_container(OmegaConf.load(file))
        self.assertEqual(config.pop("_target_"), "fusion_bench.method.NUFILTMerging")
        defaults = OmegaConf.to_container(NUFILTMerging().config)
        self.assertEqual(
            config,
            {key: value for key, value in defaults.items() if not key.startswith("_")},
        )


if __name__ == "__main__":
    unittest.main()
