"""The benchmark's plain computation is right, its count of operations too, and the script runs."""

import importlib
import json
import os
import re
import runpy
import subprocess
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fusion_bench.method.dop.dop import ContinualDOPForCLIP

from tests.conftest import REPO
from tests.core.test_parity import LARGE, SMALL, TOLERANCE, config_of, load_case

sys.path.insert(0, str(REPO / "benchmarks"))

import gpu
import llm_tasks
import low_rank
from fast_dop import optimize_weight
from merge_step import METHODS, MODELS, make_layer, measure_memory, merge, prepared, report, split
from plain import needed_flops, plain_step

from fusion_bench_nufilt.core import FusionConfig
from fusion_bench_nufilt.methods import ORDER_FREE


@pytest.mark.parametrize(
    "name", [*SMALL, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)]
)
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


def test_inputs_are_reproducible_and_a_task_is_1_to_2_percent_of_the_weight():
    (theta_0, theta, theta_t, _), again = (
        make_layer((40, 30), 1, "cpu"),
        make_layer((40, 30), 1, "cpu"),
    )
    assert torch.equal(theta, again[1])
    assert 0.01 <= (theta_t - theta_0).norm() / theta_0.norm() <= 0.02
    sigma = torch.linalg.svdvals((theta_t - theta_0).double())
    torch.testing.assert_close(
        sigma / sigma[0], torch.arange(1, 31).double() ** -0.7, rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("method", METHODS)
def test_every_method_merges_a_layer(method):
    (layer,) = prepared(method, [make_layer((48, 40), 0, "cpu")])
    (merged,) = merge(method, [layer], "cpu", FusionConfig())
    assert merged.shape == (48, 40)
    assert 0 < (merged - layer[0]).norm() < 5 * (layer[2] - layer[0]).norm()


def test_a_lora_is_timed_in_its_factors_and_as_its_product(capsys):
    threads = torch.get_num_threads()
    low_rank.main(["--size", "96", "--rank", "4", "--repeats", "1"])
    torch.set_num_threads(threads)
    title, *_, difference = capsys.readouterr().out.splitlines()[-1].strip("| ").split(" | ")
    assert title == "96x96, r = 4"
    assert float(difference) < 1e-3


def test_what_an_analysis_costs_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["analysis.py", "--tiny", "--images=2", "--rounds=1", "--width=64"]
    )
    runpy.run_path(str(REPO / "benchmarks" / "analysis.py"), run_name="__main__")
    starts = [
        "second moments of 6 inputs, 2 images",
        *["10 layers"] * 2,
        "task vector of a 64 x 64 layer",
    ]
    lines = capsys.readouterr().out.splitlines()
    assert all(words in line for words, line in zip(starts, lines, strict=True))


@pytest.mark.parametrize("shape", [(48, 32), (32, 48)])
def test_the_faster_dop_ends_where_fusion_bench_s_does(shape):
    theta_0, theta, theta_t, _ = make_layer(shape, 0, "cpu")
    fabric = SimpleNamespace(world_size=1, to_device=lambda value: value)
    settings = {
        "num_steps": 30,
        "mgda": True,
        "ema": True,
        "ema_beta": 0.9,
        "alpha": 0.8,
        "svd_epsilon": 0.99,
    }
    dop = SimpleNamespace(fabric=fabric, lr=1e-4, svd_proj_space="uv", **settings)
    dop.cal_loss_i = partial(ContinualDOPForCLIP.cal_loss_i, dop)
    models = {"merged": theta, "new": theta_t}
    expected = ContinualDOPForCLIP._optimize_weight(dop, theta_0, models, "layer", 1)
    actual = optimize_weight(dop, theta_0, models, "layer", 1)
    start = (theta + theta_t) / 2
    assert (actual - expected).norm() < 1e-3 * (expected - start).norm()
    dop.svd_proj_space = "u"
    with pytest.raises(ValueError, match="default settings"):
        optimize_weight(dop, theta_0, models, "layer", 1)


def test_a_split_task_is_never_trained_on_what_it_is_tested_on(tmp_path, monkeypatch):
    lines = "\n".join(f"{i % 2} sentence {i}" for i in range(300))
    monkeypatch.setattr(llm_tasks, "show", lambda clones, repository, file: lines)
    train = llm_tasks.write_task("subj", llm_tasks.TASKS["subj"], Path("clones"), tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "subj.json").read_text().splitlines()]
    assert len(rows) == llm_tasks.TEST
    assert len({text for text, _ in train} | {row["text"] for row in rows}) == 300
    answers = ("opinion", "fact")
    pairs = [*train, *((row["text"], answers[row["label"]]) for row in rows)]
    assert all(answer == answers[int(text.split()[1]) % 2] for text, answer in pairs)


def test_memory_and_parts_are_measured():
    row = measure_memory("ours", MODELS["tiny"], "cpu", torch.get_num_threads())
    assert row["extra MB"] >= 0
    assert all(seconds > 0 for seconds in split([make_layer((48, 40), 0, "cpu")]).values())


@pytest.fixture
def gpu_args(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.merge_step.Steps, "patience", 0.1)
    machine = {"device": "cpu", "scratch": tmp_path, "out": tmp_path, "until": time.time() + 500}
    return Namespace(**machine, tiny=True, rows=tmp_path / "gpu.jsonl")


def rows_of(args):
    return [json.loads(line) for line in args.rows.read_text().splitlines()]


