"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("NUFILT_SHARED", REPO.parent / "shared"))


def shared_or_skip(part: str) -> Path:
    """Path of test material that lies beside a developer's checkout and is not part of the project."""
    path = SHARED / part
    if not path.exists():
        pytest.skip(f"test material '{part}' is not at hand (looked in {SHARED}; set NUFILT_SHARED)")
    return path
