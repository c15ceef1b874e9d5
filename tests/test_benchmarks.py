"""The plain computation of the benchmarks is right, its count of operations too, and every script
runs.
"""

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.conftest import REPO
from tests.nufilt.test_parity import SMALL, TOLERANCE, config_of, load_case

sys.path.insert(0, str(REPO / "benchmarks" / "speed"))
sys.path.insert(0, str(REPO / "benchmarks" / "accuracy"))

import clips
import gpu
import language_model
import language_tasks
import one_step
import order_free
import scale
import text_encoder
from one_step import METHODS, MODELS, make_layer, measure_memory, merge, prepared, split
from plain import needed_flops, plain_step

from fusion_bench_nufilt.compare.configs import compose_run, taskpool_config
from fusion_bench_nufilt.methods import ORDER_FREE
from fusion_bench_nufilt.nufilt import FusionConfig

SPEED = REPO / "benchmarks" / "speed"


@pytest.mark.parametrize("name", SMALL)
def test_the_plain_computation_agrees_with_the_parity_vectors(name):
    case, vectors = load_case(name)
    merged = pretrained = vectors["pretrained"]
    for t in range(case["tasks"]):
        task = vectors[f"task.{t}"]
        merged = plain_step(pretrained, merged, task, config_of(case), vectors[f"lora_A_init.{t}"])
        error = (merged - vectors[f"merged.{t}"]).norm() / (task - pretrained).norm()
        assert error <= TOLERANCE[case["dtype"]], f"step {t}: {error:.2e}"


@pytest.mark.parametrize(
    ("d_o", "d_i", "expected"),
    [
        # tall, by hand: triangles of Gram matrices 2 * 6*4*4; G B 10 * 2*4*4*3; tau P 4*6*4*2; T, H
        # 4*6*4*1; A V, E V^T 10 * 4*3*4*3; r_l and r_v products 10 * 4*4*3*4; tau B A 4*6*4*3
        (6, 4, 192 + 960 + 192 + 96 + 1440 + 1920 + 288),
        # wide: triangles of Gram matrices 2 * 2*8*2; tau^T (tau B) 10 * 4*2*8*3; left to right
        # 2*2*8*3; tau P 4*2*8*2; T, H 4*2*8*1; A V, E V^T 10 * 4*3*8*3; r_l and r_v products 10 *
        # 4*8*3*4; tau B A 4*2*8*3
        (2, 8, 64 + 1920 + 96 + 128 + 64 + 2880 + 3840 + 192),
    ],
)
def test_the_count_of_operations_agrees_with_a_count_by_hand(d_o, d_i, expected):
    config = FusionConfig(null_rank=2, lora_rank=3, task_rank=1, max_steps=10)
    assert needed_flops(d_o, d_i, config) == expected


def test_every_method_merges_a_layer_and_memory_and_parts_are_measured():
    for method in METHODS:
        (layer,) = prepared(method, [make_layer((48, 40), 0, "cpu")])
        (merged,) = merge(method, [layer], "cpu", FusionConfig())
        assert merged.shape == (48, 40)
        assert 0 < (merged - layer[0]).norm() < 5 * (layer[2] - layer[0]).norm()
    row = measure_memory("ours", MODELS["tiny"], "cpu", torch.get_num_threads())
    assert row["extra MB"] >= 0
    assert all(seconds > 0 for seconds in split([make_layer((48, 40), 0, "cpu")]).values())


