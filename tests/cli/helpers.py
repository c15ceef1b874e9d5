"""The `nufilt` command, called in this process."""

import re

from typer.testing import CliRunner

from fusion_bench_nufilt.cli.app import app


def nufilt(*arguments):
    """Exit code and what was printed, without line breaks and styles.

    An error of which the command makes no message, so that a user would see a traceback, is raised.
    """
    words = [str(argument) for argument in arguments]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    text = re.sub(r"\x1b\[[0-9;]*m", "", result.output)
    return result.exit_code, re.sub(r"\s+", " ", text)
