"""Eight small tasks and a tiny CLIP, which are made on the spot, without a download.

The first load draws the pictures, pretrains the CLIP and fine-tunes it eight times, which takes a minute or two, and
keeps them in a cache folder; every later one reads from there. `config/modelpool/nufilt_demo.yaml` and
`config/taskpool/nufilt_demo.yaml` hand the loaders to FusionBench's own CLIP pools.
"""

from fusion_bench_nufilt.taskpools.local_tasks import register_task

from .build import (
    demo_folder,
    load_clip,
    load_processor,
    load_test_dataset,
    load_train_dataset,
    load_vision_model,
    to_pixels,
)
from .tasks import TASKS

__all__ = [
    "TASKS",
    "demo_folder",
    "load_clip",
    "load_processor",
    "load_test_dataset",
    "load_train_dataset",
    "load_vision_model",
    "to_pixels",
]

# FusionBench's task pool asks its registry for class names and prompts.
for _name, _task in TASKS.items():
    register_task(_name, _task.classes, _task.template)
