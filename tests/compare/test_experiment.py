"""What the runs of a comparison share."""

import torch
import transformers as hf
from fusion_bench import BaseModelPool

from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.compare.experiment import Experiment
from tests.tiny_models import SMALL, build


def test_a_head_that_a_checkpoint_lacks_and_that_is_drawn_at_random_does_not_change_the_digests(
    tmp_path,
):
    model = build(
        hf.BertModel, hf.BertConfig(**SMALL, vocab_size=40, max_position_embeddings=16), 0
    )
    model.save_pretrained(tmp_path)
    entry = {
        "_target_": "transformers.AutoModelForSequenceClassification.from_pretrained",
        "pretrained_model_name_or_path": str(tmp_path),
    }
    digests = []
    for seed in (1, 2):
        experiment = Experiment(compose_run(["modelpool=nufilt_demo"]))
        experiment.modelpool = BaseModelPool({"_pretrained_": entry, "one": entry})
        torch.manual_seed(seed)
        digests.append(experiment.digests)
    assert digests[0] == digests[1]
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight += 1
    model.save_pretrained(tmp_path)
    experiment = Experiment(compose_run(["modelpool=nufilt_demo"]))
    experiment.modelpool = BaseModelPool({"_pretrained_": entry, "one": entry})
    assert experiment.digests != digests[0]
