"""Laws of layers that are solved side by side, by threads and devices; two that are the CPU stand
in for two GPUs.
"""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fusion_bench_nufilt.merge.distributed import _make_merger
from fusion_bench_nufilt.methods.nufilt import Nufilt
from fusion_bench_nufilt.utils.devices import DevicePool, check_devices, map_layers
from tests.merge.helpers import plan, save_stream
from tests.tiny_models import llama

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_worker_s_mathematics_has_one_thread_also_beside_another_merge():
    """The end of the other merge sets the process's number of threads back while these workers are
    at work.
    """
    begun = threading.Event()
    ended = threading.Event()

    def count_threads(number):
        begun.set()
        assert ended.wait(10)
        return torch.get_num_threads()

    def other_merge():
        assert begun.wait(10)
        torch.set_num_threads(2)
        ended.set()

    other = threading.Thread(target=other_merge)
    other.start()
    counts = list(map_layers(count_threads, range(4), CPU))
    other.join()
    assert counts == [1] * 4


def own_thread(_):
    return threading.get_ident()


def test_a_worker_starts_no_workers():

    def threads(_):
        return {threading.get_ident(), *map_layers(own_thread, range(4), CPU)}

    assert all(len(used) == 1 for used in map_layers(threads, range(4), CPU))
    assert torch.get_num_threads() == 2


def test_with_one_thread_all_is_done_in_the_caller_s():
    torch.set_num_threads(1)
    assert set(map_layers(own_thread, range(4), CPU)) == {threading.get_ident()}


# --- products of float32 matrices ---

EXACT = ["ieee", "ieee"]  # on the GPU, and on the CPU
ROUNDED = ["tf32", "bf16"]
needs_settings_per_backend = pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="torch < 2.9"
)


@pytest.fixture
def stream(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    return tmp_path


def precisions(_=None):
    backends = (torch.backends.cuda, torch.backends.mkldnn)
    return [backend.matmul.fp32_precision for backend in backends]


@pytest.fixture
def rounded_products():
    """The user's setting is one that rounds products."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert precisions() == ROUNDED
        yield
        assert precisions() == ROUNDED
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@needs_settings_per_backend
@pytest.mark.parametrize("where", [CPU, torch.device("cuda")])
def test_products_are_not_rounded_to_tf32_or_bfloat16_whatever_is_set(where, rounded_products):
    assert list(map_layers(precisions, range(3), where)) == [EXACT] * 3


@needs_settings_per_backend
@pytest.mark.parametrize("first_to_end", [0, 1])
@pytest.mark.parametrize("fails", [False, True])
def test_merges_that_overlap_are_both_exact_and_leave_the_user_s_setting(
    first_to_end, fails, rounded_products
):
    merges = [map_layers(precisions, range(9), CPU) for _ in range(2)]
    assert [next(merge) for merge in merges] == [EXACT, EXACT]
    if fails:
        with pytest.raises(KeyError):
            merges[first_to_end].throw(KeyError)
    else:
        merges[first_to_end].close()
    assert precisions() == EXACT
    assert list(merges[1 - first_to_end]) == [EXACT] * 8


@needs_settings_per_backend
def test_products_are_not_rounded_on_a_node_of_a_cluster_either(
    stream, note_calls, rounded_products
):
    planned = plan(stream, ["task1"])
    seen = note_calls(Nufilt, "update", lambda *_: precisions())
    _make_merger(planned, [1.0])([layer.name for layer in planned.layers[:1]])
    assert seen == [EXACT]


LEVELS = [
    ("generic", "all"),
    ("cuda", "all"),
    ("cuda", "matmul"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
]


@pytest.fixture
def no_precision_set():
    """Whatever a test sets is taken back."""
    before = [torch._C._get_fp32_precision_getter(*level) for level in LEVELS]
    yield
    for level, precision in zip(LEVELS, before, strict=True):
        torch._C._set_fp32_precision_setter(*level, precision)


@needs_settings_per_backend
@pytest.mark.parametrize("backend", ["cuda", "mkldnn"])
@pytest.mark.parametrize("are_set", list(itertools.product([False, True], repeat=3)), ids=str)
def test_a_merge_leaves_the_precision_of_products_where_the_user_set_it(
    no_precision_set, backend, are_set
):
    """Set for all backends, for one, for its products, or for several of them. Products with the
    setting of what is above them follow that.
    """
    levels = [("generic", "all"), (backend, "all"), (backend, "matmul")]
    expected = ["tf32" if is_set else "none" for is_set in are_set]
    for level, precision in zip(levels, expected, strict=True):
        torch._C._set_fp32_precision_setter(*level, precision)
    before = torch._C._get_fp32_precision_getter(backend, "matmul")
    list(map_layers(str, range(2), CPU))
    assert torch._C._get_fp32_precision_getter(backend, "matmul") == before
    if "tf32" in expected[:2]:
        expected[2] = "none"
    precisions_left = []
    for level in levels:  # without what is set above it, each says what is set for itself
        precisions_left.append(torch._C._get_fp32_precision_getter(*level))
        torch._C._set_fp32_precision_setter(*level, "none")
    assert precisions_left == expected


# --- several devices ---


def test_every_device_is_at_work_and_none_on_two_stacks_at_a_time():
    """A stack waits until all devices have one, which fails if one of them is never given any."""
    pool = DevicePool([torch.device("meta", i) for i in range(3)])
    all_at_work = threading.Barrier(3, timeout=30)
    devices = []

    def work(_):
        with pool.free() as device:
            devices.append(device)
            all_at_work.wait()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert len(set(devices[:3])) == 3
    assert len(set(devices[3:])) == 3


@pytest.mark.parametrize("device", ["mps", "xpu", "meta", "cuda:99", "gpu"])
def test_devices_that_were_not_tried_or_are_not_there_are_refused(device):
    for devices in (device, f"cpu,{device}", [CPU, device]):
        with pytest.raises(ValueError, match=f"device '{device}'"):
            check_devices(devices)
    with pytest.raises(ValueError, match="devices must be of one kind, got none"):
        check_devices([])


def test_devices_are_named_by_a_text_or_a_list():
    assert check_devices("cpu,cpu") == check_devices([CPU, "cpu"]) == [CPU, CPU]
    assert check_devices("cpu") == check_devices(CPU) == [CPU]
