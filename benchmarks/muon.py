"""The optimizer Muon, for benchmarks."""

from unittest.mock import patch

import torch
from torch import Tensor

BFLOAT16 = torch.cpu.get_capabilities().get(
    "avx512_bf16", False
)  # elsewhere it is ten times slower than float32


class Muon(torch.optim.Muon):
    """Muon, with its products in float32 on processors that are slow in bfloat16."""

    def step(self) -> None:
        with patch.object(Tensor, "bfloat16", Tensor.bfloat16 if BFLOAT16 else Tensor.float):
            super().step()
