# flake8: noqa F401
from .config import StepConfig
from .fusion import fuse_layer
from .nufilt import NUFILTMerging
from .targets import select_layers
