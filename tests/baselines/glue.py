"""A pool like that of Flan-T5, which downloads nothing."""

from types import SimpleNamespace

import torch
from datasets import Dataset
from fusion_bench.compat.taskpool.flan_t5_glue_text_generation import FlanT5GLUETextGenerationTaskPool
from omegaconf import OmegaConf


class GLUE(FlanT5GLUETextGenerationTaskPool):
    """Tasks of a few random texts with answers of one token."""

    tokenizer = SimpleNamespace(pad_token_id=0)

    def __init__(self, tasks=("cola", "sst2")):
        super().__init__(OmegaConf.create({"tasks": [{"name": task} for task in tasks]}))

    def load_task(self, name):
        generator = torch.Generator().manual_seed(len(name))
        ids = torch.randint(2, 50, (12, 8), generator=generator).tolist()
        columns = {
            "input_ids": ids,
            "attention_mask": [[1] * 6 + [0] * 2] * 12,
            "labels": [[i % 2 + 5, 1] for i in range(12)],
        }
        return SimpleNamespace(test_dataset=Dataset.from_dict(columns), evaluate=lambda model: {"accuracy": 0.5})
