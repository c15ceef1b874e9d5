"""The `nufilt` command, one file for each of its commands."""
