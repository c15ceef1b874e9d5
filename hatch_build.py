"""What the metadata of a release takes from the project's one address in pyproject.toml: its links,
and a README whose links work where it is shown without the repository, as on PyPI.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURES = (".gif", ".jpg", ".png", ".svg")


class ProjectAddress(MetadataHookInterface):
    """Gives the README and the addresses, which pyproject.toml names as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        address = self.config["address"]
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = with_addresses(readme, address, f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {
            "Source": address,
            "Documentation": f"{address}/tree/v{metadata['version']}/docs",
            "Issues": f"{address}/issues",
            "Changelog": f"{address}/blob/v{metadata['version']}/CHANGELOG.md",
            **self.config["urls"],
        }


def with_addresses(markdown: str, address: str, tag: str) -> str:
    """Return Markdown whose relative links lead to the files of a tag in the repository."""

    def replace(link: re.Match[str]) -> str:
        path = link[1]
        view = "blob"
        if path.endswith(PICTURES):
            view = "raw"  # the picture itself, and not the page about it
        return f"]({address}/{view}/{tag}/{path})"

    return re.sub(r"\]\((?!\w+:|#)([^)]+)\)", replace, markdown)
