#!/usr/bin/env python
"""Refuse to build a release that is not ready: ``make release`` runs this first."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PLACEHOLDER = "OWNER"


def obstacles(repo: Path) -> list[str]:
    """Return a line for all that a release of a checkout still lacks."""
    project = tomllib.loads((repo / "pyproject.toml").read_text(encoding="utf-8"))
    version = project["project"]["version"]
    address = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["address"]
    lines = []
    if PLACEHOLDER in address.split("/"):
        lines.append(f"pyproject.toml: {address} is a placeholder: name the repository's address")
    changelog = (repo / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## {re.escape(version)}, \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        lines.append(f"CHANGELOG.md: say when this is released: '## {version}, YEAR-MONTH-DAY'")
    if _git(repo, "status", "--porcelain"):
        lines.append("there are changes that are not committed")
    if f"v{version}" not in _git(repo, "tag", "--points-at", "HEAD").split():
        lines.append(f"this commit has no tag v{version}: git tag v{version}")
    return lines


def _git(repo: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repo), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit("\n".join(obstacles(REPO)) or None)
