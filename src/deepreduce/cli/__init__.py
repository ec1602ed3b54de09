"""The `deepreduce` command."""
