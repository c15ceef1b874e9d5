"""What the words on the command line mean."""

import re

import pytest

from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.compare.presets import (
    SENSITIVITY,
    panel_specs,
    preset_specs,
)
from fusion_bench_nufilt.compare.specs import RunSpec, check_specs, parse_methods, parse_seeds
from fusion_bench_nufilt.methods import METHODS, ORDER_FREE
from fusion_bench_nufilt.nufilt import FusionConfig
from fusion_bench_nufilt.utils.files import file_name
from fusion_bench_nufilt.utils.overrides import key_of, key_value, without_method


def test_methods_are_separated_by_commas_outside_brackets():
    first, second = parse_methods("nufilt:target_modules=[q_proj,v_proj]:null_rank=21, opcm")
    assert first.overrides == (
        "method=nufilt",
        "method.target_modules=[q_proj,v_proj]",
        "method.null_rank=21",
    )
    assert second == RunSpec("opcm", ("method=continual/opcm",), "opcm")


def test_a_label_stands_before_the_name():
    specs = parse_methods("NUFILT (21/10, ours)=nufilt:null_rank=21, nufilt/naive")
    assert [spec.label for spec in specs] == ["NUFILT (21/10, ours)", "nufilt/naive"]
    assert specs[0].settings == ("null_rank=21",)


def test_a_variant_of_nufilt_stays_what_its_name_says_under_overrides_for_all():
    everywhere = [
        "method.lora_rank=10",
        "method.null_space=true",
        "method.target_modules=auto",
        "method.null_rank=21",
    ]
    specs = parse_methods(
        "nufilt/filter_only, nufilt/adapter_alone, nufilt/all_linear, "
        "nufilt/filter_only:lora_rank=3, nufilt/release"
    )
    configs = [compose_run([*everywhere, *spec.overrides]).method for spec in specs]
    assert [config.lora_rank for config in configs] == [0, 10, 10, 3, 10]
    assert [config.null_space for config in configs] == [True, "zero", True, True, True]
    assert configs[2].target_modules == "all-linear"
    assert [config.null_rank for config in configs] == [21, 21, 0.3333, 21, 21]
    assert configs[-1].first_task == "release"


def test_a_setting_goes_to_the_method_that_has_it():
    (spec,) = parse_methods("task_arithmetic:scaling_factor=0.1:shuffle_order=false")
    config = compose_run(spec.overrides).method
    assert (config.base_method.scaling_factor, config.merged_scale) == (0.1, 0.1)
    assert config.shuffle_order is False


def test_a_batch_method_of_fusionbench_is_run_continually():
    (spec,) = parse_methods("dare/task_arithmetic:sparsity_ratio=0.2")
    config = compose_run(spec.overrides).method
    assert config._target_.endswith("BatchMethodBaseline")
    assert config.base_method.sparsity_ratio == 0.2


def test_a_continual_method_of_fusionbench_is_run_as_it_is():
    (spec,) = parse_methods("opcm/opcm_general")
    assert compose_run(spec.overrides).method._target_.endswith("ContinualMethodBaseline")


def test_a_method_of_the_users_is_found_on_the_search_path(tmp_path):
    (tmp_path / "method").mkdir()
    text = "defaults:\n  - /method/nufilt@_here_\n  - _self_\nmax_steps: 3\n"
    (tmp_path / "method" / "mine.yaml").write_text(text)
    searchpath = f"hydra.searchpath=[file://{tmp_path}]"
    (spec,) = parse_methods("mine", [searchpath])
    assert spec.overrides == ("method=mine",)
    assert compose_run([*spec.overrides, searchpath]).method.max_steps == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nufilt, opmc", ["there is no method 'opmc'; did you mean 'opcm'?"]),
        ("nufilt, qqq", ["there is no method 'qqq'", "nufilt/naive", "weight_average"]),
        ("nufilt, qqq", ["dare/task_arithmetic", "simple_average"]),
        ("nufilt:null_rank", ["'null_rank' is not of the form KEY=VALUE"]),
        ("nufilt, nufilt", ["need labels to tell them apart"]),
        ("a b=nufilt, a/b=opcm", ["need labels to tell them apart"]),
        ("pretrained=nufilt", ["'pretrained' stands for single models in the tables"]),
        ("", ["no method to compare"]),
    ],
)
def test_methods_that_can_not_be_compared_are_refused(text, words):
    message = "there is no method"
    if len(words) == 1:
        message = re.escape(words[0])
    with pytest.raises(ValueError, match=message) as error:
        check_specs(parse_methods(text))
    assert all(word in str(error.value) for word in words)


