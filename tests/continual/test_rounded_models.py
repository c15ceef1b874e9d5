"""`best` measures models in 16 bits alike in a pool and as folders."""

import shutil
from itertools import pairwise

import pytest
import torch
from fusion_bench import BaseModelPool
from omegaconf import OmegaConf
from safetensors.torch import save_file

from fusion_bench_nufilt import LayerwiseMergingAlgorithm
from fusion_bench_nufilt.merge.kept_state import KeptState
from fusion_bench_nufilt.merge.planned import task_strengths
from tests.merge.helpers import plan, tensors
from tests.models.test_adapters import save_all
from tests.tiny_models import llama

pytestmark = pytest.mark.oldest

Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(tmp_path):
    """A base, a full model `task1`, and `task9` with an adapter merged into it, in float32."""
    save_all(tmp_path, llama(tie_word_embeddings=False))
    return tmp_path


def scaled(folder, name, scale, dtype=torch.float32):
    """Save a task with its update times a scale; return the name of its folder."""
    base = tensors(folder / "base")
    state = {}
    for key, value in tensors(folder / name).items():
        state[key] = base[key].float().lerp(value.float(), scale).to(dtype)
    new_name = f"{name} times {scale}"
    shutil.copytree(folder / name, folder / new_name)
    save_file(state, folder / new_name / "model.safetensors", metadata={"format": "pt"})
    return new_name


def small_tasks(folder, stored=torch.float32):
    """Save a full model and a merged adapter whose updates are as small as rounding in bfloat16:
    both leave about two fifths of the weights as they are.
    """
    return [scaled(folder, "task1", 0.03, stored), scaled(folder, "task9", 0.01, stored)]


def pool(folder, names, dtype=torch.bfloat16):
    """A pool that loads folders in a dtype."""
    entries = {}
    for role, name in {"_pretrained_": "base", **{name: name for name in names}}.items():
        entries[role] = {
            "_target_": "transformers.LlamaForCausalLM.from_pretrained",
            "pretrained_model_name_or_path": str(folder / name),
            "torch_dtype": str(dtype).removeprefix("torch."),
        }
    return BaseModelPool(OmegaConf.create(entries))


def load(folder, names, dtype=torch.bfloat16):
    """The models of such a pool."""
    models = pool(folder, names, dtype)
    return {name: models.load_model(name) for name in models.all_model_names}


def best(**options):
    return LayerwiseMergingAlgorithm("best", shuffle_order=False, **options)


def strengths_in_memory(models):
    """The strengths of models that are merged one after another."""
    algorithm = best()
    sums = [0.0]

    def note(step, merged):
        sums.append(algorithm.state()[f"{Q_PROJ}.state.strength"].item())

    algorithm.run(models, on_step=note)
    return [after - before for before, after in pairwise(sums)]


def strengths_of_folders(folder, tasks, **settings):
    return task_strengths(KeptState(plan(folder, tasks, method="best", settings=settings)))


def test_a_result_in_bfloat16_has_the_strengths_of_the_folders_that_it_is_made_of(folder):
    tasks = small_tasks(folder)
    assert strengths_of_folders(folder, tasks, dtype="bfloat16") == [1.0, 0.5]


def test_a_base_that_was_published_in_bfloat16_is_not_counted_as_rounded(tmp_path):
    save_all(tmp_path, llama(tie_word_embeddings=False), torch.bfloat16)
    tasks = small_tasks(tmp_path, stored=torch.bfloat16)
    assert strengths_of_folders(tmp_path, tasks) == [1.0, 0.5]
    assert strengths_in_memory(pool(tmp_path, tasks)) == [1.0, 0.5]


def test_an_adapter_that_was_merged_into_a_rounded_base_begins_with_it(folder):
    """As a pool of peft merges it: what the base lost by rounding, it has lost, too."""
    models = load(folder, [])
    base = tensors(folder / "base")
    update = tensors(folder / "task9")
    task = models["_pretrained_"].from_pretrained(folder / "base", dtype=torch.bfloat16)
    for key, value in task.state_dict().items():
        value.copy_(value.float() + 0.02 * (update[key] - base[key]))
    assert strengths_in_memory({**models, "task9": task}) == [0.5]
