"""Codecs of other packages: a real package, really installed, found by its entry points."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "dummy-codecs"
version = "1.0"

[project.entry-points."deepreduce.values"]
negated = "dummy_codecs:Negated"
raw = "dummy_codecs:Negated"
broken = "dummy_broken:Broken"
missing = "dummy_missing:Missing"
wrong = "dummy_codecs:First"

[project.entry-points."deepreduce.sparsifiers"]
first = "dummy_codecs:First"

[tool.setuptools]
py-modules = ["dummy_codecs", "dummy_broken"]
"""

MODULE = '''
from dataclasses import dataclass

import numpy as np

import deepreduce as dr


@dataclass(frozen=True)
class Negated(dr.ValueCodec):
    """`negated`: every value with the other sign, twice."""

    factor: float = 1.0

    def encode(self, values, seed):
        return (-values).tobytes(), None

    def decode(self, part, nnz, dtype):
        return -part.array(dtype, nnz)


@dataclass(frozen=True)
class First(dr.Sparsifier):
    """`first`: the first elements."""

    count: int = 1

    def select(self, source, seed):
        return np.arange(min(self.count, source.numel))
'''

USE = """
import numpy as np
import deepreduce as dr
codec = dr.parse("first:2/raw/negated:factor=2.5")
blob = codec.encode(np.float32([3, 4, 5]))
assert dr.inspect(blob).spec == str(codec) == "first:2/raw/negated:2.5", dr.inspect(blob).spec
assert dr.decode(blob).tolist() == [3, 4, 0]
assert dr.parse("none/all/raw").value == dr.RawValue()   # a built-in name cannot be taken
print(blob.hex())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder into which pip has installed the package."""
    source, target = tmp_path_factory.mktemp("dummy"), tmp_path_factory.mktemp("site")
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "dummy_codecs.py").write_text(MODULE)
    (source / "dummy_broken.py").write_text("raise RuntimeError('a bad day')\n")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([*pip, str(source)], check=True, capture_output=True, text=True)
    return target


def run(script: str, path: Path | None = None) -> subprocess.CompletedProcess:
    prefix = f"import sys; sys.path.insert(0, {str(path)!r})\n" if path else ""
    return subprocess.run([sys.executable, "-c", prefix + textwrap.dedent(script)], capture_output=True, text=True, check=False)


def test_installed_codecs_are_found_and_named_in_the_message(installed):
    used = run(USE, installed)
    assert used.returncode == 0, used.stderr
    blob = used.stdout.strip()
    without = run(f"import deepreduce as dr; dr.decode(bytes.fromhex({blob!r}))")
    assert "VersionError: the message needs sparsifier 'first', which is not installed here" in without.stderr


def test_the_command_line_lists_them(installed):
    listed = run("from deepreduce.cli.main import main; main(['codecs'])", installed)
    assert "\nnegated " in listed.stdout
    assert "every value with the other sign, twice." in listed.stdout
    assert "\nbroken " in listed.stdout
    assert "a bad day" in listed.stdout


BROKEN = """
import sys
import zlib
import numpy as np
import deepreduce as dr
from deepreduce import registry


def complaint(error, call, *args):
    try:
        call(*args)
    except error as caught:
        return str(caught)


assert "unknown value codec 'rav': did you mean 'raw'?" in complaint(dr.ConfigError, dr.parse, "none/all/rav")
assert "broken" in registry.VALUE_STAGE.names()
assert not {"dummy_codecs", "dummy_broken"} & set(sys.modules), "names are read without importing anything"
assert "does not load: RuntimeError: a bad day" in complaint(dr.ConfigError, dr.parse, "none/all/broken")
assert "does not load: ModuleNotFoundError" in complaint(dr.ConfigError, dr.parse, "none/all/missing")
assert "is not a ValueCodec" in complaint(dr.ConfigError, dr.parse, "none/all/wrong")

import dummy_codecs
blob = dr.DeepReduce(dr.Keep(), dr.All(), dummy_codecs.Negated(2)).encode(np.float32([3, 4, 5]))   # found beside the broken ones
assert dr.inspect(blob).spec == "none/all/negated:2.0"


def renamed(name):
    assert len(name) == 7
    body = blob[:-4].replace(b"negated", name)
    return body + zlib.crc32(body).to_bytes(4, "little")


assert "'missing' is installed, but 'dummy_missing:Missing' does not load" in complaint(dr.VersionError, dr.decode, renamed(b"missing"))
assert "'nothing', which is not installed here" in complaint(dr.VersionError, dr.decode, renamed(b"nothing"))
"""


def test_a_broken_package_hurts_only_those_who_ask_for_it(installed):
    used = run(BROKEN, installed)
    assert used.returncode == 0, used.stderr
