"""Torch's default dtype and device are the user's, and no result depends on them."""

import ast
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import fusion_bench_nufilt
from fusion_bench_nufilt.merge.fuse import matrix_jobs
from fusion_bench_nufilt.methods import METHODS, ORDER_FREE
from fusion_bench_nufilt.methods.options import VARIANTS
from fusion_bench_nufilt.nufilt import LowRank
from tests.merge.helpers import hashes, merge, same, save_stream
from tests.methods.helpers import all_of_layers
from tests.nufilt.matrices import matrix_with_spectrum
from tests.tiny_models import llama

DEFAULTS = [(torch.float64, "cpu"), (torch.bfloat16, "meta")]
SMALL = {"null_rank": 6, "lora_rank": 4, "task_rank": 3, "max_steps": 5}
MAKERS = [
    "empty",
    "zeros",
    "ones",
    "full",
    "eye",
    "arange",
    "linspace",
    "tensor",
    "rand",
    "randn",
    "randint",
    "randperm",
]
PACKAGES = ("analysis", "continual", "merge", "methods", "models", "nufilt", "utils")


@contextmanager
def torch_defaults(dtype, device):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


def stream():
    """Two tasks on a wide, a tall and a large layer, and the second of them also as factors."""
    layers = {}
    tasks = [{}, {}, {}]
    for number, shape in enumerate([(24, 40), (40, 24), (256, 256)]):
        name = f"blocks.{number}.weight"
        layers[name] = matrix_with_spectrum(*shape, torch.ones(20), seed=9).float()
        for step in (0, 1):
            spectrum = 0.1 * torch.arange(1, 25, dtype=torch.float64) ** -0.5
            tau = matrix_with_spectrum(*shape, spectrum, seed=10 * number + step).float()
            tasks[step][name] = layers[name] + tau
        tasks[2][name] = LowRank(tau[:, :4].contiguous(), torch.eye(4, shape[1]))
    return layers, tasks


def merged_by(kind, layers, tasks):
    """Return the state and the weight of each layer."""
    options = {key: value for key, value in kind.defaults.items() if hasattr(kind.Options, key)}
    if kind.name not in ORDER_FREE:
        options |= SMALL
    method = kind(kind.Options(**options), list(layers))
    found = {}
    for name, merged in all_of_layers(
        matrix_jobs(method, layers, tasks, device=torch.device("cpu"))
    ).items():
        found |= {f"{name}.{key}": value for key, value in merged.items()}
    return found


@pytest.mark.parametrize("name", [name for name in METHODS if name not in VARIANTS])
def test_no_method_depends_on_them(name):
    layers, tasks = stream()
    expected = merged_by(METHODS[name], layers, tasks)
    for defaults in DEFAULTS:
        with torch_defaults(*defaults):
            found = merged_by(METHODS[name], layers, tasks)
        assert same(found, expected), defaults


@pytest.mark.parametrize("method", ["nufilt", "best"])
def test_no_merge_of_folders_depends_on_them_or_draws_from_the_generator_of_torch(tmp_path, method):
    save_stream(tmp_path, llama(), tasks=2, dtype=torch.bfloat16)
    options = {"method": method, "settings": {"state": True}, "other_params": "mean"}
    before = torch.get_rng_state()
    expected = hashes(merge(tmp_path, ["task1", "task2"], "expected", **options))
    with torch_defaults(torch.bfloat16, "meta"):
        out = merge(tmp_path, ["task1", "task2"], **options)
    assert hashes(out) == expected
    assert torch.equal(torch.get_rng_state(), before)


def test_every_tensor_that_is_made_names_its_dtype_and_its_device():
    package = Path(fusion_bench_nufilt.__file__).parent
    silent = []
    for name in PACKAGES:
        for file in sorted((package / name).glob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                named = {keyword.arg for keyword in node.keywords}
                function = ast.unparse(node.func)
                needs_both = function in {f"torch.{maker}" for maker in MAKERS}
                if (needs_both and not {"dtype", "device"} <= named) or (
                    function == "torch.Generator" and not node.args
                ):
                    silent.append(f"{file.relative_to(package)}:{node.lineno}")
    assert silent == []
