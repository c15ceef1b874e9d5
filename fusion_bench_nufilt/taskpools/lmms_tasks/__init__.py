"""Tasks of lmms-eval, which reads these files by itself."""
