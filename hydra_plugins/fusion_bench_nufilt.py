"""Adds this plugin's configs to FusionBench's search path, so that `fusion_bench method=nufilt`
needs no flag, and says in one line what is wrong with the words of its command line.
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

        from fusion_bench_nufilt.utils.overrides import (
            CONFIG,
            PLUGIN,
            refuse_unknown_names,
            user_folders,
        )

        # Where both programs are imported, these words are not for Hydra: python -m has the file.
        is_nufilt = Path(sys.argv[0]).name in ("nufilt", "app.py")
        is_fusion_bench = "fusion_bench.scripts.cli" in sys.modules and not is_nufilt
        words = []
        if is_fusion_bench:
            words = sys.argv[1:]
        # Hydra itself adds the user's folders last, and the first file of a name is taken: theirs.
        for folder in user_folders(words):
            search_path.append("user", folder)
        search_path.append(PLUGIN, f"file://{CONFIG}")
        # FusionBench prefers a folder ./config of the user's to its own; with its own appended,
        # both work.
        project = Path(fusion_bench.constants.PROJECT_ROOT_PATH)
        search_path.append("fusion-bench", f"file://{project / 'fusion_bench_config'}")
        try:
            refuse_unknown_names(words, [element.path for element in search_path.get_path()])
        except ValueError as error:
            raise SystemExit(str(error)) from None  # Python prints it
