"""An option of the method that is typed in the wrong place or by a wrong name is refused with the
right spelling.
"""

import re

import pytest

from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.compare.specs import parse_methods
from fusion_bench_nufilt.utils.misplaced import CONFIG, refuse_misplaced
from tests.cli.helpers import nufilt


@pytest.mark.parametrize("plus", ["", "+", "++"])
@pytest.mark.parametrize(
    ("method", "option"),
    [("nufilt", "null_rank=0.1667"), ("best", "scale=0.5"), ("continual/opcm", "evaluate=last")],
)
def test_fusion_bench_refuses_it_and_what_it_says_can_be_typed(plus, method, option):
    words = [f"method={method}", "modelpool=nufilt_demo"]
    with pytest.raises(ValueError, match=rf"say method\.{option}$") as caught:
        refuse_misplaced([*words, plus + option], "fusion_bench")
    spelling = str(caught.value).split()[-1]
    refuse_misplaced([*words, spelling], "fusion_bench")
    name, _, value = option.partition("=")
    assert str(compose_run([*words, spelling]).method[name]) == value


@pytest.mark.parametrize("plus", ["", "+", "++"])
@pytest.mark.parametrize(
    ("method", "word", "name"),
    [
        ("nufilt", "nul_rank=5", "null_rank"),
        ("nufilt/naive", "evaluat=last", "evaluate"),
        ("best", "excluded_modules=null", "exclude_modules"),
        ("continual/opcm", "sede=7", "seed"),
    ],
)
def test_an_option_that_a_method_lacks_is_refused_with_the_nearest_that_it_has(
    plus, method, word, name
):
    """Hydra would advise to add it, by `+`."""
    words = [f"method={method}", f"{plus}method.{word}"]
    message = re.escape(f"method.{word}': there is no option '{word.partition('=')[0]}'; did you ")
    with pytest.raises(ValueError, match=f"{message}mean '{name}'"):
        refuse_misplaced(words, "fusion_bench")
    if not plus:
        with pytest.raises(ValueError, match=f"^'{message}mean '{name}'"):
            compose_run(words)


@pytest.mark.parametrize("method", ["nufilt/all_linear", "tsv_stream", "continual/magmax"])
def test_no_option_that_a_method_has_is_refused(method):
    options = compose_run([f"method={method}"]).method
    words = [f"method.{name}=1" for name in options]
    refuse_misplaced([f"method={method}", *words], "fusion_bench")
    refuse_misplaced([f"method={method}", "method.base_method.other=1"], "fusion_bench")


def test_an_option_that_the_method_of_a_baseline_lacks_is_refused_too():
    words = ["method=continual/opcm", "method.base_method.alhpa=1"]
    with pytest.raises(ValueError, match="there is no option 'alhpa'; did you mean 'alpha'"):
        compose_run(words)


def test_in_a_checkout_the_configurations_of_this_package_are_no_users():
    words = ["method=nufilt", "+null_rank=0.1667"]
    with pytest.raises(ValueError, match="null_rank is an option of the method"):
        refuse_misplaced(words, "fusion_bench", [f"file://{CONFIG}"])


def test_a_method_of_fusionbenchs_own_is_left_to_fusionbench():
    refuse_misplaced(["method=task_arithmetic", "+scale=0.5"], "fusion_bench")
    refuse_misplaced(["+scale=0.5"], "fusion_bench")


def test_other_keys_pass():
    words = ["modelpool=mine", "+modelpool.seed=1", "fabric.devices=1", "~taskpool", "seed=x y"]
    refuse_misplaced(["method=nufilt", *words[:-1], "--cfg", "job"], "fusion_bench")


def test_fusionbenchs_own_seed_must_come_with_the_methods():
    words = ["method=nufilt", "seed=7"]
    with pytest.raises(ValueError, match=r"'seed=7' is .* say method\.seed=7, or both$"):
        refuse_misplaced(words, "fusion_bench")
    refuse_misplaced([*words, "method.seed=7"], "fusion_bench")


@pytest.mark.parametrize("command", ["compare", "analyze"])
def test_a_comparison_and_an_analysis_refuse_it_and_what_they_say_can_be_typed(command, tmp_path):
    code, text = nufilt(command, "+null_rank=0.1667", "--out", tmp_path)
    assert code == 1
    line = "say NAME:null_rank=0.1667 in --methods, or method.null_rank=0.1667 for all methods"
    assert line in text
    of_one, of_all = re.findall(r"\S*null_rank=0.1667", line)
    (spec,) = parse_methods(of_one.replace("NAME", "nufilt"))
    assert spec.overrides[-1] == of_all


def test_the_seed_of_a_comparison_is_named():
    code, text = nufilt("compare", "seed=3")
    assert code == 1
    assert "say --seeds 3" in text
