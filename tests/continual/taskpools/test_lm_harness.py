"""Language models are scored by lm-evaluation-harness on local tasks, for real."""

import json

import pytest
import torch
from lightning import Fabric
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.analysis.pool import merged_layers
from fusion_bench_nufilt.analysis.record import record_moments, shared_inputs, task_inputs
from fusion_bench_nufilt.continual import Evaluator
from fusion_bench_nufilt.continual.evaluation import unaveraged
from fusion_bench_nufilt.continual.taskpools import LMEvalTaskPool
from tests.analysis.helpers import second_moment
from tests.tiny_models import llama

pytestmark = pytest.mark.slow  # lm-eval takes seconds to find its thousands of tasks

WORDS = ["<unk>", *["the", "cat", "sat", "on", "a", "mat", "dog", "ran", "in", "fog"]]
GENERATION = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "cat cat cat cat cat dog"
generation_kwargs: {{until: ["fog"], max_gen_toks: 6}}
metric_list:
  - metric: bleu
  - metric: chrf
  - metric: ter
  - metric: exact_match
  - metric: !function own.points
    aggregation: mean
    higher_is_better: true
"""
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: ["cat", "dog"]
doc_to_target: label
metric_list:
  - metric: acc
  - metric: acc_norm
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of whole words, and two tasks that differ in their answers."""
    folder = tmp_path_factory.mktemp("lm")
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="fog"
    ).save_pretrained(folder)
    for name, label in (("cats", 0), ("dogs", 1), ("birds", 0)):
        lines = [
            json.dumps({"text": text, "label": label})
            for text in ("the", "a mat on", "in the fog a")
        ]
        (folder / f"{name}.json").write_text("\n".join(lines))
        (folder / f"{name}.yaml").write_text(
            TASK.format(name=f"nufilt_{name}", data=folder / f"{name}.json")
        )
    (folder / "own.py").write_text("def points(references, predictions, **_):\n    return 40.0\n")
    text = GENERATION.format(name="nufilt_says", data=folder / "cats.json")
    (folder / "says.yaml").write_text(text)
    group = (
        "group: nufilt_pets\ntask: [nufilt_birds]\naggregate_metric_list: [{metric: acc_norm}]\n"
    )
    (folder / "pets.yaml").write_text(group)
    return folder


def pool(folder, tasks, **options):
    taskpool = LMEvalTaskPool(tasks, str(folder), include_path=str(folder), **options)
    taskpool._fabric_instance = Fabric(devices=1, accelerator="cpu")
    return taskpool


@torch.no_grad()
def always_saying(word, model, decoder):
    """Change a language model so that its next word is always the same."""
    decoder.norm.weight.fill_(1)
    decoder.embed_tokens.weight.copy_(decoder.embed_tokens.weight.abs() + 1)
    for (
        layer
    ) in decoder.layers:  # what is left is the embedding of the last word, which is positive
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.lm_head.weight.zero_()
    model.lm_head.weight[word] = 0.01
    return model


def likes(word):
    model = llama(tie_word_embeddings=False)
    return always_saying(WORDS.index(word), model, model.model)


def test_a_model_scores_what_its_answers_are_worth(folder):
    taskpool = pool(folder, {"one": "nufilt_cats", "two": "nufilt_dogs"})
    for word, scores in (("cat", (1.0, 0.0)), ("dog", (0.0, 1.0))):
        report = taskpool.evaluate(likes(word))
        assert (report["one"]["accuracy"], report["two"]["accuracy"]) == scores


def test_only_the_tasks_asked_for_are_scored_and_data_are_read_once(folder, note_calls):
    from lm_eval.api.task import ConfigurableTask

    reads = note_calls(ConfigurableTask, "download", lambda task, *_: task.config.task)
    names = ["nufilt_cats", "nufilt_dogs", "nufilt_pets"]  # the last one is a group
    taskpool = pool(folder, names, metric="acc_norm")
    evaluator = Evaluator(taskpool)
    assert set(evaluator.description["test_data"]) == set(names)
    for asked in (names[1:2], names[:2], names[2:], names[1:2]):
        report = evaluator.report(likes("dog"), asked)
        assert set(report) >= set(asked)
        assert not set(report) & (set(names) - set(asked))
    assert report["nufilt_dogs"]["accuracy"] == 1
    assert sorted(reads) == ["nufilt_birds", "nufilt_cats", "nufilt_dogs"]


