"""Sparsifiers: which positions of a gradient are sent. One method per file."""
