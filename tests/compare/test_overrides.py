"""``KEY=VALUE`` words."""

import pytest

from fusion_bench_nufilt.compare.overrides import key_of, key_value, without_method


def test_a_word_is_read_as_hydra_reads_it():
    assert key_value("target_modules=[q_proj,v_proj]") == ("target_modules", ["q_proj", "v_proj"])
    assert key_value("lr=1e-3") == ("lr", 1e-3)
    assert [key_of(word) for word in ("+method.x=1", "~taskpool", "hydra.searchpath=[file://a/b]")] == [
        *("method.x", "taskpool", "hydra.searchpath")
    ]


def test_what_is_the_methods_is_told_from_the_rest():
    words = ["modelpool=a", "method=b", "method.x=1", "++method.y=2", "~method.z", "methods=3"]
    assert without_method(words) == ["modelpool=a", "method=b", "methods=3"]


@pytest.mark.parametrize("word", ["", "null_rank", "null_rank=["])
def test_another_word_is_named(word):
    with pytest.raises(ValueError, match=f"'{word}'".replace("[", r"\[")):
        key_of(word)
    with pytest.raises(ValueError, match="KEY=VALUE"):
        key_value(word)
