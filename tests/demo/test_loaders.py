"""The demo as FusionBench sees it: its own pools, our YAML files, and no network."""

import socket
import subprocess
import sys

import pytest
import torch
from fusion_bench.tasks.clip_classification import get_classnames_and_templates
from fusion_bench.utils import instantiate

from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.demo import (
    TASKS,
    load_clip,
    load_processor,
    load_test_dataset,
    load_vision_model,
    to_pixels,
)
from tests.tiny_models import tower

pytestmark = pytest.mark.oldest


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args):
        raise AssertionError(f"tried to reach {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_the_pool_holds_nine_models_of_one_architecture(demo):
    pool = instantiate(compose_run(["modelpool=nufilt_demo"]).modelpool)
    assert pool.model_names == list(TASKS)
    pretrained = pool.load_model("_pretrained_").state_dict()
    shapes = {name: weight.shape for name, weight in pretrained.items()}
    for task in TASKS:
        tuned = pool.load_model(task).state_dict()
        assert {name: weight.shape for name, weight in tuned.items()} == shapes
        assert any(not torch.equal(tuned[name], pretrained[name]) for name in tuned)


def test_fusion_bench_knows_the_words():
    for name, task in TASKS.items():
        classes, (template,) = get_classnames_and_templates(name)
        assert [template(c) for c in classes] == task.prompts()


def test_our_fast_pixels_are_the_processor_s(demo):
    image = load_test_dataset("arrows")[0]["image"]
    theirs = load_processor()(images=[image], return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(to_pixels(image), theirs)


@pytest.mark.slow  # in a process of its own, since remarks are made once
def test_transformers_has_nothing_to_remark_on_the_processor(demo):
    load = "from fusion_bench_nufilt.demo import load_processor; load_processor()"
    done = subprocess.run([sys.executable, "-c", load], check=True, capture_output=True, text=True)
    assert done.stdout + done.stderr == ""


def test_the_tokenizer_has_one_token_for_a_word(demo):
    tokenizer = load_processor().tokenizer
    for task in TASKS.values():
        for prompt in task.prompts():
            ids = tokenizer(prompt)["input_ids"]
            assert tokenizer.decode(ids, skip_special_tokens=True) == prompt
            assert len(ids) == len(prompt.split()) + 2


def test_the_clip_and_the_pretrained_tower_are_one(demo):
    pretrained = tower(load_vision_model("_pretrained_")).state_dict()
    for name, weight in load_clip().vision_model.state_dict().items():
        assert torch.equal(weight, pretrained[name])


def test_an_unknown_name_is_refused_with_the_known_ones(demo):
    with pytest.raises(ValueError, match=r"sculptures.*arrows"):
        load_vision_model("sculptures")
    with pytest.raises(ValueError, match=r"_pretrained_.*arrows"):
        load_test_dataset("_pretrained_")
