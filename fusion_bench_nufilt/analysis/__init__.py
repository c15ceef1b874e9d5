"""What the paper measures beside accuracy: affinity of subspaces, surrogates, bounds, and what needs no data."""