def test_a_method_of_another_package_needs_the_folder_of_its_yaml_file(monkeypatch):
    monkeypatch.setitem(METHODS, "running_sum", type)
    message = "method 'running_sum' needs --config-dir, the folder in which method/running_sum.yaml"
    with pytest.raises(ValueError, match=message):
        parse_methods("running_sum")


def test_all_is_nufilt_and_the_baselines_that_need_no_data():
    names = [spec.label for spec in parse_methods("all")]
    assert names[0] == "nufilt"
    assert {"opcm", "weight_average", "task_arithmetic", "wudi"} < set(names)
    assert not {"sequential_finetuning", "adamerging", "lora_wemoe", "batch", "stream"} & set(names)


def test_a_label_is_shown_without_control_codes_and_stored_inside_its_folder():
    red, up, here = parse_methods("\x1b=nufilt, ..=opcm, .=wudi")
    assert red.label == r"\x1b"
    assert [file_name(spec.label) for spec in (up, here)] == ["_.", "_"]


def test_order_free_is_every_method_that_keeps_sums():
    labels = [spec.label for spec in parse_methods("order_free")]
    assert labels == list(ORDER_FREE)


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("42", [42]), ("42:45", [42, 43, 44]), ("7, 42:44, 43", [7, 42, 43]), ("0:1", [0])],
)
def test_seeds_are_numbers_and_half_open_ranges(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize(
    "text", ["", "x", "42:", "-1", "1.5", "45:42", "42:42", "0:1002", f"0:1{'0' * 10}", "9" * 20]
)
def test_seeds_that_are_none_or_more_than_anybody_has_time_for_are_refused(text):
    with pytest.raises(ValueError, match="seeds"):
        parse_seeds(text)


# --- presets ---


def test_the_ablation_has_the_four_rows_of_the_paper_with_ranks_in_proportion_to_the_width():
    specs = preset_specs("ablation", "nufilt_demo", [])
    configs = [compose_run(spec.overrides).method for spec in specs]
    parts = [(config.null_space, config.null_rank, config.lora_rank) for config in configs]
    r_p, r_l = 0.1667, 0.0833
    assert parts == [(False, 128, 0), (True, r_p, 0), (False, 128, r_l), (True, r_p, r_l)]
    assert FusionConfig(null_rank=r_p, lora_rank=r_l).ranks(768) == (128, 64, 8)
    names = ["nufilt/naive", "nufilt/filter_only", "nufilt/adapter_only", "nufilt"]
    assert [spec.method for spec in specs] == names
    for spec in specs:
        (typed,) = parse_methods(spec.label)
        assert typed == spec


def test_a_row_of_the_sensitivity_names_all_that_it_sets():
    for panel in SENSITIVITY:
        for value, spec in zip(panel["values"], panel_specs(panel), strict=True):
            assert spec.label.startswith(f"{panel['symbol']} {value}")
            assert all(setting in spec.label for setting in spec.settings[:-1])
            assert spec.settings[-1] == f"{panel['key']}={value}"


def test_ranks_that_the_user_gives_for_all_methods_are_those_of_a_preset():
    labels = [spec.label for spec in preset_specs("ablation", "p", ["method.null_rank=99"])]
    assert labels[1:] == [
        "nufilt/filter_only",
        "nufilt/adapter_only:lora_rank=0.0833",
        "nufilt:lora_rank=0.0833",
    ]
    (paper,) = [
        spec for spec in preset_specs("paper", "nufilt_demo", []) if spec.method == "nufilt"
    ]
    assert paper.settings == ()


@pytest.mark.parametrize(
    ("pool", "scale"), [("clip-vit-base-patch32_TA8", 0.3), ("clip-vit-base-patch32_TALL20", 0.1)]
)
def test_the_paper_scales_by_the_number_of_tasks_and_has_both_rules_where_there_are_two(
    pool, scale
):
    specs = {spec.label.partition(":")[0]: spec for spec in preset_specs("paper", pool, [])}
    for name in ("ties_merging", "task_arithmetic", "knots_ties"):
        assert compose_run(specs[name].overrides).method.base_method.scaling_factor == scale
    released = specs["ties_merging (released)"]
    assert released.settings == ("rule=add", *specs["ties_merging"].settings)
    assert "nufilt" in specs


def methods_of(preset, **options):
    return [spec.method for spec in preset_specs(preset, "nufilt_demo", [], **options)]


def test_methods_that_need_data_are_rows_of_the_paper_where_they_are_asked_for():
    without = methods_of("paper", with_data=False)
    rows = methods_of("paper", with_data=True)
    assert set(rows) - set(without) == {"sequential_finetuning", "adamerging", "lora_wemoe"}
    assert [row for row in rows if row in without] == without
    free = methods_of("overhead", with_data=False)
    costs = methods_of("overhead", with_data=True)
    assert set(costs) - set(free) == {"adamerging", "lora_wemoe"}
    with pytest.raises(ValueError, match="--with-data goes with --preset paper"):
        preset_specs("ablation", "nufilt_demo", [], with_data=True)


@pytest.mark.parametrize(
    ("pool", "rows"),
    [
        (
            "flan-t5-base_glue",
            "task_arithmetic ties_merging adamerging lora_wemoe wudi opcm nufilt",
        ),
        ("llava-1.5-7b", "task_arithmetic ties_merging opcm nufilt"),
        ("gpt-2_glue", None),
    ],
)
def test_another_pool_has_the_rows_of_its_table_and_none_that_can_not_run(pool, rows, monkeypatch):
    overrides = []
    if pool == "gpt-2_glue":
        overrides.append("taskpool=gpt-2_glue")
    specs = preset_specs("paper", pool, overrides, with_data=True)
    found = list(dict.fromkeys(spec.method for spec in specs))
    if rows is None:
        of_demo = preset_specs("paper", "nufilt_demo", [])
        assert found == [spec.method for spec in of_demo if "(" not in spec.label]
    else:
        assert found == rows.split()


def test_the_ranks_are_chosen_on_the_grids_of_the_sensitivity(demo):
    ranks = [spec.label for spec in preset_specs("ranks", "nufilt_demo", [])]
    panels = [spec.label for spec in preset_specs("sensitivity", "nufilt_demo", [])]
    assert [label for label in panels if not label.startswith("steps")] == ranks


def test_an_unknown_preset_lists_what_there_is():
    with pytest.raises(
        ValueError, match="there are: ablation, overhead, paper, ranks, sensitivity"
    ):
        preset_specs("best", "nufilt_demo", [])


# --- overrides ---


def test_a_word_is_read_as_hydra_reads_it():
    assert key_value("target_modules=[q_proj,v_proj]") == ("target_modules", ["q_proj", "v_proj"])
    assert key_value("lr=1e-3") == ("lr", 1e-3)
    words = ("+method.x=1", "~taskpool", "hydra.searchpath=[file://a/b]")
    assert [key_of(word) for word in words] == ["method.x", "taskpool", "hydra.searchpath"]


def test_what_is_the_methods_is_told_from_the_rest():
    words = ["modelpool=a", "method=b", "method.x=1", "++method.y=2", "~method.z", "methods=3"]
    assert without_method(words) == ["modelpool=a", "method=b", "methods=3"]


@pytest.mark.parametrize("word", ["", "null_rank", "null_rank=["])
def test_another_word_is_named(word):
    with pytest.raises(ValueError, match=re.escape(f"'{word}'")):
        key_of(word)
    with pytest.raises(ValueError, match="KEY=VALUE"):
        key_value(word)
