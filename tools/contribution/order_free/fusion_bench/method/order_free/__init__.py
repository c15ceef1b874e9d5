# flake8: noqa F401
from .spectral_voting import SpectralVotingMerging
