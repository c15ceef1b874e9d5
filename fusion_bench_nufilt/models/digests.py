"""The digests of what a merge reads."""

import hashlib
from collections import defaultdict
from typing import Any

from torch import Tensor

from fusion_bench_nufilt.utils.tensors import raw_bytes


class ReadDigests:
    """The digest of all that is read of each model for a tensor, by the model's role in the
    merge.
    """

    def __init__(self) -> None:
        self._shas: defaultdict[str, Any] = defaultdict(hashlib.sha256)

    def add(self, source: str, value: Tensor) -> None:
        self._shas[source].update(raw_bytes(value))

    def by_source(self) -> dict[str, str]:
        return {source: sha.hexdigest() for source, sha in self._shas.items()}
