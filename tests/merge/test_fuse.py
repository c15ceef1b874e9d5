"""Laws of one merging step."""

import dataclasses
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion_bench_nufilt import fuse_layers
from fusion_bench_nufilt.merge import engine
from fusion_bench_nufilt.methods import nufilt
from fusion_bench_nufilt.methods.nufilt import Nufilt
from fusion_bench_nufilt.nufilt import FusionConfig
from fusion_bench_nufilt.utils.devices import warn_once
from tests.conftest import every_device
from tests.merge.helpers import same
from tests.nufilt.matrices import matrix_with_spectrum, random_layer

CONFIG = FusionConfig(null_rank=6, lora_rank=4, task_rank=3, lr=1e-2, max_steps=12)
SHAPES = {"tall": (20, 12), "other": (12, 12), "wide": (8, 30), "tall_too": (20, 12)}

layers = st.builds(random_layer, st.integers(1, 20), st.integers(1, 20), st.integers(0, 2**16))


def models(dtype=torch.float64, shapes=SHAPES):
    """The layers of a pretrained model, of a merged one and of a task's."""
    streams = [{}, {}, {}]
    for seed, (name, shape) in enumerate(shapes.items()):
        for model, weight in zip(streams, random_layer(*shape, seed, dtype), strict=True):
            model[name] = weight
    return streams


def fuse_one(theta_0, theta, theta_t, config=CONFIG, **kwargs):
    fused, reports = fuse_layers({"w": theta_0}, {"w": theta}, {"w": theta_t}, config, **kwargs)
    return fused["w"], reports["w"]


def only(name, models):
    return [{name: model[name]} for model in models]


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


# --- what the result is ---


