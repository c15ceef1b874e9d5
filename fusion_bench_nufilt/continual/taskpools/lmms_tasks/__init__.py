"""Tasks for lmms-eval, which reads these files itself."""
