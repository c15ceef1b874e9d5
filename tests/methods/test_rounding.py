"""NUFILT and the rounding of models in 16 bits."""

import pytest
import torch

from fusion_bench_nufilt import FusionConfig, fuse_layers
from fusion_bench_nufilt.merge.engine import do_jobs
from fusion_bench_nufilt.merge.fuse import machine_on, matrix_jobs, merge_matrices
from fusion_bench_nufilt.methods import ORDER_FREE, find_method
from fusion_bench_nufilt.methods.nufilt import Nufilt
from fusion_bench_nufilt.methods.task_vector import TaskVector
from fusion_bench_nufilt.nufilt import LowRank
from fusion_bench_nufilt.nufilt.noise import (
    ROUNDING_VARIANCE,
    Noise,
    above_noise,
    expected_noise,
    rounding_of,
    share_of_norm,
    summed_rounding,
)
from fusion_bench_nufilt.nufilt.subspace import top_right_singular_vectors
from tests.pairs import pairs

WIDTH = 192
BFLOAT16 = ROUNDING_VARIANCE * torch.finfo(torch.bfloat16).eps ** 2
CONFIG = FusionConfig(null_rank=64, lora_rank=8, task_rank=4)


def drawn(*shape, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator)


def adapter(seed, rank=8):
    return LowRank(
        drawn(WIDTH, rank, seed=seed, scale=0.02), drawn(rank, WIDTH, seed=seed + 50, scale=0.05)
    )


THETA_0 = drawn(WIDTH, WIDTH, seed=0, scale=0.04).bfloat16()


def merged_in(dtype, seed):
    """The weight of a model with an adapter merged into its base."""
    return (THETA_0.float() + adapter(seed).product()).to(dtype)


def reports_of(base, tasks):
    """What the steps of one merge measured."""
    reports = []
    jobs = matrix_jobs(Nufilt(CONFIG, ["layer"]), base, tasks)
    list(do_jobs(jobs, machine_on("cpu"), lambda record, _: reports.extend(record["reports"])))
    return reports


