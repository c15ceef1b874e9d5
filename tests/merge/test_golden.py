"""Merges of several kinds give what they gave when these numbers were written.

``python -m tests.merge.test_golden`` writes them anew, and ``python -m tests.merge.test_golden
FILE`` the digests of all tensors to a file, which decide about bits on one machine.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.classifiers import KINDS, labels
from tests.families import FAMILIES
from tests.merge.helpers import algorithm, merge, save_stream, tensors
from tests.models.test_mxfp4 import quantise
from tests.models.test_vocabulary import save
from tests.tiny_models import llama

GOLDEN = Path(__file__).with_name("golden.json")


def random_weights(model, seed, scale=0.05):
    """A model whose weights depend on the seed and their names alone, whatever made it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def changed(model, base, seed):
    """A model with the base's weights and a small change of each."""
    base_weights = dict(base.named_parameters())
    with torch.no_grad():
        random_weights(model, seed, scale=0.002)
        for name, parameter in model.named_parameters():
            if name in base_weights:
                parameter += base_weights[name]
    return model


def several_kinds(folder):
    """A full model, an adapter and a model with tokens of its own, by NUFILT."""
    base = random_weights(llama(), 0)
    save(folder / "base", base)
    save(folder / "task1", changed(llama(), base, 1))
    config = LoraConfig(r=4, target_modules="all-linear")
    adapter = get_peft_model(random_weights(llama(), 0), config)
    random_weights(adapter, 2).save_pretrained(folder / "task2")
    save(folder / "task3", changed(llama(), base, 3), "<new>", rows=52)
    options = {"target_modules": "all-linear", "other_params": "mean"}
    return folder / "base", merge(folder, **options)


def heads(folder):
    """Classifiers with heads of their own."""
    kind, config, backbone, classes, _ = KINDS["bert"]
    base = random_weights(backbone(config), 0)
    base.save_pretrained(folder / "base")
    for number, (task, count) in enumerate(classes.items()):
        names = labels([str(label) for label in range(count)])
        task_config = kind.config_class(**{**config.to_dict(), **names})
        model = random_weights(kind(task_config), number, 0.002)
        with torch.no_grad():
            for parameter, start in zip(model.bert.parameters(), base.parameters(), strict=False):
                parameter += start
        model.save_pretrained(folder / task)
    return folder / "base", merge(folder, list(classes), method="spectral")


def experts(folder):
    """A model whose experts are stored in MXFP4."""
    base = random_weights(FAMILIES["gpt_oss"](), 0).to(torch.bfloat16)
    save_stream(folder, base, tasks=0, dtype=torch.bfloat16)
    for number in (1, 2):
        task = changed(FAMILIES["gpt_oss"](), base.float(), number)
        task.to(torch.bfloat16).save_pretrained(folder / f"task{number}")
    quantise(folder / "base")
    quantise(folder / "task1")
    return folder / "base_wide", merge(folder, ["task1", "task2"], other_params="mean")


def two_goes(folder):
    """An order-free merge, and one more task into its result."""
    base = random_weights(llama(), 0)
    base.save_pretrained(folder / "base")
    for number in (1, 2, 3):
        changed(llama(), base, number).save_pretrained(folder / f"task{number}")
    merge(folder, ["task1", "task2"], "so_far", method="best", other_params="mean")
    options = {"method": "best", "other_params": "mean"}
    return folder / "base", merge(folder, ["task3"], merged="so_far", **options)


def in_memory(folder):
    """Loaded models, by FusionBench's algorithm."""
    base = random_weights(llama(), 0)
    base.save_pretrained(folder / "base")
    models = {f"task{number}": changed(llama(), base, number) for number in (1, 2, 3)}
    algorithm({"_pretrained_": base, **models}, other_params="mean").save_pretrained(folder / "out")
    return folder / "base", folder / "out"


MERGES = [several_kinds, heads, experts, two_goes, in_memory]


def measure(base, out):
    """The norm of each tensor's update, and its product with a fixed vector of norm 1."""
    before = tensors(base)
    measures = {}
    for key, value in tensors(out).items():
        update = value.double()
        if key in before and before[key].shape == value.shape:
            update = update - before[key].double()
        direction = torch.cos(torch.arange(update.numel(), dtype=torch.float64))
        product = update.flatten() @ (direction / direction.norm())
        measures[key] = [update.norm().item(), product.item()]
    return measures


@pytest.mark.parametrize("kind", MERGES)
def test_a_merge_gives_what_it_gave(tmp_path, kind):
    golden = json.loads(GOLDEN.read_text())[kind.__name__]
    measures = measure(*kind(tmp_path))
    assert measures.keys() == golden.keys()
    for key, (norm, product) in golden.items():
        tolerance = 1e-3 * norm + 1e-9  # other processors round otherwise
        assert measures[key] == pytest.approx([norm, product], abs=tolerance), key


def digest(value):
    """The SHA-256 of a tensor's bytes."""
    return hashlib.sha256(value.contiguous().flatten().view(torch.uint8).numpy()).hexdigest()


def rounded(norm, product):
    """To six digits, as the file has them."""
    return [float(f"{norm:.6g}"), float(f"{product:.6g}")]


def main():
    golden = {}
    digests = {}
    for kind in MERGES:
        with tempfile.TemporaryDirectory() as folder:
            base, out = kind(Path(folder))
            measures = measure(base, out)
            golden[kind.__name__] = {key: rounded(*pair) for key, pair in measures.items()}
            digests[kind.__name__] = {key: digest(value) for key, value in tensors(out).items()}
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(digests, indent=1))
    else:
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
