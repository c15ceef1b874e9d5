"""Vision-language models are scored by lmms-eval on local tasks, for real where it is installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from datasets import ClassLabel, Dataset, Features, Image, Value, load_dataset
from lightning import Fabric
from PIL import Image as Picture
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.continual import Evaluator
from fusion_bench_nufilt.continual.taskpools import LMMSEvalTaskPool
from fusion_bench_nufilt.continual.taskpools.lmms_tasks import captions
from tests.continual.taskpools.test_lm_harness import always_saying
from tests.tiny_models import llava

WORDS = [
    "<unk>",
    "<s>",
    "</s>",
    "USER:",
    "ASSISTANT:",
    "red",
    "blue",
    *(f"word{i}" for i in range(42)),
    "<image>",
]
TASK = """
task: {name}
dataset_path: parquet
dataset_kwargs: {{data_files: {{test: {folder}/{name}.parquet}}}}
test_split: test
output_type: generate_until
doc_to_visual: !function utils.pictures
doc_to_text: "which colour ?"
doc_to_target: answer
generation_kwargs: {{max_new_tokens: 1}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
TEMPLATE = (
    "{% for message in messages %}USER: {% for part in message.content %}"
    "{{ '<image> ' if part.type == 'image' else part.text }}{% endfor %} ASSISTANT:{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A processor for tiny LLaVA models, and two tasks that differ in their answers."""
    folder = tmp_path_factory.mktemp("lmms")
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    inputs = ["input_ids", "attention_mask"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special, model_input_names=inputs)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    images = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    processor = LlavaProcessor(
        images, tokenizer, patch_size=8, num_additional_image_tokens=1, chat_template=TEMPLATE
    )
    processor.vision_feature_select_strategy = "default"
    processor.save_pretrained(folder)
    (folder / "utils.py").write_text(
        "def pictures(doc):\n    return [doc['image'].convert('RGB')]\n"
    )
    features = Features({"image": Image(), "answer": Value("string")})
    for colour in ("red", "blue"):
        rows = {"image": [Picture.new("RGB", (16, 16), colour)] * 3, "answer": [colour] * 3}
        Dataset.from_dict(rows, features=features).to_parquet(str(folder / f"{colour}.parquet"))
        (folder / f"{colour}.yaml").write_text(TASK.format(name=colour, folder=folder))
    return folder


def pool(folder, python, **options):
    taskpool = LMMSEvalTaskPool({"one": "red", "two": "blue"}, str(folder), str(python), **options)
    taskpool._fabric_instance = Fabric(devices=1, accelerator="cpu")
    return taskpool


# --- lmms-eval itself ---


@pytest.fixture
def lmms_eval():
    """The Python that has it."""
    python = os.environ.get("LMMS_EVAL_PYTHON", sys.executable)
    if subprocess.run(
        [python, "-c", "import lmms_eval"], capture_output=True, check=False
    ).returncode:
        pytest.skip(
            f"{python} has no lmms-eval; LMMS_EVAL_PYTHON names the Python of an environment that "
            "has it"
        )
    return python


def says(word):
    model = llava()
    return always_saying(WORDS.index(word), model, model.model.language_model)


@pytest.mark.slow
def test_a_model_scores_what_its_answers_are_worth(folder, lmms_eval):
    report = pool(folder, lmms_eval, include_path=str(folder), limit=2).evaluate(says("red"))
    assert report == {"one": {"accuracy": 1.0}, "two": {"accuracy": 0.0}}


@pytest.mark.slow
def test_answers_that_can_not_be_generated_are_an_error_and_not_wrong_answers(folder, lmms_eval):
    broken = llava()
    broken.config.image_token_index = 48  # so that no picture finds its place
    with pytest.raises(RuntimeError, match="in generating"):
        pool(folder, lmms_eval, include_path=str(folder)).evaluate(broken)


# --- a stand-in, which writes what lmms-eval would ---


def stand_in(folder, results, prints="", status=0):
    """A program that is called as Python is."""
    program = folder / "python"
    program.write_text(
        f"#!{sys.executable}\n"
        "import sys, pathlib\n"
        "if '-c' in sys.argv: sys.exit()\n"
        "options = dict(word.lstrip('-').split('=', 1) for word in sys.argv[3:])\n"
        "model = pathlib.Path(options['model_args'].split(',')[0].split('=')[1])\n"
        "assert {'model.safetensors', 'tokenizer.json'} <= {file.name for file in "
        "model.iterdir()}\n"
        "out = pathlib.Path(options['output_path'], 'model'); out.mkdir(parents=True)\n"
        f"if {results!r}: (out / "
        f"'1_results.json').write_text({json.dumps({'results': results})!r})\n"
        f"print({prints!r}, sorted(options.items()))\n"
        f"sys.exit({status})\n"
    )
    program.chmod(0o755)
    return program


RESULTS = {
    "red": {"alias": "red", "exact_match,none": 0.25, "exact_match_stderr,none": "N/A"},
    "blue": {"anls,x": 0.5},
}


def test_scores_are_by_the_names_of_the_models(folder, tmp_path):
    report = pool(folder, stand_in(tmp_path, RESULTS)).evaluate(llava())
    assert report == {"one": {"accuracy": 0.25}, "two": {"accuracy": 0.5}}
    report = pool(folder, tmp_path / "python").evaluate(llava(), ["two"])
    assert report == {"two": {"accuracy": 0.5}}
    assert pool(folder, tmp_path / "python").evaluate(llava(), []) == {}
    with pytest.raises(ValueError, match="task 'red' has no metric CIDEr, only exact_match"):
        pool(folder, tmp_path / "python", metric="CIDEr").evaluate(llava(), ["one"])


@pytest.mark.parametrize(
    ("results", "prints", "status"),
    [({}, "oh", 0), (RESULTS, "Error oh in generating", 0), (RESULTS, "oh", 1)],
)
def test_whatever_goes_wrong_is_an_error_with_what_was_printed(
    folder, tmp_path, results, prints, status
):
    with pytest.raises(RuntimeError, match=r"lmms-eval failed on blue, red:\n.*oh"):
        pool(folder, stand_in(tmp_path, results, prints, status)).evaluate(llava())


def test_an_environment_without_lmms_eval_is_refused_at_once(folder, tmp_path):
    with pytest.raises(
        ValueError, match=r"'/no/python' has no lmms-eval.*LMMS_EVAL_PYTHON.*taskpool=dummy"
    ):
        pool(folder, "/no/python")


LMMS_EVAL = """
class TaskManager:
    def __init__(self, include_path=None):
        self.all_tasks = ["red", "lost", include_path]

    def load_task_or_group(self, tasks):
        if tasks == ["lost"]:
            raise FileNotFoundError("no data")
"""


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("red", None),
        ("{folder}", None),  # the stand-in knows a task of that name where it is given the folder
        ("green", "lmms-eval knows no task 'green'; include_path names a folder with more"),
        ("lost", "lmms-eval can't load task 'lost': FileNotFoundError: no data"),
    ],
)
def test_what_lmms_eval_lacks_is_named_before_any_model_is_loaded(tmp_path, task, said):
    (tmp_path / "lmms_eval").mkdir()
    (tmp_path / "lmms_eval" / "__init__.py").touch()
    (tmp_path / "lmms_eval" / "tasks.py").write_text(LMMS_EVAL)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    taskpool = LMMSEvalTaskPool(
        {"one": task.format(folder=tmp_path)}, "", str(python), include_path=str(tmp_path)
    )
    if said is None:
        assert Evaluator(taskpool).description["test_data"] == {}
        return
    with pytest.raises(ValueError, match=f"^{said}$"):
        Evaluator(taskpool).description  # noqa: B018


