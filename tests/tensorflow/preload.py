"""What the server from which all workers are forked does once for them: the slow import, and the kernels. It runs no operation."""

import numpy as np

import deepreduce as dr
import deepreduce.tensorflow

for spec in ("topr:0.1/rice/qsgd", "topr:0.1/bloom:p2/raw", "none/all/raw", "nonzero/raw/raw"):
    dr.decode(dr.encode(np.arange(100, dtype=np.float32), spec))
