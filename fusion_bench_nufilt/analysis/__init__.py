"""The paper's measures besides accuracy: subspace affinity, surrogates and bounds, and those that
need no data.
"""
