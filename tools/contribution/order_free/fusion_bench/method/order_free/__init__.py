# flake8: noqa F401
from .spectral_voting import SpectralVotingMerging
from .tsv_stream import TSVStreamMerging
from .wudi_sums import WUDISumsMerging
