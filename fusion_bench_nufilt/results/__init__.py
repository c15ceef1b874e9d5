"""Tables, pictures and pages, made from files alone: this room imports none of those that compute, and no torch."""
