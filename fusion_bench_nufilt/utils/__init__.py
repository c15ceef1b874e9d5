"""Reading and writing: locks, whole files, JSON with schemas, tensors, and what identifies a
model.
"""