def test_what_lm_eval_lacks_is_named_before_any_model_is_loaded(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "fusion_bench_nufilt.continual.algorithm.load_model", lambda *args: pytest.fail("loaded")
    )
    (tmp_path / "lost.yaml").write_text(
        TASK.format(name="nufilt_lost", data=tmp_path / "lost.json")
    )
    models = {"_pretrained_": llama(), "one": llama()}
    for task, message in (
        ("no_such_task", "lm-eval knows no task 'no_such_task'"),
        ("nufilt_lost", "task 'one': its test data can't be loaded: .*lost.json"),
    ):
        taskpool = LMEvalTaskPool({"one": task}, str(folder), include_path=str(tmp_path))
        with pytest.raises(ValueError, match=message):
            NufiltContinualMergingAlgorithm().run(models, taskpool)
    with pytest.raises(ValueError, match=r"'nufilt_cats' has no metric mcc, only acc, acc_norm"):
        pool(folder, ["nufilt_cats"], metric="mcc").evaluate(llama())


def test_an_analysis_looks_at_the_prompts_without_padding(folder, tmp_path):
    """A decoder's moments are those of the words of its prompts: one, three and four of them."""
    model = llama()
    inputs = task_inputs(pool(folder, {"one": "nufilt_cats"}), "one", 10, 0)
    modules = [view.module for view in merged_layers(model, "auto").values()]
    owner = shared_inputs(model, modules, inputs)
    moments = record_moments(model, inputs, owner, tmp_path, {}, 10**9)
    assert len(inputs.dataset) == 3
    assert moments.tokens == 1 + 3 + 4
    first = modules[0]
    with torch.no_grad():
        words = torch.tensor(
            [WORDS.index(word) for word in ["the", "a", "mat", "on", "in", "the", "fog", "a"]]
        )
        X = model.model.layers[0].input_layernorm(model.model.embed_tokens(words))
    assert first == "model.layers.0.self_attn.q_proj"
    assert torch.allclose(moments.read(first), second_moment(X), atol=1e-6)
    with pytest.raises(ValueError, match="has no data of task 'two', only of one"):
        task_inputs(pool(folder, {"one": "nufilt_cats"}), "two", 10, 0)


def test_a_metric_that_lm_eval_has_up_to_100_is_a_fraction(folder):
    taskpool = pool(folder, {"one": "nufilt_says"}, metric="chrf")
    model = likes("cat")
    raw = taskpool.run_harness(model, ["nufilt_says"], None)["nufilt_says"]["chrf,none"]
    assert 1 < raw < 100
    assert taskpool.evaluate(model)["one"] == {"accuracy": pytest.approx(raw / 100)}
    assert taskpool.scale("nufilt_says", "bleu", 11.95) == 100


@pytest.mark.parametrize("metric", ["points", "ter"])
def test_a_metric_of_unknown_scale_or_that_is_better_if_lower_is_shown_and_in_no_mean(
    folder, caplog, metric
):
    taskpool = pool(folder, {"one": "nufilt_says", "two": "nufilt_cats"})
    taskpool._metrics = (metric, "acc")
    report = Evaluator(taskpool).report(likes("cat"), ["one", "two"])
    assert list(report["one"]) == [metric]
    assert report["one"][metric] > 1
    assert report["average"] == {"accuracy": report["two"]["accuracy"]}
    assert f"task 'one': {metric} = " in caplog.text
    models = {"_pretrained_": llama(), "one": llama(), "two": llama()}
    algorithm = NufiltContinualMergingAlgorithm(null_rank=4, lora_rank=4, max_steps=1)
    algorithm.run(models, taskpool)
    assert algorithm.matrix.missing == ["one"]
    assert 0 <= algorithm.matrix.metrics()["ACC"] <= 1
    shown = unaveraged(algorithm.scores.last_report, algorithm.matrix.missing)
    assert list(shown["one"]) == [metric]


def test_a_share_that_is_above_one_has_another_scale(folder):
    taskpool = pool(folder, ["nufilt_cats"])
    assert taskpool.scale("nufilt_cats", "acc", 0.5) == 1
    assert taskpool.scale("nufilt_cats", "acc", 50.0) is None
    assert taskpool.scale("nufilt_pets", "acc_norm", 0.5) == 1
