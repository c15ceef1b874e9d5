"""Tables, pictures and pages, made from files alone, without torch, transformers or FusionBench."""
