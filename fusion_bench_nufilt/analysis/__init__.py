"""What the paper measures beside accuracy: affinity of subspaces, surrogates, bounds, and what needs no data."""

from .affinity import affinity, dominance
from .bounds import check_theorem, corollary_bound
from .moments import RunningMoment, data_subspace, mean_square, second_moment
from .spectra import overlap, task_vector
from .surrogates import data_free_losses, harmonic_mean, layer_losses

__all__ = [
    "RunningMoment",
    "affinity",
    "check_theorem",
    "corollary_bound",
    "data_free_losses",
    "data_subspace",
    "dominance",
    "harmonic_mean",
    "layer_losses",
    "mean_square",
    "overlap",
    "second_moment",
    "task_vector",
]
