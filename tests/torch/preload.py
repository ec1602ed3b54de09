"""What the server from which all ranks are forked does once for them: the slow imports (torch loads some of them late), and the kernels."""

from importlib import import_module

import numpy as np

import deepreduce as dr

for module in ("torch._dynamo", "torch.nn.parallel", "deepreduce.torch"):
    import_module(module)
for spec in ("topr:0.1/raw/raw", "topr:0.1/rice/qsgd", "threshold:0.5/bitmap/fp16", "chunktopr:2,chunk=16/raw/raw"):
    dr.decode(dr.encode(np.arange(100, dtype=np.float32), spec))
