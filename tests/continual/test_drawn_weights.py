"""A pooler that was drawn at random, alike for modules, model pools and folders."""

import pytest
import torch
import transformers as hf

from fusion_bench_nufilt import LayerwiseMergingAlgorithm, NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.merge import merge_folders, plan_merge
from fusion_bench_nufilt.methods import METHODS
from fusion_bench_nufilt.methods.options import TargetConfig
from tests.merge.helpers import pool, tensors
from tests.tiny_models import SMALL, build, finetuned

EXCLUDE = {"exclude_modules": ["pooler.dense"]}
HINT = r"; exclude_modules=\[pooler\.dense\] leaves it out"
WITH = True
WITHOUT = False
FILES = {"_pretrained_": "base", "one": "one", "other": "other"}


def encoder(folder, name, pooler, base=None):
    """Save a tiny BERT with or without its pooler."""
    torch.manual_seed(0)
    model = build(
        hf.BertModel, hf.BertConfig(**SMALL, vocab_size=40, max_position_embeddings=16), 0
    )
    scale = 0.002
    if base is None:
        scale = 0.0
    model = finetuned(model, seed=len(name), scale=scale)
    if not pooler:
        model.pooler = None
    model.save_pretrained(folder / name)


@pytest.fixture(params=[(WITHOUT, WITHOUT), (WITH, WITHOUT)], ids=["no pooler", "the base has one"])
def folders(tmp_path, request):
    base, task = request.param
    encoder(tmp_path, "base", base)
    for name in ("one", "other"):
        encoder(tmp_path, name, task, base="base")
    return tmp_path


def from_folders(folder, **targets):
    targets = TargetConfig(**{**METHODS["spectral"].defaults, **targets})
    tasks = [str(folder / name) for name in ("one", "other")]
    plan = plan_merge(str(folder / "base"), tasks, targets=targets, method="spectral")
    merge_folders(plan, folder / "out")
    return tensors(folder / "out")


def from_pool(folder, **targets):
    algorithm = LayerwiseMergingAlgorithm("spectral", shuffle_order=False, **targets)
    return algorithm.run(pool(folder, hf.BertModel, **FILES)).state_dict()


def from_modules(folder, **targets):
    models = {}
    for seed, (name, file) in enumerate(FILES.items()):
        torch.manual_seed(seed)
        models[name] = hf.AutoModel.from_pretrained(folder / file)
    algorithm = LayerwiseMergingAlgorithm("spectral", shuffle_order=False, **targets)
    return algorithm.run(models).state_dict()


@pytest.mark.parametrize("merge", [from_folders, from_pool, from_modules])
def test_it_is_refused_by_name_on_every_route_with_the_option_that_leaves_it_out(folders, merge):
    with pytest.raises(ValueError, match=rf"model '.*pooler\.dense.*{HINT}"):
        merge(folders)


def test_left_out_every_route_gives_the_same_encoder_and_keeps_the_pooler_of_the_base(folders):
    results = [merge(folders, **EXCLUDE) for merge in (from_folders, from_pool)]
    encoder = {key for key in results[0] if "pooler" not in key}
    assert all(torch.equal(results[0][key], results[1][key]) for key in encoder)
    base = tensors(folders / "base")
    pooler = {key for key in base if "pooler" in key}
    assert results[0].keys() - encoder == pooler
    for result in results:
        assert all(torch.equal(result[key], base[key]) for key in pooler)


def test_a_pooler_that_was_drawn_and_then_saved_is_refused_as_well(tmp_path):
    for name in ("base", "one", "other"):
        encoder(tmp_path, name, WITH, base="base")
    model = hf.BertModel.from_pretrained(tmp_path / "other")
    torch.nn.init.normal_(model.pooler.dense.weight, std=0.02)
    model.save_pretrained(tmp_path / "other")
    for merge in (from_folders, from_modules):
        with pytest.raises(
            ValueError, match=rf"other', layer 'pooler\.dense' .* drawn at random{HINT}"
        ):
            merge(tmp_path)


def test_a_layer_that_is_zero_at_first_is_none_that_was_drawn():
    models = {
        "_pretrained_": hf.BertModel(
            hf.BertConfig(**SMALL, vocab_size=40, max_position_embeddings=16)
        )
    }
    torch.nn.init.zeros_(models["_pretrained_"].encoder.layer[0].output.dense.weight)
    models["one"] = finetuned(models["_pretrained_"], 1)
    NufiltContinualMergingAlgorithm().run(models)


def test_state_dicts_are_refused_with_what_to_do():
    models = {"_pretrained_": torch.nn.Linear(2, 2), "one": torch.nn.Linear(2, 2).state_dict()}
    with pytest.raises(
        ValueError, match="model 'one' is a state dict, and run takes torch modules: load it"
    ):
        NufiltContinualMergingAlgorithm().run(models)
