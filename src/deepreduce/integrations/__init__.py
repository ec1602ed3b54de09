"""deepreduce in the tools people train with: one file each, which imports its tool. Nothing is imported before it is used."""
