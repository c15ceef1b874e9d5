"""The paper's measures besides accuracy: subspace affinity and surrogates, and those that need no
data.
"""
