"""Continual merging methods side by side: every method on every seed of one model pool."""
