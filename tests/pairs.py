"""Few rows instead of all combinations, where the factors of a test are independent."""

from itertools import combinations, product


def pairs(*factors):
    """Return rows, with a value of each factor, in which every two values of two factors are
    together at least once.
    """
    rows = list(product(*map(list, factors)))
    missing = set().union(*map(_pairs_of, rows))
    chosen = []
    while missing:
        best_row = max(rows, key=lambda row: len(missing & _pairs_of(row)))
        missing -= _pairs_of(best_row)
        chosen.append(best_row)
    return chosen


def _pairs_of(row):
    """Return the pairs of values in a row, each with the number of its factor."""
    return set(combinations(enumerate(row), 2))
