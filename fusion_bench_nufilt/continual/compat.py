"""Importing this module makes FusionBench up to 0.2.33 work with today's transformers and
huggingface_hub, which happens where a method, a model pool or a task pool of this package is used.
"""

import os
from functools import wraps
from typing import Any

import datasets.load
from hydra.experimental.callback import Callback
from transformers import CLIPVisionModel, SiglipVisionModel
from transformers.models.clip import modeling_clip

from fusion_bench_nufilt.utils.logs import quiet_requests

# FusionBench imports this class, which transformers 5 has merged into CLIPVisionModel.
vars(modeling_clip).setdefault("CLIPVisionTransformer", CLIPVisionModel)

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


# A model pool's pretrained model is often a whole CLIP, or SigLIP, loaded as its vision tower:
# transformers would report that the tower has no place for the other parts.
for _tower in (CLIPVisionModel, SiglipVisionModel):
    _tower._keys_to_ignore_on_load_unexpected = [
        r"^(text_model|text_projection|visual_projection)\.",
        r"^logit_(scale|bias)$",
    ]


class Compatibility(Callback):
    """What Hydra makes at the start of a run whose pools are of this package
    (config/nufilt/compat.yaml), so that this module is imported before any class of FusionBench.
    """
