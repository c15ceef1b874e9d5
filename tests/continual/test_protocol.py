"""The GPUs that a run names."""

import pytest
import torch

from fusion_bench_nufilt.continual.protocol import DeviceConfig

CPU = torch.device("cpu")


def test_gpus_are_named_by_their_numbers(monkeypatch):
    two = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert DeviceConfig([0, 1]).choose(CPU) == two
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert DeviceConfig("all").choose(CPU) == two
    assert DeviceConfig().choose(CPU) == [CPU]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="PyTorch sees no GPU"):
        DeviceConfig("all").choose(CPU)


@pytest.mark.parametrize("devices", ["some", [], [-1], [True], "0,1", 2])
def test_what_is_no_list_of_gpus_is_refused(devices):
    with pytest.raises(ValueError, match=r"devices must be all, or a list of numbers of GPUs such as \[0,1\], got"):
        DeviceConfig(devices)
