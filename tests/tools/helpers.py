"""The tool, and a stand-in for a FusionBench checkout."""

import importlib.util

from tests.conftest import REPO

_spec = importlib.util.spec_from_file_location("upstream_tool", REPO / "tools" / "upstream.py")
upstream = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(upstream)

METHODS = """\
_import_structure = {
    "dop": ["ContinualDOPForCLIP"],
}
if TYPE_CHECKING:
    from .model_stock import ModelStock
    from .opcm import OPCMForCLIP
"""
NAVIGATION = "nav:\n          - OPCM: algorithms/opcm.md\n          - Model Stock: algorithms/model_stock.md\n"


def skeleton(folder):
    """What the tool needs of a checkout."""
    for path, text in {upstream.METHODS: METHODS, "mkdocs.yml": NAVIGATION, "config/README.md": ""}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder
