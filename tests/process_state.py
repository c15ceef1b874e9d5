"""What tests of one process share, and must leave as they found it."""

import os
from contextlib import contextmanager

import torch
from fusion_bench import RuntimeConstants
from fusion_bench.programs import fabric_fusion_program
from fusion_bench.tasks.clip_classification import CLIPTemplateFactory
from torch.optim import Optimizer
from transformers import PreTrainedModel

#: What this package replaces for a while, and may forget to put back.
PATCHED = (
    (PreTrainedModel, "from_pretrained"),
    (Optimizer, "__init__"),
    (fabric_fusion_program, "print_json"),
)
#: pytest's own, and what Lightning notes of a seed and libraries of the processes that they start.
_MAY_CHANGE = ("PYTEST_CURRENT_TEST", "PL_", "LT_", "KMP_", "TOKENIZERS_PARALLELISM")
_MAY_CHANGE += ("RAY_", "PYTHONBREAKPOINT", "HF_XET_HIGH_PERFORMANCE")  # Ray's and lm-eval's


def process_state():
    """Return what holds for the whole process, by words for it."""
    state = {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's threads": torch.get_num_threads(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "the precision of products": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn's flags": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "fast_dev_run": bool(RuntimeConstants.debug),
    }
    for owner, name in PATCHED:
        state[f"{owner.__name__}.{name}"] = vars(owner).get(name)
    for task, info in CLIPTemplateFactory._dataset_mapping.items():
        if isinstance(info, dict) and "classnames" in info:
            state[f"the class names of '{task}'"] = list(info["classnames"])
        else:
            state[f"the class names of '{task}'"] = info
    for name, value in os.environ.items():
        if not name.startswith(_MAY_CHANGE):
            state[f"the environment's {name}"] = value
    return state


@contextmanager
def unchanged_state():
    """Raise an AssertionError for what the block has changed; further class names are forgotten."""
    before = process_state()
    class_names = dict(CLIPTemplateFactory._dataset_mapping)
    yield
    for task in CLIPTemplateFactory._dataset_mapping.keys() - class_names.keys():
        del CLIPTemplateFactory._dataset_mapping[task]
    after = process_state()
    changed = []
    for name in sorted({**before, **after}):
        if before.get(name) != after.get(name):
            changed.append(f"{name}: {before.get(name)!r} became {after.get(name)!r}")
    CLIPTemplateFactory._dataset_mapping.update(class_names)
    assert not changed, "what the whole process has is not as it was: " + "; ".join(changed)
