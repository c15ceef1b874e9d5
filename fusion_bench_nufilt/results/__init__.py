"""Tables, pictures and pages, made from files alone: this package imports no torch, nor any package that computes."""