def test_as_many_examples_are_scored_as_are_asked_for(folder, tmp_path):
    taskpool = pool(folder, stand_in(tmp_path, RESULTS, status="options['limit'] != '1'"), limit=7)
    assert taskpool.evaluate(llava(), ["one"], limit=1) == {"one": {"accuracy": 0.25}}
    with pytest.raises(RuntimeError, match="'7'"):
        taskpool.evaluate(llava(), ["one"])


TASK_FILES = sorted(Path(captions.__file__).parent.glob("*.yaml"))


def task_of(file):
    class Loader(yaml.SafeLoader):
        """Reads !function as lmms-eval does."""

    Loader.add_constructor(
        "!function", lambda loader, node: getattr(captions, node.value.removeprefix("captions."))
    )
    return yaml.load(file.read_text(), Loader)


@pytest.mark.parametrize("file", TASK_FILES, ids=lambda file: file.stem)
def test_a_task_file_names_what_there_is_and_a_metric_that_the_pool_knows(file):
    task = task_of(file)
    assert task["task"] == file.stem
    assert task["metric_list"][0]["metric"] in LMMSEvalTaskPool.metrics
    doc = {
        "image": Picture.new("L", (2, 2)),
        "names": "tench, Tinca tinca",
        "caption": ["A red bus.", "the bus"],
    }
    assert task["doc_to_visual"](doc)[0].mode == "RGB"
    assert task["metric_list"][0]["metric"] in task["process_results"](doc, ["A tench!"])


