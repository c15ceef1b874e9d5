"""Adds this plugin's configs to FusionBench's search path, so that `fusion_bench method=nufilt`
needs no flag.
"""

import sys
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class FusionBenchNufiltSearchPathPlugin(SearchPathPlugin):
    """Every Hydra application in the environment imports this class; it acts only inside
    FusionBench.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if "fusion_bench" not in sys.modules:
            return
        import fusion_bench.constants

        import fusion_bench_nufilt.compat

        package = Path(fusion_bench_nufilt.__file__).parent
        # A wheel carries the configs inside the package; a checkout has them beside it.
        config = package / "config" if (package / "config").is_dir() else package.parent / "config"
        search_path.append("fusion-bench-nufilt", f"file://{config}")
        # FusionBench prefers a folder ./config of the user's to its own; with its own appended,
        # both work.
        own = Path(fusion_bench.constants.PROJECT_ROOT_PATH) / "fusion_bench_config"
        search_path.append("fusion-bench", f"file://{own}")
