"""FusionBench's pools for GPT-2, and those that need Python 3.12, on tiny checkpoints."""

import json
from functools import partial

import pytest
import torch
from fusion_bench import modelpool
from omegaconf import OmegaConf
from transformers import (
    AutoModel,
    ConvNextImageProcessor,
    GPT2Config,
    GPT2ForSequenceClassification,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm
from tests.families import FAMILIES
from tests.merge.helpers import RANKS
from tests.tiny_models import finetuned


def algorithm(models):
    return NufiltContinualMergingAlgorithm(**RANKS, shuffle_order=False).run(models).state_dict()


@pytest.mark.parametrize("family", ["resnet", "convnext", "dinov2"])
def test_a_pool_gives_what_a_dict_of_models_gives(tmp_path, family):
    prefixes = {"resnet": "ResNet", "convnext": "ConvNext", "dinov2": "Dinov2"}
    name = f"{prefixes[family]}ForImageClassificationPool"
    try:
        pool_class = getattr(modelpool, name)
    except ImportError as error:
        pytest.skip(f"FusionBench can't load {name} on this Python: {error}")
    base = FAMILIES[family]()
    models = {"_pretrained_": base, "one": finetuned(base, 1), "two": finetuned(base, 2)}
    entries = {}
    for task, model in models.items():
        path = tmp_path / task
        model.save_pretrained(path)
        ConvNextImageProcessor().save_pretrained(path)
        entries[task] = {"config_path": str(path), "pretrained": True, "dataset_name": None}
        if family == "convnext":
            entries[task] = str(path)
    options = dict.fromkeys(("train_datasets", "val_datasets", "test_datasets"))
    if family == "resnet":
        options["type"] = "transformers"
    pool = pool_class(models=OmegaConf.create(entries), **options)
    merged = algorithm(pool)
    expected = algorithm(models)
    assert all(torch.equal(value, expected[key]) for key, value in merged.items())


# --- GPT-2 on GLUE ---

COLUMNS = {
    "cola": ["sentence"],
    "mnli": ["premise", "hypothesis"],
    "mrpc": ["sentence1", "sentence2"],
    "qnli": ["question", "sentence"],
    "qqp": ["question1", "question2"],
    "rte": ["sentence1", "sentence2"],
    "sst2": ["sentence"],
}


def gpt2_checkpoints():
    """Return by public name the functions that write tiny checkpoints of `gpt2` and
    `tanganke/gpt2_cola`, … .
    """
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=257, n_embd=16, n_layer=2, n_head=2, n_positions=512, pad_token_id=256
    )
    base = GPT2ForSequenceClassification(config)

    def write_base(folder):
        base.transformer.save_pretrained(folder)
        letters = [*bytes_to_unicode().values(), "<|endoftext|>"]
        vocabulary = {letter: i for i, letter in enumerate(letters)}
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        (folder / "merges.txt").write_text("#version: 0.2\n")

    def write_task(task, seed, folder):
        model = finetuned(base, seed)
        model.config.num_labels = 2
        if task == "mnli":
            model.config.num_labels = 3
        model.score = torch.nn.Linear(16, model.config.num_labels, bias=False)
        model.save_pretrained(folder)

    writers = {"gpt2": write_base}
    for seed, task in enumerate(COLUMNS, 1):
        writers[f"tanganke/gpt2_{task}"] = partial(write_task, task, seed)
    return writers


def build(folder):
    """Write `gpt2`, `tanganke/gpt2_cola`, … and `glue`, each a folder under its public name."""
    for name, write in gpt2_checkpoints().items():
        (folder / name).mkdir(parents=True)
        write(folder / name)
    (folder / "glue").mkdir()
    card = ["---", "configs:"]
    for task, columns in COLUMNS.items():
        split = "validation"
        if task == "mnli":
            split = "validation_matched"
        card += [
            f"- config_name: {task}",
            "  data_files:",
            f"  - {{split: {split}, path: {task}.jsonl}}",
        ]
        lines = []
        for i in range(4):
            row = {**dict.fromkeys(columns, f"Words {i}."), "label": i % 2, "idx": i}
            lines.append(json.dumps(row) + "\n")
        (folder / "glue" / f"{task}.jsonl").write_text("".join(lines))
    (folder / "glue" / "README.md").write_text("\n".join([*card, "---", ""]))


@pytest.mark.slow
def test_gpt2_on_glue_is_merged_and_scored_by_its_task_pool(fusion_bench):
    build(fusion_bench.folder)
    pools = ("modelpool=gpt-2_glue", "taskpool=gpt-2_glue")
    done = fusion_bench("method=nufilt", *pools, "method.null_rank=4", "method.lora_rank=4")
    result = json.loads((fusion_bench.logs / "accuracy_matrix.json").read_text())
    assert sorted(result["tasks"]) == sorted(COLUMNS)
    assert result["missing"] == []
    assert result["BWT"] is not None
    assert "merging 8 layers" in done.stdout + done.stderr
    checkpoint = fusion_bench.logs / "checkpoints" / "merged_model_6"
    manifest = json.loads((checkpoint / "nufilt.json").read_text())
    assert manifest["coverage"]["layers"] == 8
    merged = AutoModel.from_pretrained(checkpoint)
    base = AutoModel.from_pretrained(fusion_bench.folder / "gpt2")
    assert not torch.equal(merged.h[0].attn.c_attn.weight, base.h[0].attn.c_attn.weight)
