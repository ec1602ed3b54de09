"""Without TensorFlow the whole directory is left out; the core does not need it."""

import os
from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("tensorflow") else ["*.py"]

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
