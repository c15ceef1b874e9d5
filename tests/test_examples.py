"""The examples run as they stand."""

import json
import runpy
import sys
from contextlib import redirect_stdout
from tempfile import TemporaryFile

import nbformat
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from fusion_bench.utils import instantiate
from nbclient import NotebookClient
from omegaconf import OmegaConf
from PIL import Image
from safetensors.torch import load_file
from transformers import CLIPVisionModel, ViTImageProcessor

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm, load_task
from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.demo import TASKS as DEMO_TASKS
from fusion_bench_nufilt.demo import load_clip, load_processor
from fusion_bench_nufilt.demo.train import normalise
from tests.classifiers import train
from tests.conftest import REPO
from tests.models.test_ties import gpt2
from tests.tiny_models import clip, finetuned, llama


def example(name, *arguments):
    """Run a script as `python` would, without importing everything again."""
    script = str(REPO / "examples" / name)
    # A file, since FusionBench asks standard output for its descriptor.
    with (
        pytest.MonkeyPatch.context() as patch,
        TemporaryFile("w+") as output,
        redirect_stdout(output),
    ):
        patch.setattr(sys, "argv", [script, *map(str, arguments)])
        runpy.run_path(script, run_name="__main__")
        output.seek(0)
        return output.read()


@pytest.mark.parametrize(("make", "layers"), [(llama, 14), (gpt2, 8)])
def test_plain_state_dicts_are_merged_as_the_models_are(make, layers, tmp_path):
    base = make()
    models = {"_pretrained_": base, "one": finetuned(base, 1), "two": finetuned(base, 2)}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    files = [tmp_path / name / "model.safetensors" for name in models]
    output = example("merge_state_dicts.py", *files, "--out", tmp_path / "merged.safetensors")
    assert f"merging {layers} layers in {layers} parameters" in output
    assert f"one: {layers} layers merged" in output
    assert f"two: {layers} layers merged" in output
    expected = NufiltContinualMergingAlgorithm(shuffle_order=False).run(models).state_dict()
    merged = load_file(tmp_path / "merged.safetensors")
    assert merged.keys() == load_file(files[0]).keys()
    assert all(torch.equal(value, expected[key]) for key, value in merged.items())


def test_no_layer_violates_the_bounds_of_the_paper():
    _, *lines = example("paper_bounds.py", "--rank", 4).splitlines()
    for line in lines:
        size, misalignment, by_theorem, loss, by_corollary = map(float, line.split())
        assert misalignment <= by_theorem + 1e-12
        assert (by_theorem < 1) == (size < 0.5)
        assert loss <= by_corollary


@pytest.mark.slow
def test_own_models(tmp_path):
    base = clip()
    models = {"_pretrained_": base, "one": finetuned(base, 1), "two": finetuned(base, 2)}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    tasks = [f"--task={name}={tmp_path / name}" for name in ("one", "two")]
    folders = ("--base", tmp_path / "_pretrained_", *tasks, "--out", tmp_path / "merged")
    example("merge_own_models.py", *folders, "null_rank=6")
    merged = CLIPVisionModel.from_pretrained(tmp_path / "merged").state_dict()
    algorithm = NufiltContinualMergingAlgorithm(shuffle_order=False, null_rank=6)
    expected = algorithm.run(models).state_dict()
    assert all(torch.equal(merged[key], value) for key, value in expected.items())


@pytest.mark.slow
def test_own_classifiers(tmp_path):
    """Merged by either script, each task's head answers, and the processor comes along."""
    base, models = train("vit")
    for name, model in {"base": base, **models}.items():
        model.save_pretrained(tmp_path / name)
        ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / name)
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(tmp_path / "photo.png")
    arguments = ["--base", tmp_path / "base", "--out", tmp_path / "by folders"]
    arguments += ["--image", tmp_path / "photo.png"]
    for task in models:
        arguments += ["--task", tmp_path / task]
    output = example("merge_classifiers.py", *arguments)
    assert "letters: ViTForImageClassification with 26 labels\n  letters " in output
    tasks = [f"--task={task}={tmp_path / task}" for task in models]
    options = ("--auto-class", "AutoModelForImageClassification", "--out", tmp_path / "merged")
    example("merge_own_models.py", "--base", tmp_path / "base", *tasks, *options)
    assert load_task(tmp_path / "merged", "ten").config.id2label == models["ten"].config.id2label
    processor = ViTImageProcessor.from_pretrained(tmp_path / "merged")
    assert processor.size == {"height": 16, "width": 16}


# --- local_clip ---

LOCAL_CLIP = REPO / "examples" / "local_clip" / "config"
MINI8 = ["scenes", "fashion", "rsscn7", "eurosat", "svhn", "gtsrb", "mnist", "dtd10"]


