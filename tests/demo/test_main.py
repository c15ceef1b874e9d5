"""`make demo`."""

from pathlib import Path

from fusion_bench_nufilt.demo import __main__ as program


def test_its_last_line_says_that_the_digits_depend_on_the_cpu(monkeypatch, capsys):
    monkeypatch.setattr(program, "demo_folder", lambda: None)
    monkeypatch.setattr(program, "compare", lambda *args, **kwargs: print("a table"))
    program.main(Path("out"))
    last = capsys.readouterr().out.splitlines()[-1]
    assert "The digits depend on the CPU that trains the models" in last
