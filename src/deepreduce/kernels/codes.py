"""What decoding kernels return where their bytes are not those of a writer: all below 0. The codecs make errors of them."""

ENDS_EARLY = -1
"""There is more to read than there are bytes."""

BEYOND_LIMIT = -2
"""A number is larger than allowed."""

INVALID = -3
"""Bits that stand for nothing."""

LEFT_OVER = -4
"""Bytes, or padding that is not zero, after what was to be read."""