@pytest.fixture
def mini8(tmp_path, demo, monkeypatch):
    """Stand-ins for the example's models and data: the demo's CLIP and towers, and noise for
    images.
    """
    data = {
        "classnames": ["red", "blue sky", "a"],
        "labels_test": np.arange(12) % 3,
        "labels_train": np.arange(1, 13) % 3,
    }
    rng = np.random.default_rng(0)
    files = []
    models = tmp_path / "models"
    models.mkdir()
    (models / "clip").symlink_to(demo / "clip")
    for task, tower in zip(MINI8, DEMO_TASKS, strict=True):
        (models / task).symlink_to(demo / tower)
        file = tmp_path / f"{task}.npz"
        test, train = rng.integers(256, size=(2, 12, 32, 32, 3), dtype=np.uint8)
        np.savez(file, images_test=test, images_train=train, **data)
        files.append(file)
    example("local_clip/npz_to_folders.py", *files, "--train", "--out", tmp_path / "data")
    monkeypatch.setenv("MINI8_MODELS", str(models))
    monkeypatch.setenv("MINI8_DATA", str(tmp_path / "data"))
    return models, files


@torch.no_grad()
def scored_by_hand(tower, file, template):
    """Accuracy and loss, without FusionBench and its image processor."""
    clip = load_clip()
    data = np.load(file)
    prompts = [template.format(name) for name in data["classnames"]]
    tokens = load_processor().tokenizer(prompts, padding=True, return_tensors="pt")
    text = F.normalize(clip.text_projection(clip.text_model(**tokens).pooler_output), dim=-1)
    pixels = normalise(torch.from_numpy(data["images_test"]))
    pooled = CLIPVisionModel.from_pretrained(tower)(pixels).pooler_output
    images = F.normalize(clip.visual_projection(pooled), dim=-1)
    logits = clip.logit_scale.exp() * images @ text.T
    labels = torch.from_numpy(data["labels_test"])
    accuracy = (logits.argmax(-1) == labels).float().mean()
    return {"accuracy": accuracy.item(), "loss": F.cross_entropy(logits, labels).item()}


@pytest.mark.slow
def test_ones_own_towers_and_images_score_as_they_do_by_hand(mini8, fusion_bench):
    _, files = mini8
    options = ("method.max_steps=1", "method.evaluate=last", f"--config-dir={LOCAL_CLIP}")
    fusion_bench("method=nufilt", "modelpool=mini8", *options)
    report = json.loads((fusion_bench.logs / "report_7.json").read_text())
    test_sets = OmegaConf.load(LOCAL_CLIP / "taskpool" / "mini8.yaml").test_datasets
    tower = fusion_bench.logs / "checkpoints" / "merged_model_7"
    for task, file in zip(MINI8, files, strict=True):
        expected = scored_by_hand(tower, file, test_sets[task].template)
        assert report[task] == pytest.approx(expected, rel=1e-5), task


def test_the_search_path_finds_ones_own_models_and_training_images_with_their_recipe(mini8):
    models, files = mini8
    overrides = [
        f"hydra.searchpath=[file://{LOCAL_CLIP}]",
        "method=continual/sequential_finetuning",
        "modelpool=mini8",
    ]
    config = compose_run(overrides)
    method = config.method
    assert (method.learning_rate, method.num_steps, method.batch_size) == (1e-4, 500, 64)
    paths = {"_pretrained_": f"{models}/clip"} | {task: f"{models}/{task}" for task in MINI8}
    assert config.modelpool.models == paths
    assert list(config.modelpool.taskpool.test_datasets) == MINI8
    pool = instantiate(config.modelpool)
    labels = {}
    for item in pool.load_train_dataset("scenes"):
        labels[np.asarray(item["image"]).tobytes()] = item["label"]
    data = np.load(files[0])
    names = sorted(data["classnames"])
    expected = {}
    for image, label in zip(data["images_train"], data["labels_train"], strict=True):
        expected[image.tobytes()] = names.index(data["classnames"][label])
    assert labels == expected


@pytest.mark.slow
def test_the_tutorial_runs(demo):
    notebook = nbformat.read(REPO / "examples" / "tutorial.ipynb", as_version=4)
    committed_outputs = []
    for cell in notebook.cells:
        committed_outputs += cell.get("outputs", [])
    assert committed_outputs
    # Warnings name a machine's folders.
    assert not any(output.get("name") == "stderr" for output in committed_outputs)
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    matrix = notebook.cells[-3].outputs[0]["data"]
    picture = notebook.cells[-2].outputs[0]["data"]
    assert all(task in matrix["text/html"] for task in DEMO_TASKS)
    assert "image/png" in picture