def test_the_script_of_one_step_writes_its_tables(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", {(48, 40): 4})
    monkeypatch.setattr(one_step, "matmul_rate", lambda device, largest: 1e9)
    words = ["--shapes=tiny", "--repeats=1", "--methods=plain,WUDI", "--no-memory"]
    one_step.main([*words, f"--out={tmp_path}"])
    row = json.loads((tmp_path / "results.json").read_text())["steps"]["tiny: 4 of 48x40"]
    assert row["plain / ours"] == pytest.approx(row["plain"] / row["ours"])
    assert row["‖ours - plain‖ / ‖τ‖"] <= 1e-3
    assert "| tiny: 4 of 48x40 |" in (tmp_path / "results.md").read_text()


def test_the_script_of_order_free_methods_has_a_row_for_each(monkeypatch, capsys):
    run(order_free, monkeypatch, "--models=24x16", "--repeats=1")
    rows = re.findall(r"^\| (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert rows == ["method", "nufilt", *ORDER_FREE]


def test_the_script_of_many_machines_tells_what_64_workers_take(monkeypatch, capsys):
    monkeypatch.setattr(scale, "measure", lambda shape, shrink: 1.0)
    run(scale, monkeypatch, "--model=70B")
    assert re.search(r"\| 64 \| [\d.]+ \| [\d.]+ \|", capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words", "row"),
    [
        ("folders", [], r"^\| tiny \| 0.00B \| 14 \| "),
        ("adapters", ["--count=2"], r"\| 2 \| "),
        ("traffic", ["--methods=sum", "--repeats=1"], r"^\| tiny \| sum (\| [\d. -]+ ){7}\|$"),
    ],
)
def test_a_script_of_folders_has_its_row_of_figures_for_a_tiny_llama(script, words, row, tmp_path):
    command = [sys.executable, str(SPEED / f"{script}.py"), "--size=tiny", *words]
    command.append(f"--folder={tmp_path}/folder")
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert re.search(row, done.stdout, re.MULTILINE)


def test_a_part_of_the_gpu_script_that_fails_or_runs_over_is_a_row(tmp_path):
    rows = tmp_path / "gpu.jsonl"
    args = Namespace(device="cpu", scratch=tmp_path, out=tmp_path, until=0, tiny=True, rows=rows)
    with gpu.failing_alone(args, "B/32", "OPCM"):
        raise ValueError("no | room")
    gpu.run_part("about", args)
    assert [json.loads(line) for line in rows.read_text().splitlines()] == [
        ["B/32", "OPCM", None, None, "failed: ValueError: no / room"],
        ["about", "", None, None, "failed: over 0 s"],
    ]


def test_the_gpu_script_names_files_of_tests_that_are_there_and_hold_tests_for_a_gpu():
    for part in ("parity", "tests"):
        work, _ = gpu.PARTS[part]
        _, names = work.args
        for name in names.split():
            path = REPO / "tests" / name
            files = path.glob("test_*.py") if path.is_dir() else [path]
            assert any("every_device" in file.read_text() for file in files), name


@pytest.mark.slow
def test_the_gpu_script_measures_every_method(tmp_path):
    command = [str(SPEED / "gpu.sh"), str(tmp_path), "--device=cpu", "--tiny", "--part=clip-b32"]
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run(command, cwd=REPO, env=environment, check=True, timeout=300)
    rows = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert {method for _, method, *_ in rows} == set(METHODS)
    assert not any(row[-1].startswith("failed") for row in rows)


# --- held-out benchmarks ---


@pytest.fixture
def sources(monkeypatch):
    """Every repository's files, replaced by 300 sentences with one of two labels."""
    lines = "\n".join(f"{i % 2} sentence {i}" for i in range(300))
    monkeypatch.setattr(language_tasks, "show", lambda clones, repository, file: lines)
    task = language_tasks.TASKS["subj"]
    for module in (language_tasks, language_model, text_encoder):
        monkeypatch.setattr(module, "TASKS", {"subj": task})


def test_a_split_task_is_never_trained_on_what_it_is_tested_on(tmp_path, sources):
    train = language_tasks.write_task("subj", language_tasks.TASKS["subj"], Path(), tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "subj.json").read_text().splitlines()]
    assert len(rows) == language_tasks.TEST
    assert len({text for text, _ in train} | {row["text"] for row in rows}) == 300
    answers = ("opinion", "fact")
    pairs = [*train, *((row["text"], answers[row["label"]]) for row in rows)]
    assert all(answer == answers[int(text.split()[1]) % 2] for text, answer in pairs)


def save_tokenizer(folder):
    """Write a tokenizer that knows the words of the sentences, and numbers as one word."""
    words = ["[PAD]", "[UNK]", "sentence", "This", "is", "opinion", "fact"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "eos_token": "[PAD]", "unk_token": "[UNK]"}
    fast = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.save_pretrained(folder)
    return len(words)


def run(module, monkeypatch, *words):
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, words)])
    module.main()
    torch.set_num_threads(threads)


SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize("kind", ["full", "lora_own"])
def test_the_language_model_becomes_a_pool_of_fine_tunes(kind, tmp_path, sources, monkeypatch):
    size = save_tokenizer(tmp_path / "base")
    config = hf.LlamaConfig(**SIZES, intermediate_size=24, vocab_size=size, pad_token_id=0)
    hf.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    monkeypatch.setattr(language_model, "STEPS", 2)
    options = ("--gguf", "unused", "--clones", tmp_path, "--out", tmp_path, "--tasks", "subj")
    run(language_model, monkeypatch, *options, kind)
    assert (tmp_path / kind / "subj" / "model.safetensors").exists()
    search_path = f"hydra.searchpath=[file://{tmp_path}/config]"
    run_config = compose_run([search_path, f"modelpool=llm_{kind}"])
    assert run_config.modelpool.models.subj == str(tmp_path / kind / "subj")
    assert dict(taskpool_config(run_config).tasks) == {"subj": "heldout_subj"}


@pytest.mark.parametrize("kind", ["muon", "lora"])
def test_the_text_encoder_becomes_a_pool_that_is_scored(kind, tmp_path, sources, monkeypatch):
    base = tmp_path / "base"
    size = save_tokenizer(base)
    config = hf.BertConfig(**SIZES, intermediate_size=24, vocab_size=size)
    hf.BertModel(config).save_pretrained(base)
    monkeypatch.setattr(text_encoder, "STEPS", 10)
    options = ("--model", base, "--clones", tmp_path, "--out", tmp_path)
    run(text_encoder, monkeypatch, *options, kind)
    pool = text_encoder.TextTaskPool(str(base), str(tmp_path / "tasks"))
    for dtype in (torch.float32, torch.bfloat16):
        scores = pool.evaluate(hf.AutoModel.from_pretrained(tmp_path / kind / "subj", dtype=dtype))
        assert scores.keys() == {"subj"}


@pytest.mark.slow
def test_the_demo_becomes_a_benchmark_of_small_clips(tmp_path, monkeypatch):
    monkeypatch.setenv("NUFILT_DEMO", "tiny")
    monkeypatch.setenv("NUFILT_CACHE", str(tmp_path))
    run(clips, monkeypatch, "--mini8", tmp_path, "--out", tmp_path, "--seed", "7", "demo")
    search_path = f"hydra.searchpath=[file://{tmp_path}/config]"
    run_config = compose_run([search_path, "modelpool=clips_demo"])
    folders = [*run_config.modelpool.models.values()]
    assert all(Path(folder).is_dir() for folder in folders)
    assert len(folders) == 1 + len(taskpool_config(run_config).test_datasets)
