"""Merging checkpoint folders of any size, without loading a model."""

from .checks import plan_merge
from .folders import merge_folders
from .plan import Plan, Settings

__all__ = ["Plan", "Settings", "merge_folders", "plan_merge"]
