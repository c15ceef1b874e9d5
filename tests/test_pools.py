"""FusionBench's model pools that need Python 3.12, on tiny checkpoints in folders; other pools have tests elsewhere."""

import pytest
import torch
from fusion_bench import modelpool
from omegaconf import OmegaConf
from transformers import ConvNextImageProcessor

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.layers import TargetConfig, coverage, select_layers
from tests.families import FAMILIES
from tests.folders.helpers import RANKS
from tests.models import finetuned


def algorithm(models):
    return NufiltContinualMergingAlgorithm(**RANKS, shuffle_order=False).run(models).state_dict()


@pytest.mark.parametrize("family", ["resnet", "convnext", "dinov2"])
def test_a_pool_gives_what_a_dict_of_models_gives(tmp_path, family):
    name = {"resnet": "ResNet", "convnext": "ConvNext", "dinov2": "Dinov2"}[family] + "ForImageClassificationPool"
    try:
        pool_class = getattr(modelpool, name)
    except ImportError as error:
        pytest.skip(f"FusionBench can't load {name} on this Python: {error}")
    base = FAMILIES[family]()
    models = {"_pretrained_": base, "one": finetuned(base, 1), "two": finetuned(base, 2)}
    for task, model in models.items():
        model.save_pretrained(tmp_path / task)
        ConvNextImageProcessor().save_pretrained(tmp_path / task)
    paths = {task: str(tmp_path / task) for task in models}
    entries = {task: {"config_path": path, "pretrained": True, "dataset_name": None} for task, path in paths.items()}
    options = {"type": "transformers"} if family == "resnet" else {}
    no_data = dict.fromkeys(("train_datasets", "val_datasets", "test_datasets"))
    pool = pool_class(models=OmegaConf.create(paths if family == "convnext" else entries), **no_data, **options)
    merged, expected = algorithm(pool), algorithm(models)
    assert all(torch.equal(value, expected[key]) for key, value in merged.items())


def test_open_clips_own_vision_tower():
    transformer = pytest.importorskip("open_clip.transformer", reason="needs open_clip_torch", exc_type=ImportError)
    with torch.device("meta"):
        tower = torch.nn.ModuleDict(
            {"visual": transformer.VisionTransformer(224, 32, 768, 12, 12, 4.0, output_dim=512)}
        )
    layers = select_layers(tower)
    assert len(layers) == 12 * 5
    assert coverage(tower, layers, TargetConfig()).left_out == {"visual.transformer.resblocks.*.mlp.c_proj.weight": 12}