def test_a_caption_of_imagenet_is_right_if_it_is_a_name_of_the_class():
    features = Features({"label": ClassLabel(names=["tench, Tinca tinca", "great white shark"])})
    (first, second) = captions.with_class_names(
        Dataset.from_dict({"label": [1, 0]}, features=features)
    )
    answers = {"Great white shark.": (1, 0), "the Tinca Tinca": (0, 1), "shark": (0, 0), "": (0, 0)}
    for answer, scores in answers.items():
        matches = [captions.matches_a_name(doc, [answer]) for doc in (first, second)]
        assert tuple(match["exact_match"] for match in matches) == scores


def test_of_imagenet_only_the_validation_images_are_loaded(tmp_path):
    labels = {"label": {"names": {"0": "tench, Tinca tinca", "1": "great white shark"}}}
    features = [{"name": "label", "dtype": {"class_label": labels["label"]}}]
    splits = [{"name": name, "num_bytes": 8, "num_examples": 2} for name in ("train", "validation")]
    about = yaml.safe_dump({"dataset_info": {"features": features, "splits": splits}})
    (tmp_path / "README.md").write_text(f"---\n{about}---\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train-00000-of-00294.parquet").write_text("not to be read")
    rows = Dataset.from_dict({"label": [1, 0, 1]})
    rows.to_parquet(str(tmp_path / "data" / "validation-00000-of-00014.parquet"))
    task = task_of(TASK_FILES[0])
    found = load_dataset(str(tmp_path), cache_dir=str(tmp_path / "cache"), **task["dataset_kwargs"])
    assert list(found) == [task["test_split"]]
    docs = task["process_docs"](found["validation"], str(tmp_path))
    assert docs[0]["names"] == "great white shark"


def test_captions_of_vizwiz_are_scored_by_cider():
    pytest.importorskip("pycocoevalcap", reason="needs pycocoevalcap, which lmms-eval has")
    docs = [{"caption": ["A red bus on a street."]}, {"caption": ["Two dogs sleep in the grass."]}]
    right = ["a red bus on the street", "two dogs sleep in grass"]
    for answers, expected in ((right, 10), (right[::-1], 0)):
        scored = [
            captions.with_references(doc, [text])["CIDEr"]
            for doc, text in zip(docs, answers, strict=True)
        ]
        assert captions.cider(scored) == pytest.approx(expected)


def test_the_models_of_llava_bring_it_along(monkeypatch):
    monkeypatch.setenv("LMMS_EVAL_PYTHON", "/lmms/bin/python")
    taskpool = compose_run(["modelpool=llava-1.5-7b"]).modelpool.taskpool
    assert taskpool._target_ == "fusion_bench_nufilt.continual.taskpools.LMMSEvalTaskPool"
    assert (taskpool.python, taskpool.tasks.iconqa) == ("/lmms/bin/python", "iconqa_val")
    assert taskpool.tasks.keys() == compose_run(
        ["modelpool=llava-1.5-7b"]
    ).modelpool.models.keys() - {"_pretrained_"}
    ours = {task for task in taskpool.tasks.values() if task.startswith("nufilt_")}
    assert ours == {file.stem for file in TASK_FILES}


def test_the_tasks_of_this_project_are_known_where_no_folder_is_named(folder, tmp_path):
    stand_in(tmp_path, RESULTS, status=f"options['include_path'] != {str(TASK_FILES[0].parent)!r}")
    report = pool(folder, tmp_path / "python").evaluate(llava(), ["one"])
    assert report == {"one": {"accuracy": 0.25}}
