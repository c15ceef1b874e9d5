# flake8: noqa F401
from .core.config import FusionConfig
from .core.fusion import fuse_layers
from .nufilt import NUFILTMerging
