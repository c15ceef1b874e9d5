"""Laws of merges on GPUs, which are simulated here."""

import itertools
import subprocess
import sys
import threading
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import transformers as hf

from fusion_bench_nufilt import FusionConfig, LayerwiseMergingAlgorithm, fuse_layers
from fusion_bench_nufilt.continual.baselines.wemoe import WEMoEConfig, mixture_of
from fusion_bench_nufilt.merge import merge_folders, strength
from fusion_bench_nufilt.merge.engine import Worker
from fusion_bench_nufilt.merge.kept_state import KeptState
from fusion_bench_nufilt.merge.layer_jobs import layer_jobs, task_strengths
from fusion_bench_nufilt.merge.output import Output
from fusion_bench_nufilt.methods.nufilt import Nufilt
from fusion_bench_nufilt.methods.order_free import Sum
from fusion_bench_nufilt.models.entries import Stored
from fusion_bench_nufilt.models.source import MemorySource, Source
from fusion_bench_nufilt.nufilt import LowRank, solvers
from fusion_bench_nufilt.utils.devices import warn_once
from tests.conftest import REPO
from tests.continual.baselines.helpers import baseline
from tests.continual.helpers import pool
from tests.merge.helpers import RANKS, merge, plan, save_stream, tensors
from tests.nufilt.matrices import random_layer
from tests.pairs import pairs
from tests.simulated_gpus import SOLVERS, LateLibrary, allow, simulated
from tests.tiny_models import SMALL, build, clip

CONFIG = FusionConfig(null_rank=6, lora_rank=4, task_rank=3, max_steps=5)
SHAPES = [(20, 12), (12, 12), (8, 30), (20, 12), (20, 12), (40, 40), (20, 12)]
DEVICES = ["cuda:0", "cuda:0,cuda:1"]
BOTH = {"settings": {"device": "cuda:0,cuda:1"}}
TASKS = ["task1", "task2"]
ONE_BLOCK = {**SMALL, "num_hidden_layers": 1}
CLIP_CONFIG = hf.CLIPVisionConfig(**ONE_BLOCK, image_size=16, patch_size=8)
SMALL_CLIP = build(hf.CLIPVisionModel, CLIP_CONFIG, 0)


