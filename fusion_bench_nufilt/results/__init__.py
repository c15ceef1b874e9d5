"""Tables, pictures and pages of a run, a comparison or an analysis, made from the files that it left.

This room imports none of those that compute, and no torch.
"""
