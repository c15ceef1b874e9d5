"""Regular expressions that people and files bring along: they are compiled before any work, and bounded in time.

Some expressions take longer than the age of the universe on a name of thirty letters, and Python's own ``re`` has no
time limit.
"""

import regex

_SECONDS = 1.0  # for one name, which takes microseconds with any reasonable expression


def matches(pattern: str, name: str, *, of: str) -> bool:
    """Tell whether an expression matches the whole of a name.

    Args:
        pattern: the expression.
        of: where the expression comes from, for messages.

    Raises:
        ValueError: the pattern is no regular expression, or takes too long; the message names ``of``.
    """
    try:
        return regex.fullmatch(pattern, name, timeout=_SECONDS) is not None
    except TimeoutError:
        raise ValueError(f"{of}: {pattern!r} takes too long on '{name}': write it without nested repetitions") from None
    except (regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{of}: {pattern!r} is no regular expression: {error}") from error