@pytest.fixture
def gpus():
    """Two GPUs; products have one thread, as in a worker on the CPU, and so the same bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    warn_once.cache_clear()
    with simulated() as ledger:
        yield ledger
    torch.set_num_threads(threads)


def models(shapes=SHAPES, dtype=torch.float32):
    pretrained = {}
    merged = {}
    task = {}
    for i, shape in enumerate(shapes):
        name = f"layer{i}"
        pretrained[name], merged[name], task[name] = random_layer(*shape, i, dtype)
    return [pretrained, merged, task]


def distance(merged, expected, pretrained, task):
    """The largest relative error of a layer."""
    errors = []
    for name, weight in expected.items():
        tau = task[name] - pretrained[name]
        errors.append(((merged[name] - weight).norm() / tau.norm()).item())
    return max(errors)


def failing_solvers(name, tensors):
    if name in SOLVERS and tensors[0].numel() > 1:
        raise RuntimeError("cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED")


def on_first_solve(error):
    """A hook that fails the first solver of a stack of layers."""
    failed = []

    def fail(name, tensors):
        if name in SOLVERS and tensors[0].ndim > 2 and len(tensors[0]) > 1 and not failed:
            failed.append(name)
            # A new one: an error holds the tensors of where it was raised.
            raise type(error)(*error.args)

    return fail


# --- NUFILT ---


@pytest.mark.parametrize(
    ("solver", "devices"), list(zip(["adam", "closed_form"], DEVICES, strict=True))
)
def test_a_step_of_nufilt_is_the_cpu_s_to_rounding_and_each_weight_goes_up_once_and_down_once(
    gpus, solver, devices
):
    config = replace(CONFIG, solver=solver)
    pretrained, merged, task = models()
    expected, _ = fuse_layers(pretrained, merged, task, config, device="cpu")
    gpus.reset()
    fused, _ = fuse_layers(pretrained, merged, task, config, device=devices)
    assert distance(fused, expected, pretrained, task) < 1e-5
    for shape in set(SHAPES):
        assert (gpus.up[shape], gpus.down[shape]) == (3 * SHAPES.count(shape), SHAPES.count(shape))
    assert gpus.at_work() == devices.count("cuda")


def test_layers_of_a_shape_are_solved_together(gpus):
    """Twenty-four layers take the solver calls and operations of two; what grows are transfers,
    reading reports, and looking at a row of each task's layer, which tells how it was stored.
    """
    counts = []
    for repeats in (1, 12):
        gpus.reset()
        fuse_layers(*models([(40, 40), (20, 12)] * repeats), CONFIG, device="cuda:0")
        solved = sum(count for (name, *_), count in gpus.operations.items() if name in SOLVERS)
        counts.append((solved, gpus.operations.total(), gpus.waits.total()))
    (solvers, operations, waits), more = counts
    assert more[:2] == (solvers, operations + 4 * 22)
    assert more[2] < 3 * waits


def test_the_adam_loop_moves_nothing_and_waits_for_nothing(gpus, monkeypatch):
    fit = solvers.fit_adapter
    new_events = []  # of each loop

    def events():
        return gpus.up.total() + gpus.down.total() + gpus.waits.total()

    def watched(*args, **kwargs):
        before = events()
        result = fit(*args, **kwargs)
        new_events.append(events() - before)
        return result

    monkeypatch.setattr(solvers, "fit_adapter", watched)
    # One batch at a time: others that are read and written meanwhile would count, too.
    monkeypatch.setattr("fusion_bench_nufilt.utils.devices.BATCHES_PER_GPU", 1)
    fuse_layers(*models(), CONFIG, device="cuda:0")
    assert new_events == [0] * len(set(SHAPES))


@pytest.mark.parametrize(
    ("shape", "ranks", "solver"),
    pairs(
        [(192, 192), (768, 192), (192, 768)],
        [(128, 64, 8), (16, 8, 4)],
        ["adam", "closed_form"],
    ),
)
def test_the_peak_is_at_most_the_forecast_and_at_least_half_of_it(gpus, shape, ranks, solver):
    null_rank, lora_rank, task_rank = ranks
    config = replace(
        CONFIG, null_rank=null_rank, lora_rank=lora_rank, task_rank=task_rank, solver=solver
    )
    steps = models([shape] * 3)
    gpus.reset()
    fuse_layers(*steps, config, device="cuda:0")
    assert 0.5 <= gpus.peak[0] / (3 * Nufilt(config, []).working_bytes(shape, 4)) <= 1


NO_ROOM = r"no room on device 'cuda:\d'; choose device=cpu"
OUT_OF_MEMORY = [
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA driver error: out of memory"),
]


@pytest.mark.parametrize(
    "error", [*OUT_OF_MEMORY, torch.linalg.LinAlgError("linalg.eigh: no convergence")]
)
def test_a_stack_that_fails_is_halved_and_the_log_says_so_once(gpus, error, caplog):
    shapes = [(20, 12)] * 5
    expected, _ = fuse_layers(*models(shapes), CONFIG, device="cpu")
    for _ in range(2):
        gpus.before = on_first_solve(error)
        gpus.reset()
        fused, _ = fuse_layers(*models(shapes), CONFIG, device="cuda:0")
        heights = {shape[0] for name, shape in gpus.operations if name == "baddbmm"}
        assert heights == {2, 3}
    assert distance(fused, expected, *models(shapes)[::2]) < 1e-5
    (record,) = caplog.records
    assert "5 layers of shape (20, 12) together" in record.getMessage()


# --- every method, on models in memory and in folders ---


@pytest.fixture
def spectra(note_calls):
    """The devices on which layers are measured for the strength of a task."""
    return note_calls(strength, "_spectrum_of", lambda *arguments: str(arguments[-1]))


def in_memory(name, models, **options):
    if name == "nufilt":
        options = {**RANKS, **options}
    algorithm = LayerwiseMergingAlgorithm(
        name, shuffle_order=False, evaluate="every_step", **options
    )
    merged = algorithm.run(models)
    return {key: value.cpu() for key, value in merged.state_dict().items()}


def assert_as_on_the_cpu(method, merged, expected):
    assert merged.keys() == expected.keys()
    for key, value in expected.items():
        if method == "nufilt":
            torch.testing.assert_close(merged[key], value, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(merged[key], value), key


@pytest.mark.parametrize("method", ["nufilt", "best"])
def test_models_in_memory_are_merged_on_gpus_as_on_the_cpu(gpus, method):
    on_cpu = pool(2, SMALL_CLIP)
    expected = in_memory(method, on_cpu)
    on_gpu = {name: deepcopy(model).to("cuda:1") for name, model in on_cpu.items()}
    for models, devices, count in ((on_cpu, [0], 1), (on_gpu, "all", 2)):
        gpus.reset()
        assert_as_on_the_cpu(method, in_memory(method, models, devices=devices), expected)
        assert gpus.at_work() == count


@pytest.mark.parametrize("method", ["nufilt", "best", "sum"])
def test_folders_are_merged_on_gpus_as_on_the_cpu(gpus, method, stream, spectra):
    expected = tensors(merge(stream, TASKS, out="cpu", method=method))
    layers = 7
    shapes = {tuple(value.shape) for key, value in expected.items() if "proj" in key}
    for devices in DEVICES[method != "nufilt" :]:
        gpus.reset()
        spectra.clear()
        out = merge(stream, TASKS, out=devices, method=method, settings={"device": devices})
        assert_as_on_the_cpu(method, tensors(out), expected)
        assert gpus.at_work() == devices.count("cuda")
        transfers = 3 * layers  # the base and two tasks
        if method == "best":
            # The base and a task, each time that a layer is measured for the strength of a task:
            # on the CPU, one layer after another took seven times as long as the merge.
            assert len(spectra) >= 2 * layers
            assert set(spectra) == {"cuda:0", "cuda:1"}
            transfers += 2 * len(spectra)
        assert sum(gpus.up[shape] for shape in shapes) == transfers


@pytest.mark.parametrize("method", ["best", "nufilt"])
def test_the_cpu_takes_over_for_every_method_whose_solver_fails(gpus, method, caplog, stream):
    expected = tensors(merge(stream, TASKS, out="cpu", method=method))
    gpus.before = failing_solvers
    merged = tensors(merge(stream, TASKS, out="gpu", method=method, **BOTH))
    assert_as_on_the_cpu(method, merged, expected)
    assert "the CPU takes over" in caplog.text


@pytest.mark.parametrize("method", ["nufilt", "sum"])
def test_a_batch_waits_for_its_own_stream_and_for_nothing_else(gpus, monkeypatch, stream, method):
    """The seconds of a layer are taken once its work is done."""

    def whole_device(*_):
        raise AssertionError

    monkeypatch.setattr(torch.cuda, "synchronize", whole_device)
    merge(stream, TASKS, method=method, settings={"device": "cuda:0"})
    callers = {functions[1] for functions in gpus.waits if functions[0] == "clock"}
    if method == "nufilt":
        assert callers == {"fuse_stack"}
    else:
        assert callers == set()


@pytest.mark.parametrize("method", ["nufilt", "best"])
def test_a_layer_too_large_for_the_gpu_is_named(gpus, method, stream):
    gpus.capacity = 3000  # a layer of 32 x 32 has 4096 bytes
    too_large = rf"layer '.*' \(\d+, \d+\): {NO_ROOM}"
    with pytest.raises(ValueError, match=too_large):
        in_memory(method, pool(2, SMALL_CLIP), devices="all")
    with pytest.raises(ValueError, match=too_large):
        merge(stream, TASKS, method=method, settings={"device": "cuda:1"})
    assert not (stream / "out").exists()


def test_a_gpu_that_has_room_for_some_layers_merges_folders_in_smaller_batches(gpus, stream):
    expected = tensors(merge(stream, TASKS, out="cpu"))
    gpus.reset()
    merge(stream, TASKS, out="whole", settings={"device": "cuda:0"})
    gpus.capacity = gpus.peak[0] * 2 // 3
    merged = tensors(merge(stream, TASKS, settings={"device": "cuda:0"}))
    assert_as_on_the_cpu("nufilt", merged, expected)


def test_several_gpus_begin_with_a_solver_library_that_loads_late(gpus, stream):
    gpus.before = LateLibrary()
    in_memory("nufilt", pool(2, SMALL_CLIP), devices="all")
    assert gpus.before.loaded.is_set()
    gpus.before = LateLibrary()
    merge(stream, TASKS, method="spectral", **BOTH)
    assert gpus.before.loaded.is_set()


def test_the_host_s_work_for_a_gpu_has_all_threads(gpus, note_calls, stream):
    torch.set_num_threads(2)
    threads = note_calls(Sum, "accumulate", lambda *_: torch.get_num_threads())
    merge(stream, ["task1"], method="sum", **BOTH)
    assert set(threads) == {2}


def test_a_weight_is_looked_at_where_it_is_computed(gpus, monkeypatch, stream):
    """A pass over a weight takes the host longer than the GPU needs to merge it."""
    devices = set()  # where matrices are looked at

    def is_finite(x):
        if x.ndim == 2:
            devices.add(x.device.type)
        return bool(torch.isfinite(x).all())

    for module in ("merge.fuse", "models.source", "merge.engine"):
        monkeypatch.setattr(f"fusion_bench_nufilt.{module}.is_finite", is_finite)
    merge(stream, TASKS, **BOTH)
    assert devices == {"cuda"}


def test_a_strength_that_a_gpu_cannot_measure_is_measured_on_the_cpu(gpus, stream):
    planned = plan(stream, TASKS, method="best", settings={"device": "cuda:0"})
    expected = task_strengths(KeptState(plan(stream, TASKS, method="best")))
    for error in (torch.cuda.OutOfMemoryError, RuntimeError):
        failed = []

        def fail(name, tensors, error=error, failed=failed):
            if name in SOLVERS:
                failed.append(name)
                raise error("cusolver error")

        gpus.before = fail
        assert task_strengths(KeptState(planned)) == expected
        assert failed


# --- batches of folders: one is read, one solved and one written at a time ---


@pytest.fixture
def single(monkeypatch, stream):
    """The folder of models, whose seven layers are batches of their own."""
    monkeypatch.setattr("fusion_bench_nufilt.merge.layer_jobs.BATCH_BYTES", 0)
    return stream


def hook(monkeypatch, kind, name, before=lambda number: None, after=lambda number: None):
    """Call functions before and after each call of a method, which they get the number of, from
    1.
    """
    numbers = itertools.count(1)
    method = getattr(kind, name)

    def hooked(*args, **kwargs):
        number = next(numbers)
        before(number)
        result = method(*args, **kwargs)
        after(number)
        return result

    monkeypatch.setattr(kind, name, hooked)


def test_a_batch_is_read_and_another_one_written_while_one_is_solved(gpus, monkeypatch, single):
    """The second solution waits for the third reading and the first writing, which wait for it to
    begin.
    """
    solving = threading.Event()
    read = threading.Event()
    written = threading.Event()

    def before_solving(number):
        if number == 2:
            solving.set()
            assert read.wait(30)
            assert written.wait(30)

    def before_reading(number):
        if number == 3:
            assert solving.wait(30)

    def after_reading(number):
        if number == 3:
            read.set()

    def before_writing(number):
        if number == 1:
            assert solving.wait(30)

    def after_writing(number):
        if number == 1:
            written.set()

    hook(monkeypatch, Stored, "read", before_reading, after_reading)
    hook(monkeypatch, Output, "add", before_writing, after_writing)
    hook(monkeypatch, Nufilt, "update", before_solving)
    merge(single, ["task1"], settings={"device": "cuda:0"})
    assert solving.is_set()
    assert read.is_set()
    assert written.is_set()


def test_batches_that_overlap_have_the_bits_of_batches_one_after_another(gpus, monkeypatch, stream):
    options = {"tasks": TASKS, "settings": {"device": "cuda:0"}}
    results = []
    for count in (1, 3):
        monkeypatch.setattr("fusion_bench_nufilt.utils.devices.BATCHES_PER_GPU", count)
        monkeypatch.setattr("fusion_bench_nufilt.merge.engine.BATCHES_PER_GPU", count)
        results.append(tensors(merge(stream, out=f"out{count}", **options)))
    in_sequence, overlapping = results
    assert all(torch.equal(value, overlapping[key]) for key, value in in_sequence.items())


def test_only_as_many_batches_are_on_a_gpu_as_the_forecast_has_room_for(gpus, monkeypatch, single):
    planned = plan(single, TASKS, settings={"device": "cuda:0"})
    needed = sorted(job.solving_memory for job in layer_jobs(KeptState(planned)))
    gpus.capacity = gpus.live[0] + sum(needed[-2:])
    active = []
    forecasts = []  # of the active batches, whenever one begins

    def counted_solve(worker, jobs, device):
        if device.type == "cpu":  # a block of a tensor outside the layers
            return solve(worker, jobs, device)
        active.append(jobs)
        active_jobs = itertools.chain.from_iterable(active)
        forecasts.append(sum(job.solving_memory for job in active_jobs))
        result = solve(worker, jobs, device)
        active.remove(jobs)
        return result

    solve = Worker._solve
    monkeypatch.setattr(Worker, "_solve", counted_solve)
    gpus.reset()
    merge_folders(planned, single / "out")
    assert gpus.peak[0] <= max(forecasts) <= gpus.capacity
    assert len(forecasts) == len(planned.layers)  # no batch was halved


@pytest.mark.parametrize(
    ("where", "name", "devices"),
    [
        (Stored, "read", DEVICES[1]),
        (Nufilt, "update", DEVICES[0]),
        (Output, "add", DEVICES[1]),
        (None, "progress", DEVICES[0]),  # as by Ctrl-C in the caller's thread
    ],
)
def test_an_error_in_any_stage_ends_the_merge_with_its_message_and_all_threads(
    gpus, monkeypatch, single, where, name, devices
):
    def fail(number, total=0):
        if number >= 4:  # several tensors may have been finished since the last call
            raise ValueError("model 'task1', layer 'x': damaged")

    threads = set(threading.enumerate())
    planned = plan(single, TASKS, settings={"device": devices})
    progress = fail
    if where is not None:
        hook(monkeypatch, where, name, fail)
        progress = allow
    with pytest.raises(ValueError, match=r"^model 'task1', layer 'x': damaged$"):
        merge_folders(planned, single / "out", progress)
    assert set(threading.enumerate()) == threads
    assert not (single / "out").exists()


# --- what runs beside layer-wise methods ---


def devices_of(model):
    return {parameter.device for parameter in model.parameters()}


def test_opcm_merges_models_that_are_on_a_gpu(gpus):
    models = pool(3)
    expected = baseline("opcm").run(models)
    merged = baseline("opcm").run({name: model.to("cuda:0") for name, model in models.items()})
    assert devices_of(merged) == {torch.device("cuda:0")}
    for key, value in merged.state_dict().items():
        torch.testing.assert_close(value.cpu(), expected.state_dict()[key])


def test_experts_are_where_the_model_is(gpus):
    mixture = mixture_of(clip().to("cuda:1"), WEMoEConfig())
    assert devices_of(mixture) == {torch.device("cuda:1")}


@pytest.mark.slow
def test_tests_that_are_marked_pass_on_a_gpu():
    plugins = ["-p", "tests.simulated_gpus", "-p", "no:cacheprovider"]
    tests = ["-m", "cuda", "tests/nufilt", "tests/methods", "tests/merge"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *tests]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout


@pytest.fixture
def stream(tmp_path):
    """A folder with a Llama of one block and two tasks."""
    config = hf.LlamaConfig(**ONE_BLOCK, vocab_size=50)
    save_stream(tmp_path, build(hf.LlamaForCausalLM, config, 0), 2)
    return tmp_path


def test_layers_in_which_a_task_has_other_ranks_are_solved_in_parts(gpus):
    """An adapter may have another rank in some layers of a shape, and none in others."""
    pretrained, merged, task = models([(20, 12)] * 5, torch.float64)
    generator = torch.Generator().manual_seed(0)
    for name, rank in zip(list(pretrained)[1:4], (2, 3, 2), strict=True):
        left = torch.randn(20, rank, generator=generator, dtype=torch.float64)
        right = torch.randn(rank, 12, generator=generator, dtype=torch.float64)
        task[name] = LowRank(left, right)
    on_gpu, _ = fuse_layers(pretrained, merged, task, CONFIG, device="cuda:0")
    on_cpu, _ = fuse_layers(pretrained, merged, task, CONFIG, device="cpu")
    for name, weight in on_cpu.items():
        torch.testing.assert_close(on_gpu[name], weight, rtol=0, atol=1e-9)


def test_tied_weights_that_lie_on_two_gpus_are_compared(gpus):
    """As those of a model that is loaded with a device map."""
    weight = torch.arange(12.0).reshape(4, 3)
    tensors = {"embedding": weight.to("cuda:0"), "head": weight.to("cuda:1")}
    # Simulated tensors have no addresses, by which weights that share their memory are known.
    assert Source.same(MemorySource("task", tensors), "embedding", "head")