def merged_by(method, base, tasks):
    """The weight that a method makes of tasks, with its own options but for NUFILT's ranks."""
    method_class = find_method(method)
    options = CONFIG if method == "nufilt" else method_class.Options()
    rule = method_class(options, ["layer"])
    return merge_matrices(rule, {"layer": base}, [{"layer": task} for task in tasks])["layer"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_filter_protects_no_rounding_of_models_in_16_bits(dtype):
    """Of an unrelated adapter it took a third, by 56 directions of rounding. Weights may be stored
    in 16 bits, or read in float32 by a pool whose entry says so; a second task that was never
    rounded changes nothing of what the first one rounded.
    """
    shares = {}
    for base_dtype, *dtypes in (
        (dtype, dtype, dtype),
        (torch.float32, dtype, dtype),
        (torch.float32, dtype, torch.float32),
        (torch.float32, torch.float32, torch.float32),
    ):
        base = {"layer": THETA_0.to(dtype).to(base_dtype)}
        tasks = []
        for seed, task_dtype in enumerate(dtypes, 1):
            tasks.append({"layer": merged_in(task_dtype, seed).to(base_dtype)})
        second = reports_of(base, tasks)[1]
        assert second["protected_rank"] == 8
        shares[base_dtype, *dtypes] = second["filtered_share"]
    in_float32 = shares.pop((torch.float32,) * 3)
    assert list(shares.values()) == pytest.approx([in_float32] * 3, rel=0.15)


def test_factors_and_tasks_in_float32_have_all_their_directions_on_a_base_in_16_bits():
    """They began with the values that are stored, and none of their own were rounded; so has a full
    model, whose directions are strong.
    """
    left, right = torch.linalg.qr(drawn(2, WIDTH, 64, seed=1, scale=1.0)).Q
    factors = LowRank(2e-4 * left, right.mT.contiguous())
    weak = {"layer": THETA_0.float() + factors.product()}
    full = {"layer": (THETA_0.float() + drawn(WIDTH, WIDTH, seed=1, scale=0.004)).bfloat16()}
    for base in (THETA_0, THETA_0.float()):
        for first in (weak, full, {"layer": factors}):
            reports = reports_of({"layer": base}, [first, {"layer": merged_in(torch.float32, 2)}])
            assert reports[1]["protected_rank"] == 64


@pytest.mark.parametrize("base", [THETA_0, THETA_0.float()], ids=["bfloat16", "float32"])
def test_what_earlier_tasks_rounded_is_not_protected_whatever_the_base_is_read_in(base):
    """With a base that was read in float32, the filter protected 48 directions for 24."""
    merged = {"layer": base}
    for step in range(1, 6):
        task = {"layer": merged_in(torch.bfloat16, step)}
        merged, reports = fuse_layers({"layer": base}, merged, task, CONFIG, step=step)
        least = 7 * (step - 1)
        assert least <= reports["layer"].protected_rank <= 8.4 * (step - 1)  # tasks of rank 8


#: Weights of the pretrained model, which are stored in 16 bits or rounded with the tasks, and whose
#: rows differ as much as a language model's, so that the rounding of some is stronger.
UNEVEN = (THETA_0.float() * drawn(WIDTH, 1, seed=9, scale=0.7).exp()).bfloat16().float()
IN_FLOAT32 = 1 + drawn(WIDTH, WIDTH, seed=8, scale=0.1)
PRETRAINED = {
    "exact": THETA_0.float(),
    "rounded": THETA_0.float() * IN_FLOAT32,
    "uneven": UNEVEN,
    "uneven, rounded": UNEVEN * IN_FLOAT32,
    "zeros": torch.zeros(WIDTH, WIDTH),
}


@pytest.mark.parametrize(
    ("method", "pretrained", "dtype"),
    pairs(["nufilt", *ORDER_FREE], PRETRAINED, [torch.bfloat16, torch.float16]),
)
def test_adapters_merged_into_16_bits_are_merged_as_in_float32(method, pretrained, dtype):
    """Also where the pretrained model was rounded with them, whose rounding all tasks have alike.
    Of zeros there is none, and that of float16 has less energy than sums of squares in float32 are
    wrong by.

    It was up to 40 % off, by NUFILT.
    """
    theta_0 = PRETRAINED[pretrained]
    tasks = [theta_0 + 2 * adapter(seed).product() for seed in (1, 2, 3, 4)]
    rounded = [task.to(dtype).float() for task in tasks]
    update = merged_by(method, theta_0, tasks) - theta_0
    base = theta_0.to(dtype).float()
    update_of_rounded = merged_by(method, base, rounded) - base
    assert (update_of_rounded - update).norm() < 0.1 * update.norm()


@pytest.mark.parametrize(("method", "most"), [("spectral", 0.45), ("best", 0.33)])
def test_weak_directions_of_a_full_model_count_where_more_of_them_is_the_task_than_rounding(
    method, most
):
    """Where rows are uneven, rounding is stronger in some directions than most of a task is, and
    without them the update was .67 and .40 off.
    """
    theta_0 = UNEVEN
    tasks = []
    for seed in (1, 2):
        U, V = torch.linalg.qr(drawn(2, WIDTH, WIDTH, seed=seed, scale=1.0)).Q
        tau = U * torch.arange(1, WIDTH + 1.0) ** -0.7 @ V.mT
        tasks.append(theta_0 + 0.02 * theta_0.norm() * tau / tau.norm())
    update = merged_by(method, theta_0, tasks) - theta_0
    rounded = [task.bfloat16().float() for task in tasks]
    update_of_rounded = merged_by(method, theta_0, rounded) - theta_0
    assert (update_of_rounded - update).norm() < most * update.norm()


#: How much stronger it may be expected, by the sides that are uneven.
MOST = {"none": 1.1, "rows": 1.2, "both": 1.4}


def uneven(sides, *, seed):
    """A weight whose rows, or rows and columns, differ as much as a language model's."""
    theta = drawn(384, 384, seed=seed, scale=0.04)
    if sides != "none":
        theta = theta * drawn(384, 1, seed=seed + 1, scale=0.7).exp()
    if sides == "both":
        theta = theta * drawn(1, 384, seed=seed + 2, scale=0.7).exp()
    return theta


@pytest.mark.parametrize(
    ("sides", "pretrained", "dtype"),
    pairs(MOST, ["exact", "rounded"], [torch.bfloat16, torch.float16]),
)
def test_the_strongest_direction_of_rounding_is_expected_as_strong_as_it_is(
    sides, pretrained, dtype
):
    """It was expected up to 70 % stronger, and hid as strong directions of tasks."""
    theta_0 = uneven(sides, seed=0)
    if pretrained == "exact":
        theta_0 = theta_0.to(dtype).float()
    update = 0.1 * uneven(sides, seed=5)
    base = theta_0.to(dtype)
    tau = (theta_0 + update).to(dtype).float() - base.float()
    errors = tau - update
    weights = 1 if pretrained == "exact" else 2
    energy, strongest = expected_noise(base, tau, weights * rounding_of(base))
    assert energy.item() == pytest.approx(errors.square().sum().item(), rel=0.1)
    ratio = (strongest.sqrt() / torch.linalg.matrix_norm(errors, 2)).item()
    assert 0.95 < ratio < MOST[sides]


def test_the_rounding_of_values_is_that_of_the_16_bits_that_hold_them_all():
    exact = drawn(64, 64, seed=0, scale=0.04)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        values = exact.to(dtype)
        error = (values.double() - exact.double()).square().mean() / exact.square().mean()
        for read_in in (dtype, torch.float32, torch.float64):
            assert rounding_of(values.to(read_in)) == pytest.approx(error.item(), rel=0.1)
    assert rounding_of(torch.zeros(4, 4)) == 0  # they tell nothing


def test_the_rounding_of_several_tasks_is_that_of_each_and_of_the_base_in_all_alike():
    rounding = 0.0
    for count in range(1, 21):
        rounding = summed_rounding(rounding, 2 * BFLOAT16)
        assert rounding == pytest.approx((count + count**2) * BFLOAT16)
    assert summed_rounding(rounding, 0.0) == rounding


def test_a_value_much_larger_than_all_others_has_its_own_rounding():
    """One such weight in a layer is no news in language models."""
    theta_0 = drawn(384, 384, seed=0, scale=0.04)
    strongest = []
    for number in range(20):
        theta_0[3, 5] = 3 + drawn(1, seed=number, scale=0.3).item()
        tau = theta_0.bfloat16().float() - theta_0
        errors = expected_noise(theta_0, tau, BFLOAT16)
        strongest.append(torch.linalg.matrix_norm(tau, 2).item() / errors.strongest.sqrt().item())
    assert max(strongest) < 1.1


def test_rows_that_a_task_left_as_they_were_have_no_rounding():
    """Such as the embeddings of tokens that it has never seen; they hid directions in others."""
    theta_0 = drawn(384, 192, seed=0, scale=0.04)
    theta_0[32:] *= 20
    theta_0 = theta_0.bfloat16().float()
    update = drawn(384, 4, seed=1, scale=0.02) @ drawn(4, 192, seed=2, scale=0.02)
    update[32:] = 0
    task = (theta_0 + update).bfloat16()
    directions = TaskVector(task, theta_0, rounding=2 * BFLOAT16).directions(64)
    assert int(directions.values.count_nonzero()) == 4


def test_the_subspace_of_a_task_has_no_rounding_of_the_pretrained_model_either():
    """Both tasks are one adapter, so that all of the second one's directions are protected."""
    theta_0 = THETA_0.float() * (1 + drawn(WIDTH, WIDTH, seed=8, scale=0.1))
    config = FusionConfig(null_rank=64, lora_rank=8, task_rank=64)
    tasks = [theta_0 + factor * adapter(1).product() for factor in (1.0, 1.5)]
    layers = [{"layer": weight.bfloat16()} for weight in (theta_0, *tasks)]
    _, reports = fuse_layers(*layers, config, step=2)
    assert reports["layer"].overlap > 0.95


def test_rounding_is_told_from_directions_that_are_much_stronger():
    """What is left beside them is less than what a norm in float32 is wrong by."""
    theta_0 = drawn(384, 384, seed=0, scale=0.04).bfloat16()
    factors = drawn(2, 384, 8, seed=1, scale=0.05)
    task = (theta_0.float() + 1.5 * factors[0] @ factors[1].mT).bfloat16()
    directions = TaskVector(task, theta_0, rounding=2 * BFLOAT16).directions(64)
    assert int(directions.values.count_nonzero()) == 8
    tau = task.float() - theta_0.float()
    noise = expected_noise(theta_0, tau, 2 * BFLOAT16)
    V = top_right_singular_vectors(tau, 64, noise=noise, float64=True)
    assert int(V.any(dim=0).sum()) == 8


def test_a_task_votes_without_rounding_also_where_all_of_its_leading_directions_count():
    """Of adapters of rank 32, the votes had all of the rounding: they were 0.37 off."""
    tasks = []
    for seed in range(3):
        update = adapter(seed, rank=32).product()
        tasks.append(THETA_0.float() + 0.08 * update / update.norm())
    update = merged_by("best", THETA_0.float(), tasks) - THETA_0.float()
    rounded = [task.bfloat16().float() for task in tasks]
    difference = merged_by("best", THETA_0.float(), rounded) - THETA_0.float() - update
    assert difference.norm() < 0.15 * update.norm()


def test_directions_of_exactly_low_rank_stand_above_any_rounding():
    """Such as those of factors that were never rounded, however weak the last of them is."""
    squares = torch.tensor([[1.0, 1e-2, 1e-6]])
    strongest = 0.5 * share_of_norm(torch.ones(100), torch.ones(100)).item()
    noise = Noise(torch.tensor([0.5]), torch.tensor([strongest]))
    assert above_noise(squares, squares.sum(dim=-1), noise, 100, 100).all()
    rest = squares.sum(dim=-1) + 0.02
    assert above_noise(squares, rest, noise, 100, 100).tolist() == [[True, True, False]]


def test_weak_factors_are_as_much_in_the_way_of_a_base_in_bfloat16_as_of_one_in_float32():
    """They were never rounded to its digits, and have all of their directions, here half of
    the width at equal strength, below the edge of the base's rounding.
    """
    theta_0 = THETA_0[:32, :32]
    left, right = torch.linalg.qr(drawn(2, 32, 16, seed=1, scale=1.0)).Q
    factors = LowRank(2e-4 * left, right.mT.contiguous())
    so_far = theta_0.float() + drawn(32, 3, seed=2, scale=0.2) @ drawn(3, 32, seed=3, scale=0.2)
    config = FusionConfig(null_rank=3, lora_rank=4, task_rank=6)
    overlaps = []
    for base in (theta_0, theta_0.float()):
        _, reports = fuse_layers({"w": base}, {"w": so_far}, {"w": factors}, config, step=2)
        overlaps.append(reports["w"].overlap)
    assert overlaps[0] == overlaps[1]


def test_the_layers_of_one_merge_are_rounded_once():
    """They were rounded after each task: 7 % of an update after two."""
    base = {"layer": THETA_0}
    tasks = [{"layer": merged_in(torch.bfloat16, seed)} for seed in (1, 2, 3)]
    at_once = merge_matrices(Nufilt(CONFIG, ["layer"]), base, tasks)["layer"]
    merged = {"layer": THETA_0.float()}
    for step, task in enumerate(tasks, 1):
        merged, _ = fuse_layers(base, merged, task, CONFIG, step=step)
    assert at_once.dtype == torch.bfloat16
    assert torch.equal(at_once, merged["layer"].bfloat16())
