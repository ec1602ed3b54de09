import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "keras_fit.py"


def test_keras_fit():
    shown = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, check=True, timeout=300).stdout
    accuracy, ratio = map(int, re.search(r"accuracy (\d+)%.*\n(\d+) times fewer bytes", shown).groups())
    assert accuracy > 75
    assert ratio > 50
