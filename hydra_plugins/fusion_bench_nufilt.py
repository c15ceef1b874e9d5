"""Adds this plugin's configs to FusionBench's search path, so that `fusion_bench method=nufilt`
needs no flag, and refuses options of a method that were typed in the wrong place.
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

        import fusion_bench_nufilt.continual.compat  # noqa: F401 -- FusionBench needs it from here on
        from fusion_bench_nufilt.utils.misplaced import CONFIG, refuse_misplaced

        search_path.append("fusion-bench-nufilt", f"file://{CONFIG}")
        # FusionBench prefers a folder ./config of the user's to its own; with its own appended,
        # both work.
        project = Path(fusion_bench.constants.PROJECT_ROOT_PATH)
        search_path.append("fusion-bench", f"file://{project / 'fusion_bench_config'}")
        if "fusion_bench.scripts.cli" in sys.modules:
            try:
                refuse_misplaced(sys.argv[1:], "fusion_bench")
            except ValueError as error:
                raise SystemExit(str(error)) from None  # Python prints it
