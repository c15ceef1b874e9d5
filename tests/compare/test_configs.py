"""A configuration is composed as `fusion_bench` would; a name that there is not is one line."""

import pytest

from fusion_bench_nufilt.compare.configs import compose_run

NEAREST = {
    "modelpool=clip-vit-base-patch32_TA9": "modelpool *; did you mean 'clip-vit-base-patch32_TA8'?",
    "modelpool=CLIPVisionModelPool/clip-vit-base-patch32_TA9": (
        "modelpool *; did you mean 'CLIPVisionModelPool/clip-vit-base-patch32_TA8'?"
    ),
    "taskpool=nufilt_demmo": "taskpool *; did you mean 'nufilt_demo'?",
    "method=nufill": "method *; did you mean 'nufilt'?",
    "method=continual/opmc": "method *; did you mean 'continual/opcm'?",
    "fabric/loggers=wandb_loger": "fabric/loggers *; did you mean 'wandb_logger'?",
    "modelpool=mine": (
        "modelpool *; one of your own is found in the folder of --config-dir, as "
        "modelpool/mine.yaml"
    ),
}


@pytest.mark.parametrize("word", NEAREST)
def test_a_name_that_there_is_not_is_refused_with_the_nearest_one(word):
    name = word.partition("=")[2]
    line = f"there is no {NEAREST[word].replace('*', repr(name))}"
    with pytest.raises(ValueError) as caught:  # noqa: PT011 -- the whole line is compared
        compose_run([word])
    assert str(caught.value) == line
