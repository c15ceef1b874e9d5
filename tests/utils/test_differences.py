"""What differs from the inputs of before is named, and nothing else."""

from fusion_bench_nufilt.utils.manifest import differences, in_one_line


def test_what_only_one_of_them_has_differs():
    changes = differences({"a": 1, "d": {"e": [1]}}, {"d": {"e": [1]}, "b": {"c": 2}})
    assert [change.name for change in changes] == ["a", "b"]


def test_a_line_names_three_differences_and_cuts_long_values():
    line = in_one_line(differences({"a": "x" * 200}, {"b": 1, "c": 2, "d": 3}))
    assert line.count(";") == 2
    assert "..." in line
    assert "d is" not in line
