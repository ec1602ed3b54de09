import subprocess
import sys
from pathlib import Path

from .ranks import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_example_runs_under_torchrun():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, str(EXAMPLES / "ddp.py"), "--steps", "21"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "step  20: loss" in done.stdout
    assert "all, with headers" in done.stdout


def test_the_example_of_local_steps_learns_and_sends_little():
    printed = run_script(EXAMPLES / "local_steps.py", 2, "--steps", "100")
    losses = [float(line.partition("loss ")[2].partition(",")[0]) for line in printed.splitlines() if "loss" in line]
    assert losses[1] < losses[0] < 2.4
    assert int(printed.splitlines()[-1].partition(" times")[0]) > 100


def test_the_adapter_imports_no_other_framework():
    code = "import sys, deepreduce.torch; print(sorted({'tensorflow', 'jax', 'numba'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
