"""Models in memory as the sources of a merge: what is refused, and what becomes of the rest of
them.
"""

import pytest
import torch
from torch import nn

from fusion_bench_nufilt import LayerwiseMergingAlgorithm
from fusion_bench_nufilt.models import select_layers
from fusion_bench_nufilt.models.fit import check_module
from tests.tiny_models import TOWER, Shared, clip, finetuned, tower


def keys(model, target="auto"):
    return [view.key for view in select_layers(model, target).values()]


def merge(base, *models, **options):
    """Return the merged tensors, and the number of models in the mean of each that is outside the
    merged layers.
    """
    options = {"other_params": "mean", **options}
    algorithm = LayerwiseMergingAlgorithm("sum", shuffle_order=False, **options)
    pool = {"_pretrained_": base}
    for number, model in enumerate(models):
        pool[f"task{number}"] = model
    merged = algorithm.run(pool)
    return merged.state_dict(), algorithm._mean_counts


def test_a_model_of_another_size_is_refused_by_name_layer_and_shape():
    # A method of FusionBench has no option that leaves layers out, so that none is advised.
    with pytest.raises(ValueError, match=r"model 'svhn' lacks '.*: layers that it lacks: 13$"):
        check_module(clip(), nn.Linear(2, 2), "svhn")
    other = clip()
    tower(other).encoder.layers[1].mlp.fc1.weight = nn.Parameter(torch.zeros(3, 32))
    message = r"model 'svhn', tensor '.*layers\.1\.mlp\.fc1.*': shape \(3, 32\)"
    with pytest.raises(ValueError, match=message):
        check_module(clip(), other, "svhn")


def test_no_option_is_advised_for_a_tensor_of_another_shape_where_there_is_none():
    other = clip()
    tower(other).post_layernorm.bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"bias': shape \(3,\) .*, or it is a head$"):
        check_module(clip(), other, "svhn")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("name", ["mlp.fc1.weight", "layer_norm1.bias"])
def test_values_that_are_not_finite_are_refused_by_name(value, name):
    other = clip()
    parameter = other.get_parameter(f"{TOWER}encoder.layers.0.{name}")
    parameter.data.view(-1)[3] = value
    with pytest.raises(ValueError, match=rf"model 'svhn'.*{name}.*NaN or infinite"):
        check_module(clip(), other, "svhn")


def test_a_buffer_of_infinities_is_refused_only_where_it_would_be_written():
    """A causal mask is such a buffer."""
    base = clip()
    base.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
    merge(base, finetuned(base, 1), other_params="pretrained")
    for other_params in ("first", "mean"):
        message = "model 'task0', tensor 'mask' has NaN or infinite values"
        with pytest.raises(ValueError, match=message):
            merge(base, finetuned(base, 1), other_params=other_params)


def test_the_mean_is_of_everything_outside_the_merged_layers():
    base = clip()
    models = [finetuned(base, seed) for seed in (1, 2, 3)]
    merged, counts = merge(base, *models, target_modules="auto")
    rest = [key for key, _ in base.named_parameters() if key not in keys(base)]
    for key in rest:
        mean = torch.stack([model.state_dict()[key] for model in models]).mean(0)
        torch.testing.assert_close(merged[key], mean)
    assert counts == dict.fromkeys(rest, 3)


def test_the_mean_writes_a_tied_parameter_once():
    base = Shared()
    models = [finetuned(base, seed) for seed in (1, 2)]
    merged, counts = merge(base, *models, target_modules=["first"])
    assert counts == {"embedding.weight": 2}  # which is also the head's
    mean = torch.stack([model.embedding.weight.data for model in models]).mean(0)
    torch.testing.assert_close(merged["embedding.weight"], mean)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int16, torch.float8_e5m2])
def test_buffers_of_any_dtype_stay(dtype):
    """Rotary frequencies may be complex, and whole numbers are no weights."""
    base = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    base.register_buffer("frequencies", torch.ones(3).to(dtype))
    task = finetuned(base, 1)
    task[1].num_batches_tracked += 5
    merged, _ = merge(base, task, target_modules="all-linear")
    assert torch.equal(merged["frequencies"].to(torch.complex64), torch.ones(3).to(torch.complex64))
    assert merged["1.num_batches_tracked"] == 0
