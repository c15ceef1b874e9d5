"""GPT-2 on GLUE with FusionBench's own pools, on tiny checkpoints under their public names in the current folder."""

import json

import pytest
import torch
from transformers import AutoModel, GPT2Config, GPT2ForSequenceClassification
from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode

from tests.models import finetuned

COLUMNS = {
    "cola": ["sentence"],
    "mnli": ["premise", "hypothesis"],
    "mrpc": ["sentence1", "sentence2"],
    "qnli": ["question", "sentence"],
    "qqp": ["question1", "question2"],
    "rte": ["sentence1", "sentence2"],
    "sst2": ["sentence"],
}


def build(folder):
    """`gpt2`, `tanganke/gpt2_cola`, … and `glue`, each a folder."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=257, n_embd=16, n_layer=2, n_head=2, n_positions=512, pad_token_id=256)
    base = GPT2ForSequenceClassification(config)
    base.transformer.save_pretrained(folder / "gpt2")
    letters = [*bytes_to_unicode().values(), "<|endoftext|>"]
    (folder / "gpt2" / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate(letters)}))
    (folder / "gpt2" / "merges.txt").write_text("#version: 0.2\n")
    (folder / "glue").mkdir()
    card = ["---", "configs:"]
    for seed, (task, columns) in enumerate(COLUMNS.items(), 1):
        model = finetuned(base, seed)
        model.config.num_labels = 3 if task == "mnli" else 2
        model.score = torch.nn.Linear(16, model.config.num_labels, bias=False)
        model.save_pretrained(folder / "tanganke" / f"gpt2_{task}")
        split = "validation_matched" if task == "mnli" else "validation"
        card += [f"- config_name: {task}", "  data_files:", f"  - {{split: {split}, path: {task}.jsonl}}"]
        rows = [{**dict.fromkeys(columns, f"Words {i}."), "label": i % 2, "idx": i} for i in range(4)]
        (folder / "glue" / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "glue" / "README.md").write_text("\n".join([*card, "---", ""]))


@pytest.mark.slow
def test_gpt2_on_glue_is_merged_and_scored_by_the_task_pool_of_the_same_name(fusion_bench):
    build(fusion_bench.folder)
    done = fusion_bench("method=nufilt", "modelpool=gpt-2_glue", "method.null_rank=4", "method.lora_rank=4")
    result = json.loads((fusion_bench.logs / "accuracy_matrix.json").read_text())
    assert sorted(result["tasks"]) == sorted(COLUMNS)
    assert result["missing"] == []
    assert result["BWT"] is not None
    assert "merging 8 layers" in done.stdout + done.stderr
    manifest = json.loads((fusion_bench.logs / "checkpoints" / "merged_model_6" / "nufilt.json").read_text())
    assert manifest["coverage"]["layers"] == 8
    merged = AutoModel.from_pretrained(fusion_bench.logs / "checkpoints" / "merged_model_6")
    base = AutoModel.from_pretrained(fusion_bench.folder / "gpt2")
    assert not torch.equal(merged.h[0].attn.c_attn.weight, base.h[0].attn.c_attn.weight)
