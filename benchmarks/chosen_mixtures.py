"""Run `nufilt` with mixtures whose members have the settings that order_free_choice.py chose.

    CHOICE=CHOICE.json python benchmarks/chosen_mixtures.py compare --methods mix:pair=tsv_stream+spectral:ramp=0.4 ...

The package's own `mix` has its members at their defaults.
"""

import json
import os
from pathlib import Path

from order_free_choice import Scores, choose

from fusion_bench_nufilt.commands.app import app
from fusion_bench_nufilt.methods import METHODS
from fusion_bench_nufilt.methods.order_free import OrderFree
from fusion_bench_nufilt.methods.sums import Mix


def set_members(scores: Scores) -> None:
    """Give the members of every mixture the settings with the best scores."""

    def members(mix: Mix) -> list[OrderFree]:
        kinds = [METHODS[name] for name in mix.options.pair.split("+")]
        return [kind(kind.Options(**choose(kind.name, scores)), mix.layers, mix.seed) for kind in kinds]

    Mix._members = property(members)


if __name__ == "__main__":
    set_members(json.loads(Path(os.environ["CHOICE"]).read_text()))
    app()
