"""Measure codecs on gradients: volume, error and time, beside what else one could use."""
