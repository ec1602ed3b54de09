"""Without torch the whole directory is left out; the core does not need it."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["*.py"]

if find_spec("torch"):
    import torch

    torch.set_num_threads(1)  # small tensors and shared cores: a second thread only waits