@pytest.mark.parametrize("part", ["clip-b32", "order-free"])
def test_the_gpu_script_measures_every_method(part, gpu_args):
    gpu.PARTS[part][0](gpu_args)
    rows = rows_of(gpu_args)
    methods = {method for _, method, *_ in rows}
    assert methods == (set(METHODS) if part == "clip-b32" else {kind.name for kind in ORDER_FREE})
    assert all(seconds > 0 for _, _, seconds, *_ in rows)
    difference = {
        "plain": r"differs from ours by ([\d.e+-]+)",
        "tsv_stream": r"differs by ([\d.e+-]+)",
    }
    found = {
        method: re.search(difference[method], row)
        for _, method, *_, row in rows
        if method in difference
    }
    assert all(float(match[1]) < 1e-3 for match in found.values())


def test_a_part_of_the_gpu_script_that_fails_or_runs_over_is_a_row(gpu_args):
    with gpu.failing_alone(gpu_args, "B/32", "OPCM"):
        raise ValueError("no | room")
    gpu_args.until = 0
    gpu.run_part("about", gpu_args)
    failed = ["failed: ValueError: no / room", "failed: over 0 s"]
    assert rows_of(gpu_args) == [
        ["B/32", "OPCM", None, None, failed[0]],
        ["about", "", None, None, failed[1]],
    ]


@pytest.mark.slow
def test_the_gpu_script_runs_through_in_tiny_sizes_on_a_cpu(tmp_path):
    command = [str(REPO / "benchmarks" / "gpu.sh"), str(tmp_path), "--device", "cpu", "--tiny"]
    subprocess.run(
        command, cwd=REPO, env={**os.environ, "PYTHON": sys.executable}, check=True, timeout=600
    )
    table = (tmp_path / "gpu.md").read_text()
    assert not re.findall(
        r"failed: (?!over \d+ s).*", table
    )  # on a busy machine a part may run over its limit
    for words in ("| parity", "| about "):
        assert words in table


def test_a_table_of_the_pages_has_what_was_printed_and_marks_ratios_that_moved(
    tmp_path, monkeypatch, capsys
):
    every = importlib.import_module("all")
    monkeypatch.setattr(every, "SCRATCH", tmp_path)
    monkeypatch.setattr(sys, "argv", ["all.py", "--tiny", "good", "bad"])
    monkeypatch.setenv("NUFILT_DEMO", "full")
    parts = {"bad": every.Part(1, "no_such_benchmark.py", "")}
    printed = "noise\n| layer | seconds |\n| --- | --- |\n| a | 2 |\n| b | {} |\nnoise\n"
    page, marks = (
        tmp_path / "page.md",
        "before\n\n<!-- measured: {} -->\n\n{}\n\n<!-- end -->\n\nafter\n",
    )
    bad = marks.format("bad", "as it was")
    page.write_text(bad + marks.format("good", "nothing yet"))
    monkeypatch.setattr(every, "PAGES", [page])
    monkeypatch.setattr(every.shutil, "copy", lambda source, folder: source)
    for seconds, b in ((4, "b"), (4.4, "b"), (6, r"b \*")):
        (tmp_path / "good.py").write_text(f"print({printed.format(seconds)!r})")
        parts["good"] = every.Part(
            1, str(tmp_path / "good.py"), "", lambda table: every.ratios(table, 0, "a")
        )
        monkeypatch.setattr(every, "PARTS", parts)
        with pytest.raises(SystemExit, match="failed: bad"):
            every.main()
        (table,) = every.printed(text := page.read_text())
        assert table.to_numpy().tolist() == [
            ["a", "2", "1"],
            [b, str(seconds), f"{seconds / 2:.3g}"],
        ]
        assert (
            (every.NOTE in text) == ("*" in b) == ("MORE THAN 15 % OFF" in capsys.readouterr().out)
        )
        assert text.startswith(bad + "before\n")
        assert text.endswith("\n\nafter\n")


def test_the_table_of_the_methods_has_a_row_for_each_that_was_timed():
    row = {"plain": 8.0, "ours": 2.0, "WUDI": 6.0, "WUDI closed form": 1.0}
    row |= {"plain / ours": 4.0, "WUDI / ours": 3.0, "WUDI closed form / ours": 0.5}
    results = {"machine": {}, "steps": {"tiny: 1 of 2x3": row, "one layer: 1 of 2x3": row}}
    results |= {
        "limit": {"tiny": {"ours": 2.0}},
        "memory": {"tiny, ours": {"extra MB": 7.0, "seconds": "cut short"}},
    }
    every = importlib.import_module("all")
    table = every.steps(*every.printed(report(results, 2.0)))
    assert list(table) == ["method", "tiny (s)", "tiny / NUFILT", "memory of the first (MB)"]
    assert table.to_numpy().tolist() == [
        ["plain", "8", "4", ""],
        ["NUFILT", "2", "", "7"],
        ["WUDI, 50 steps", "6", "3", ""],
        ["WUDI, closed form", "1", "0.5", ""],
    ]


@pytest.mark.slow
def test_the_script_writes_its_tables(tmp_path):
    options = [
        "--shapes",
        "tiny",
        "--layers",
        "1",
        "--repeats",
        "1",
        "--patience",
        "0.1",
        "--out",
        str(tmp_path),
    ]
    command = [
        sys.executable,
        str(REPO / "benchmarks" / "merge_step.py"),
        *options,
        "--methods",
        "plain,WUDI",
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    subprocess.run(
        [*command, "--no-memory"], env=environment, check=True, capture_output=True, timeout=300
    )
    results = json.loads((tmp_path / "results.json").read_text())
    row = results["steps"]["tiny: 4 of 192x160"]
    assert row["plain / ours"] == pytest.approx(row["plain"] / row["ours"])
    assert row["‖ours - plain‖ / ‖τ‖"] <= 1e-3
    assert "| tiny: 4 of 192x160 |" in (tmp_path / "results.md").read_text()
