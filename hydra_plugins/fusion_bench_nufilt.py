"""Adds this plugin's configs to FusionBench's search path, so that `fusion_bench method=nufilt`
needs no flag, and refuses a name that there is not and an option that was typed in the wrong place.
"""

import os
import sys
from pathlib import Path
from typing import ClassVar

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class FusionBenchNufiltSearchPathPlugin(SearchPathPlugin):
    """Every Hydra application in the environment imports this class; it acts only inside
    FusionBench.
    """

    _is_checked: ClassVar[bool] = False  # the command line

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if "fusion_bench" not in sys.modules:
            return
        import fusion_bench.constants

        import fusion_bench_nufilt.continual.compat  # noqa: F401 -- FusionBench needs it from here on
        from fusion_bench_nufilt.continual.misplaced import CONFIG

        search_path.append("fusion-bench-nufilt", f"file://{CONFIG}")
        # FusionBench prefers a folder ./config of the user's to its own; with its own appended,
        # both work.
        project = Path(fusion_bench.constants.PROJECT_ROOT_PATH)
        search_path.append("fusion-bench", f"file://{project / 'fusion_bench_config'}")
        if "fusion_bench.scripts.cli" in sys.modules and not self._is_checked:
            # The check composes the configuration, and comes here again.
            type(self)._is_checked = True
            _check_command_line(search_path)


def _check_command_line(search_path: ConfigSearchPath) -> None:
    from fusion_bench_nufilt.compare.configs import refuse_unknown_names
    from fusion_bench_nufilt.continual.misplaced import refuse_misplaced

    folders = {element.provider: element.path for element in search_path.get_path()}
    try:
        refuse_misplaced(sys.argv[1:], "fusion_bench")
        if os.environ.get("HYDRA_FULL_ERROR") != "1":
            refuse_unknown_names(sys.argv[1:], folders.get("main", ""))
    except ValueError as error:
        raise SystemExit(str(error)) from None  # Python prints it