@pytest.mark.parametrize("null_space", [True, False, "zero"])
@pytest.mark.parametrize("shape", [(20, 12), (8, 30)])
def test_the_fused_weight_is_w_plus_tau_times_p_plus_ba(shape, null_space):
    """Everything is recomputed here the long way: full SVD, P formed, both gradients by autograd,
    torch's Adam.
    """
    theta_0, theta, theta_t = random_layer(*shape, seed=3)
    tau = theta_t - theta_0
    tau_merged = theta - theta_0
    d_i = shape[1]
    A = torch.linspace(-0.05, 0.05, 4 * d_i, dtype=torch.float64).reshape(4, d_i)

    V_p = torch.linalg.svd(tau_merged, full_matrices=False).Vh[:6].mT
    V_t = torch.linalg.svd(tau, full_matrices=False).Vh[:3].mT
    identity = torch.eye(d_i, dtype=torch.float64)
    P = {True: identity - V_p @ V_p.mT, False: identity, "zero": 0 * identity}[null_space]
    a = A.clone().requires_grad_()
    b = torch.zeros(d_i, 4, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([a, b], lr=CONFIG.lr)
    for _ in range(CONFIG.max_steps):
        after = tau_merged + tau @ (P + b @ a)
        task_loss = ((tau - after) @ V_t).square().sum()
        merged_loss = ((tau_merged - after) @ V_p).square().sum()
        loss = task_loss + merged_loss
        adam.zero_grad()
        loss.backward()
        adam.step()
    expected = theta + tau @ (P + b @ a).detach()

    config = replace(CONFIG, null_space=null_space)
    fused, report = fuse_one(theta_0, theta, theta_t, config, lora_A={"w": A})
    close(fused, expected)
    assert report.task_norm == pytest.approx(tau.norm().item())
    assert report.merged_norm == pytest.approx(tau_merged.norm().item())
    filtered_share = ((tau - tau @ P).norm() / tau.norm()).item() ** 2
    assert report.filtered_share == pytest.approx(filtered_share, abs=1e-9)
    assert report.overlap == pytest.approx((V_p.mT @ V_t).square().sum().item() / 3)
    assert report.protected_rank == min(6, *shape)


@given(layers, st.integers(0, 40), st.integers(0, 8), st.integers(0, 40))
def test_a_layer_without_an_update_takes_the_task_weight_as_it_is(
    layer, null_rank, lora_rank, task_rank
):
    theta_0, _, theta_t = layer
    config = replace(CONFIG, null_rank=null_rank, lora_rank=lora_rank, task_rank=task_rank)
    assert torch.equal(fuse_one(theta_0, theta_0, theta_t, config, step=5)[0], theta_t)


def test_the_first_step_solves_nothing(monkeypatch):
    for work in ("top_right_singular_vectors", "loop_gram"):
        monkeypatch.delattr(f"fusion_bench_nufilt.nufilt.step.{work}")
    theta_0, _, theta_t = random_layer(20, 12, seed=0)
    _, report = fuse_one(theta_0, theta_0, theta_t)
    assert report.task_norm == pytest.approx((theta_t - theta_0).norm().item())
    assert set(dataclasses.astuple(report)[4:]) == {0}


@given(layers, st.sampled_from([True, False]))
def test_an_unchanged_task_changes_nothing(layer, null_space):
    theta_0, theta, _ = layer
    fused, report = fuse_one(theta_0, theta, theta_0, replace(CONFIG, null_space=null_space))
    assert torch.equal(fused, theta)
    assert report.filtered_share == 0


@given(layers)
def test_without_filter_and_adapter_the_task_vector_is_added(layer):
    theta_0, theta, theta_t = layer
    naive = replace(CONFIG, null_space=False, lora_rank=0)
    close(fuse_one(theta_0, theta, theta_t, naive)[0], theta + theta_t - theta_0)


@given(layers, st.sampled_from([True, False, "zero"]))
def test_a_task_rank_of_zero_means_no_adapter(layer, null_space):
    config = replace(CONFIG, null_space=null_space)
    without_adapter = fuse_one(*layer, replace(config, lora_rank=0))[0]
    assert torch.equal(fuse_one(*layer, replace(config, task_rank=0))[0], without_adapter)


@given(layers, st.floats(1e-2, 1e2))
def test_filter_only_is_linear_in_the_task_vector(layer, scale):
    theta_0, theta, theta_t = layer
    filter_only = replace(CONFIG, lora_rank=0)
    update = fuse_one(theta_0, theta, theta_t, filter_only)[0] - theta
    scaled = fuse_one(theta_0, theta, theta_0 + scale * (theta_t - theta_0), filter_only)[0] - theta
    close(scaled, scale * update, tolerance=1e-8 * scale)


def test_the_released_first_task_is_filtered_by_coordinates_and_has_no_adapter():
    theta_0, theta, theta_t = random_layer(20, 12, seed=0)
    config = replace(CONFIG, first_task="release")
    fused, _ = fuse_one(theta_0, theta_0, theta_t, config)
    expected = theta_t.clone()
    expected[:, :6] = theta_0[:, :6]
    close(fused, expected)
    second, _ = fuse_one(theta_0, theta, theta_t, config)
    expected, _ = fuse_one(theta_0, theta, theta_t, CONFIG)
    close(second, expected)


# --- what the result does not depend on ---


@pytest.mark.parametrize("solver", ["adam", "closed_form"])
def test_a_layer_does_not_depend_on_its_company_or_order(solver):
    config = replace(CONFIG, solver=solver)
    streams = models()
    together, _ = fuse_layers(*streams, config, seed=1, step=2)
    backwards = [dict(reversed(model.items())) for model in streams]
    reordered, _ = fuse_layers(*backwards, config, seed=1, step=2)
    assert list(reordered) == list(reversed(together))
    for name in SHAPES:
        alone, _ = fuse_layers(*only(name, streams), config, seed=1, step=2)
        assert torch.equal(alone[name], together[name])
        assert torch.equal(reordered[name], together[name])


@every_device
@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("solver", ["adam", "closed_form"])
def test_a_layer_in_a_stack_is_the_layer_alone(n, solver, device, monkeypatch):
    """On an accelerator, layers of a shape are solved together, with the same result to
    rounding.
    """
    config = replace(CONFIG, solver=solver, max_steps=5)
    monkeypatch.setattr(engine, "batch_size", lambda *_: n)
    shapes = {f"layer{number}": (20, 12) for number in range(7)}
    pretrained, merged, task = models(shapes=shapes)
    merged["layer2"] = pretrained["layer2"]  # into this one, nothing was merged
    stacked, reports = fuse_layers(pretrained, merged, task, config, device=device)
    assert torch.equal(stacked["layer2"], task["layer2"])
    for name in shapes:
        alone, report = fuse_layers(*only(name, (pretrained, merged, task)), config, device="cpu")
        tau = task[name] - pretrained[name]
        assert (stacked[name] - alone[name]).norm() <= 1e-9 * tau.norm()
        # All but the shape and the seconds.
        measures = dataclasses.astuple(reports[name])[3:]
        assert measures == pytest.approx(dataclasses.astuple(report[name])[3:], abs=1e-9)


def test_layers_whose_bases_have_two_dtypes_are_no_stack(monkeypatch, note_calls):
    """Whatever the merged weights are in: the rounding of one base is not that of another."""
    monkeypatch.setattr(engine, "batch_size", lambda *_: 3)
    streams = models(shapes={"a": (20, 12), "b": (20, 12), "c": (20, 12)})
    streams[0]["b"] = streams[0]["b"].bfloat16()
    together = note_calls(Nufilt, "update", lambda method, *_: list(method.names))
    fuse_layers(*streams, CONFIG)
    assert sorted(together) == [["a", "c"], ["b"]]


@pytest.fixture
def torch_settings():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_the_number_of_threads_does_not_change_a_bit(torch_settings):
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(fuse_layers(*models(torch.float32), CONFIG)[0])
        assert torch.get_num_threads() == threads
    assert same(results[1], results[0])
    assert same(results[2], results[0])


def test_seed_step_and_name_each_draw_another_adapter():
    layer = random_layer(20, 12, seed=0)
    fused, _ = fuse_one(*layer, seed=1, step=2)
    again, _ = fuse_one(*layer, seed=1, step=2)
    other_seed, _ = fuse_one(*layer, seed=2, step=2)
    other_step, _ = fuse_one(*layer, seed=1, step=3)
    renamed = [{"v": weight} for weight in layer]
    other_name, _ = fuse_layers(*renamed, CONFIG, seed=1, step=2)
    assert torch.equal(again, fused)
    for other in (other_seed, other_step, other_name["v"]):
        assert not torch.equal(other, fused)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_and_cast_back_once(dtype):
    narrow = models(dtype)
    fused, _ = fuse_layers(*narrow, CONFIG)
    wide = []
    for model in narrow:
        wide.append({name: weight.float() for name, weight in model.items()})
    expected, _ = fuse_layers(*wide, CONFIG)
    assert same(fused, {name: weight.to(dtype) for name, weight in expected.items()})


def test_progress_hears_of_every_layer_and_weights_and_reports_come_in_order():
    finished = []
    fused, reports = fuse_layers(*models(), CONFIG, progress=finished.append)
    assert sorted(finished) == sorted(SHAPES)
    assert list(fused) == list(reports) == list(SHAPES)
    shapes = set()
    for report in reports.values():
        assert report.seconds > report.solving_seconds > 0
        assert report.loss_after <= report.loss_before
        shapes.add(tuple(dataclasses.asdict(report)["shape"]))
    assert shapes == set(SHAPES.values())


# --- what goes wrong on a device ---


def test_float64_computes_a_layer_of_low_rank_without_alarm(caplog):
    theta_0, _, theta_t = random_layer(40, 40, seed=0)
    spectrum = torch.logspace(0, -6, 40).double()  # on which float32 fails
    tau_merged = matrix_with_spectrum(40, 40, spectrum, seed=1).float()
    tau = (theta_t - theta_0).float()
    layer = [torch.zeros(40, 40), tau_merged, tau]
    config = replace(CONFIG, null_rank=20)
    for name in ("other", "steep"):
        fused, _ = fuse_layers(*[{name: weight} for weight in layer], config)
    exact, _ = fuse_layers(*[{"steep": weight.double()} for weight in layer], config)
    assert (fused["steep"] - exact["steep"]).norm() / tau.norm() < 1e-5
    assert caplog.records == []


@pytest.mark.parametrize(
    "error",
    [
        torch.linalg.LinAlgError("linalg.eigh: the algorithm failed to converge"),
        RuntimeError(
            "cusolver error: CUSOLVER_STATUS_INVALID_VALUE, when calling `cusolverDnXsyevBatched`"
        ),
    ],
)
def test_an_eigenvalue_solver_that_fails_is_tried_again_layer_by_layer_and_on_the_cpu(
    error, monkeypatch, caplog
):
    """A solver on a device may fail on a whole stack."""
    solve = nufilt.fuse_stack
    attempts = []

    def failing(theta_0, *args, **kwargs):
        attempts.append((len(theta_0), theta_0.dtype))
        if theta_0.dtype == torch.float32:
            raise error
        return solve(theta_0, *args, **kwargs)

    warn_once.cache_clear()
    shapes = {"a": (20, 12), "b": (20, 12)}
    stream = models(torch.float32, shapes)
    expected, _ = fuse_layers(*stream, CONFIG)
    monkeypatch.setattr(nufilt, "fuse_stack", failing)
    monkeypatch.setattr(engine, "batch_size", lambda *_: 2)
    fused, _ = fuse_layers(*stream, CONFIG)
    in_float32, in_float64 = (1, torch.float32), (1, torch.float64)
    both = (2, torch.float32)
    assert attempts == [both, in_float32, in_float64, in_float32, in_float64]
    for name in shapes:
        assert fused[name].dtype == torch.float32
        assert (fused[name] - expected[name]).norm() < 1e-4 * expected[name].norm()
    assert len(caplog.records) == 2


# --- bad input ---


@pytest.mark.parametrize(
    ("name", "weight", "message"),
    [
        ("wide", None, r" lacks layer 'wide' \(8, 30\)"),
        ("wide", torch.zeros(8, 31), r", layer 'wide': shape \(8, 31\) differs .* \(8, 30\)"),
        (
            "wide",
            torch.zeros(8, 30, dtype=torch.int64),
            r", layer 'wide': expected a floating-point matrix",
        ),
        ("wide", torch.full((8, 30), float("nan")), r", layer 'wide': .*NaN or infinite"),
        ("new", torch.zeros(2, 2), r" has layers that the pretrained model lacks: \['new'\]"),
    ],
)
def test_a_bad_layer_is_refused_by_model_name_and_shape(name, weight, message):
    pretrained, merged, task = models()
    if weight is None:
        del task[name]
    else:
        task[name] = weight
    with pytest.raises(ValueError, match=f"model 'task'{message}"):
        fuse_layers(pretrained, merged, task, CONFIG)


def test_an_initial_a_of_another_shape_is_refused():
    message = r"lora_A of layer 'w': expected shape \(4, 12\), got \(5, 12\)"
    with pytest.raises(ValueError, match=message):
        fuse_one(*random_layer(20, 12, seed=0), lora_A={"w": torch.zeros(5, 12)})


def test_the_models_are_free_as_soon_as_they_are_merged():
    """They are so without the garbage collector, so that a merge of many layers holds only those at
    work.
    """
    models = [{"layer": torch.randn(6, 5)} for _ in range(3)]
    weights = [weakref.ref(model["layer"]) for model in models]
    gc.collect()
    gc.disable()
    try:
        fused, _ = fuse_layers(*models, FusionConfig(null_rank=2, lora_rank=2, max_steps=2))
        del models
        assert [weight() for weight in weights] == [None] * 3
    finally:
        gc.enable()
    assert fused["layer"].shape == (6, 5)
