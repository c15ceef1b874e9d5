"""Merging checkpoint folders of any size, without loading a model."""

from .folders import merge_folders
from .plan import Plan, Settings
from .planning import plan_merge

__all__ = ["Plan", "Settings", "merge_folders", "plan_merge"]
