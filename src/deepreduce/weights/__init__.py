"""Exact differences of weights: what changed between two versions of a model, in a few bits per changed weight.

>>> import numpy as np
>>> from deepreduce import weights
>>> old = {"w": np.linspace(-1, 1, 1000, dtype=np.float32)}
>>> new = {"w": old["w"].copy()}
>>> new["w"][::50] *= 1.001
>>> patch = weights.diff(old, new)
>>> bool((weights.apply(old, patch)["w"] == new["w"]).all()), len(patch) < 200
(True, True)
"""

from .api import apply, apply_, diff, patches, verify
from .folding import fold

__all__ = ["apply", "apply_", "diff", "fold", "patches", "verify"]
