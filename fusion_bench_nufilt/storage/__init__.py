"""What is read and written: locks, whole files, JSON with schemas, tensors, and what a model is known by."""
