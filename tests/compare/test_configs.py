"""What is composed is what `fusion_bench` would, and a name that there is not is one line."""

import pytest

from fusion_bench_nufilt.compare.configs import compose_run, refuse_unknown_names

NEAREST = {
    "modelpool=clip-vit-base-patch32_TA9": "modelpool *; did you mean 'clip-vit-base-patch32_TA8'?",
    "modelpool=CLIPVisionModelPool/clip-vit-base-patch32_TA9": (
        "modelpool/CLIPVisionModelPool *; did you mean 'clip-vit-base-patch32_TA8'?"
    ),
    "taskpool=nufilt_demmo": "taskpool *; did you mean 'nufilt_demo'?",
    "method=nufill": "method *; did you mean 'nufilt'?",
    "method=continual/opmc": "method/continual *; did you mean 'opcm'?",
    "fabric/loggers=wandb_loger": "fabric/loggers *; did you mean 'wandb_logger'?",
    "modelpool=mine": (
        "modelpool *; one of your own is found in the folder of --config-dir, as "
        "modelpool/mine.yaml"
    ),
}


@pytest.mark.parametrize("word", NEAREST)
def test_a_name_that_there_is_not_is_refused_with_the_nearest_one(tmp_path, word):
    name = word.partition("=")[2].rpartition("/")[2]
    line = f"there is no {NEAREST[word].replace('*', repr(name))}"
    with pytest.raises(ValueError) as caught:  # noqa: PT011 -- the whole line is compared
        compose_run([word])
    assert str(caught.value) == line
    # Where there is a folder ./config, FusionBench looks there first.
    words = ["--cfg", "job", "method=nufilt", "path.log_dir=logs", word]
    with pytest.raises(ValueError) as caught:  # noqa: PT011 -- the whole line is compared
        refuse_unknown_names(words, str(tmp_path))
    assert str(caught.value) == line


@pytest.fixture
def pool_of_ones_own(tmp_path):
    folder = tmp_path / "my_config" / "modelpool"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("_target_: fusion_bench.BaseModelPool\nmodels: {}\n")
    return folder.parent


def test_the_command_line_of_fusion_bench_may_name_what_hydra_finds(pool_of_ones_own, tmp_path):
    found_first = str(pool_of_ones_own)
    empty = str(tmp_path)
    refuse_unknown_names(["method=nufilt", "modelpool=mine"], found_first)
    refuse_unknown_names([f"--config-dir={found_first}", "modelpool=mine", "-m"], empty)
    refuse_unknown_names(["-cd", found_first, "modelpool=mine", "~taskpool"], empty)
    refuse_unknown_names([f"hydra.searchpath=[{found_first}]", "modelpool=mine"], empty)


@pytest.mark.parametrize(
    "words",
    [
        ["method=nufilt", "method.nul_rank=3"],
        ["method=nufilt", "method.null_rank=[3"],
        ["-m", "method=nufilt,nufilt/naive"],
        ["method=nufilt,nufilt/naive"],
        ["--config-name=llama_full_finetune"],
    ],
)
def test_of_what_else_may_be_wrong_hydra_says_itself_what_it_is(tmp_path, words):
    refuse_unknown_names(words, str(tmp_path))


def test_a_file_that_is_no_yaml_is_left_to_hydra(pool_of_ones_own):
    (pool_of_ones_own / "modelpool" / "mine.yaml").write_text("models: [")
    refuse_unknown_names(["modelpool=mine"], str(pool_of_ones_own))
