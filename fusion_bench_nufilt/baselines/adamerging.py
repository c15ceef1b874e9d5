"""Layer-wise AdaMerging as a continual method: FusionBench's own, shown the new task's images alone."""

from collections.abc import Iterator
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from fusion_bench import BaseModelPool
from fusion_bench.method.adamerging.clip_layer_wise_adamerging import CLIPLayerWiseAdaMergingAlgorithm
from fusion_bench.models.hf_clip import HFCLIPClassifier
from fusion_bench.taskpool import CLIPVisionModelTaskPool
from fusion_bench.tasks.clip_classification import get_classnames_and_templates
from fusion_bench.utils.data import InfiniteDataLoader
from omegaconf import DictConfig
from torch import nn
from torch.utils.data import DataLoader

_AdaMerging: Any = CLIPLayerWiseAdaMergingAlgorithm  # its annotations are still those of FusionBench 0.1


class NewTaskAdaMergingAlgorithm(_AdaMerging):
    """Layer-wise AdaMerging (Yang et al., ICLR 2024) of CLIP vision towers, adapted to the last model's task.

    One weight for each layer and task vector, trained to make the merged model's predictions on unlabelled test images
    certain (least entropy). FusionBench's algorithm asks the model pool for images and text tower and adapts to all its
    models' tasks; here both come from the task pool, and only the pool's last model, the new one, has its turn.

    Args:
        init_values: of the layers' weights.
        lr: of Adam.
        max_steps: steps of Adam, a batch each.
        batch_size: images in a batch.
        seed: of the order of the images.
    """

    def __init__(
        self,
        init_values: float = 0.3,
        lr: float = 1e-4,
        max_steps: int = 50,
        batch_size: int = 16,
        seed: int = 42,
    ) -> None:
        training = {"optimizer": "adam", "lr": lr, "max_steps": max_steps, "batch_size": batch_size, "seed": seed}
        model = {"weights": None, "init_values": init_values, "clamp_weights": False, "tie_weights": True}
        super().__init__(DictConfig(training | model | {"strict": False}))

    @torch.enable_grad()
    def run(self, modelpool: BaseModelPool, **kwargs: Any) -> nn.Module:
        """Merge all models of a pool at once; neither they nor the pretrained model are changed.

        Raises:
            ValueError: no task pool for CLIP vision towers, or one without the last model's task.
        """
        names = modelpool.model_names
        self.taskpool = None if self._program is None else self._program.taskpool
        if not isinstance(self.taskpool, CLIPVisionModelTaskPool) or names[-1] not in self.taskpool._test_datasets:
            raise ValueError(f"AdaMerging needs a CLIPVisionModelTaskPool with test images of '{names[-1]}'")
        # FusionBench writes into the models, and gives a weight to parameters that require a gradient.
        copies = {name: deepcopy(modelpool.load_model(name)).requires_grad_() for name in ("_pretrained_", *names)}
        module = self.construct_layer_wise_merged_model(BaseModelPool(copies))
        self.modelpool = SimpleNamespace(model_names=names[-1:])
        return self.test_time_adaptation(module).merge_and_unload().requires_grad_()

    def on_test_time_adaptation_start(self) -> None:
        pool: Any = self.taskpool
        (task,) = self.modelpool.model_names
        if not pool._is_setup:
            pool.setup()
        # Not FusionBench's own set-up of the head: it keeps heads on disk by the CLIP's path, whatever lies there now.
        classifier = HFCLIPClassifier(pool.clip_model, pool.processor)
        classifier.set_classification_task(*get_classnames_and_templates(task))
        self.zeroshot_weights = {task: classifier.zeroshot_weights}
        self.visual_projection = pool.clip_model.visual_projection
        self.logit_scale_exp = pool.clip_model.logit_scale.exp()
        order = torch.Generator().manual_seed(self.config.seed)
        images = DataLoader(pool.test_datasets[task], batch_size=self.config.batch_size, shuffle=True, generator=order)
        self._batches = iter(InfiniteDataLoader(self.fabric.setup_dataloaders(images)))

    def get_shuffled_test_loader_iter(self, task: str) -> Iterator[Any]:
        return self._batches
