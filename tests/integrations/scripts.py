"""The examples, run as a user runs them."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name, *torchrun, options=(), timeout=300):
    """What an example with these options printed, under torchrun if options for that are given."""
    launcher = ["-m", "torch.distributed.run", "--standalone", *torchrun] if torchrun else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *launcher, str(EXAMPLES / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
