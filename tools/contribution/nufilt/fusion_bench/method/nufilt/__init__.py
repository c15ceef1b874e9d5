# flake8: noqa F401
from .fusion import FusionConfig, fuse_layers
from .nufilt import NUFILTMerging
