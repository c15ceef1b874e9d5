"""Comparing continual merging methods: every method on every seed of one model pool.

This file imports nothing, so that a command that needs one small part does not pay for FusionBench.
"""
