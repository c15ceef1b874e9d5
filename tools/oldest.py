"""Print the lowest version of each package that pyproject.toml allows, but for torch, as
constraints for pip.
"""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
for line in sum(project["optional-dependencies"].values(), project["dependencies"]):
    bound = re.match(r"([\w-]+)>=([\w.]+)", line)
    if bound and bound[1] != "torch":
        print(f"{bound[1]}=={bound[2]}")
