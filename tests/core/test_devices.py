"""Several devices in one process: two that are the CPU stand in for two GPUs."""

import threading

import pytest
import torch

from fusion_bench_nufilt.core import fuse_layers, fusion
from fusion_bench_nufilt.core.workers import DevicePool, check_devices
from tests.core.test_fusion import CONFIG, models

CPU = torch.device("cpu")
SHAPES = {f"layer{i}": shape for i, shape in enumerate([(20, 12), (20, 12), (8, 30), (40, 40), (20, 12)])}


def test_the_number_of_devices_does_not_change_a_bit():
    streams = models(shapes=SHAPES)
    expected, _ = fuse_layers(*streams, CONFIG, device="cpu")
    for devices in (["cpu"] * 2, "cpu,cpu,cpu", [CPU]):
        fused, reports = fuse_layers(*streams, CONFIG, device=devices)
        assert list(fused) == list(reports) == list(SHAPES)
        assert all(torch.equal(fused[name], expected[name]) for name in SHAPES)


def test_every_device_is_at_work_and_none_on_two_stacks_at_a_time(monkeypatch):
    """A stack waits until all devices have one, which fails if one of them is never given any."""
    pool, together = DevicePool([torch.device("meta", i) for i in range(3)]), threading.Barrier(3, timeout=30)
    held = []

    def work(_):
        with pool.free() as device:
            held.append(device)
            together.wait()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(set(held[i : i + 3])) == 3 for i in (0, 3))


def test_stacks_lie_where_they_are_computed(monkeypatch):
    """The devices are meta devices, where an operation on two devices is an error."""
    devices, seen = [torch.device("meta"), torch.device("meta")], []

    def fuse_stack(theta_0, merged, task, A, config, **_):
        seen.append({each.device.type for each in (theta_0, merged, task, A)})
        return torch.zeros(merged.shape), {"task_norm": torch.zeros(len(merged))}

    monkeypatch.setattr(fusion, "check_devices", lambda _: devices)
    monkeypatch.setattr(fusion, "fuse_stack", fuse_stack)
    fused, _ = fuse_layers(*models(shapes=SHAPES), CONFIG, batch_bytes=0)
    assert seen == [{"meta"}] * len(SHAPES)
    assert {weight.device for weight in fused.values()} == {CPU}


@pytest.mark.parametrize("devices", [[], "cpu,cuda:99", "cpu,gpu", [torch.device("meta")]])
def test_devices_that_are_not_there_are_refused(devices):
    with pytest.raises(ValueError, match="device"):
        check_devices(devices)


def test_devices_are_named_by_a_text_or_a_list():
    assert check_devices("cpu,cpu") == check_devices([CPU, "cpu"]) == [CPU, CPU]
    assert check_devices("cpu") == check_devices(CPU) == [CPU]
