"""The models of a merge: checkpoints as they are stored, and adapters."""
