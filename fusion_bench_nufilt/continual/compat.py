"""Importing this module makes FusionBench up to 0.2.33 work with today's transformers and
huggingface_hub, which happens where a method, a model pool or a task pool of this package is used.
"""

import logging
import os
from functools import wraps
from typing import Any

import datasets.load
from hydra.experimental.callback import Callback
from transformers.models.clip import modeling_clip

from fusion_bench_nufilt.utils.logs import quiet_requests

# FusionBench imports this class, which transformers 5 has merged into CLIPVisionModel.
vars(modeling_clip).setdefault("CLIPVisionTransformer", modeling_clip.CLIPVisionModel)

quiet_requests()

#: The owners of the data sets that FusionBench names without one, which huggingface_hub refuses
#: from version 1.16 on. This can go once FusionBench names them all (its main does for mnist and
#: svhn) and so do the pools of its users.
OWNERS = {
    "c4": "allenai",
    "glue": "nyu-mll",
    "mnist": "ylecun",
    "search_qa": "kyunghyuncho",
    "squad": "rajpurkar",
    "svhn": "ufldl-stanford",
    "wikitext": "Salesforce",
}


def _name_the_owner() -> None:
    """Have `datasets` load a data set of :data:`OWNERS` by its full name, wherever it is named
    without the owner.
    """
    # FusionBench says "glue" in its Python, where no configuration of ours could name the owner.
    find: Any = datasets.load.dataset_module_factory

    @wraps(find)
    def find_with_owner(path: str, *args: Any, **kwargs: Any) -> Any:
        # A local folder of that name is the user's own data set, which has no owner.
        if path in OWNERS and not os.path.exists(path):
            path = f"{OWNERS[path]}/{path}"
        return find(path, *args, **kwargs)

    datasets.load.dataset_module_factory = find_with_owner


_name_the_owner()


#: What a checkpoint of a whole CLIP, or SigLIP, has beside its vision tower.
_BESIDE_VISION = ("text_model.", "text_projection.", "visual_projection.", "logit_")


def _is_worth_a_report(record: logging.LogRecord) -> bool:
    """Tell whether a record of transformers is another one than the report that a vision tower has
    no place for the other parts of a whole CLIP, which a model pool's pretrained model often is.
    """
    title, *lines = record.getMessage().split("\n")
    if "VisionModel" not in title or "LOAD REPORT" not in title:
        return True
    rows = [line.split("|") for line in lines if "|" in line]
    for key, status, *_ in rows[1:]:  # below the header
        # A weight that is missing or of another shape is in such a row, too.
        if "UNEXPECTED" not in status or not key.startswith(_BESIDE_VISION):
            return True
    return False


logging.getLogger("transformers.modeling_utils").addFilter(_is_worth_a_report)


class Compatibility(Callback):
    """What Hydra makes at the start of a run whose pools are of this package
    (config/nufilt/compat.yaml), so that this module is imported before any class of FusionBench.
    """
