"""npz checkpoints: damaged and forged files are refused, and nothing is written that cannot be read back."""

import io
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from deepreduce import weights
from deepreduce.errors import FileError
from deepreduce.weights.files import patch_files
from deepreduce.weights.npz import Npz


def npy(array: np.ndarray) -> bytes:
    """The bytes of an npy file."""
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def write_archive(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, raw in members.items():
            archive.writestr(name, raw)
    return path


def test_threads_read_the_tensors_they_ask_for(tmp_path, monkeypatch):
    """Another thread reads another tensor while one is loaded."""
    np.savez(tmp_path / "old.npz", a=np.zeros(5, np.int64), b=np.ones(5, np.int64))
    source = Npz(tmp_path / "old.npz")
    load = source._load

    def load_while_another_reads(name: str) -> np.ndarray:
        found = load(name)
        if name == "a":
            with ThreadPoolExecutor(1) as pool:
                pool.submit(source.read, "b", 0, 5).result()
        return found

    monkeypatch.setattr(source, "_load", load_while_another_reads)
    assert source.read("a", 0, 5).tolist() == [0] * 5
    with ThreadPoolExecutor(4) as pool:
        jobs = [(n, pool.submit(source.read, "ab"[n % 2], 0, 5)) for n in range(200)]
        assert all(job.result().tolist() == [n % 2] * 5 for n, job in jobs)


@pytest.mark.parametrize("shape", [(2**40,), (2**62, 2**62), (-5,), (6,), ()])
def test_a_forged_shape_is_refused(tmp_path, shape):
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": "<f8", "fortran_order": False, "shape": shape})
    raw = out.getvalue() + bytes(40)
    with pytest.raises(FileError, match=r"w\.npy has shape"):
        Npz(write_archive(tmp_path / "forged.npz", {"w.npy": raw}))


def test_memory_that_is_not_there_is_told_in_one_line(tmp_path, monkeypatch):
    def refuse(*arguments: object, **options: object) -> None:
        raise MemoryError

    np.savez(tmp_path / "old.npz", w=np.zeros(5))
    source = Npz(tmp_path / "old.npz")
    monkeypatch.setattr(np, "load", refuse)
    with pytest.raises(FileError, match="'w' cannot be read: MemoryError"):
        source.read("w", 0, 5)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
def test_damaged_files_are_refused_or_read(tmp_path, compression):
    """Whatever byte is changed: the tensors, or a FileError when the file is opened or read."""
    rng = np.random.default_rng(0)
    path = write_archive(tmp_path / "old.npz", {"w.npy": npy(rng.integers(0, 9, 400))}, compression)
    whole, refused = path.read_bytes(), 0
    for at in [*range(0, 300), *range(len(whole) - 150, len(whole))]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x5A]) + whole[at + 1 :])
        try:
            source = Npz(path)
            for name in source.names:
                source.read(name, 0, 400)
        except FileError:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize("name", ["../../evil", "/evil", "a\\b", "w\0x", "C:/evil"])
def test_unsafe_names_are_not_written(tmp_path, name):
    np.savez(tmp_path / "old.npz", w=np.zeros(3))
    (tmp_path / "patch").write_bytes(weights.diff({"w": np.zeros(3)}, {"w": np.zeros(3), name: np.ones(3)}))
    with pytest.raises(FileError, match="not a safe name in a zip file"):
        patch_files(tmp_path / "old.npz", [tmp_path / "patch"], tmp_path / "new.npz")
    assert not (tmp_path / "new.npz").exists()


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu])
def test_float8_is_not_written(tmp_path, dtype):
    np.savez(tmp_path / "old.npz", w=np.zeros(3))
    (tmp_path / "patch").write_bytes(weights.diff({"w": np.zeros(3)}, {"w": np.ones(3, dtype)}))
    with pytest.raises(FileError, match="which npz files cannot hold"):
        patch_files(tmp_path / "old.npz", [tmp_path / "patch"], tmp_path / "new.npz")
    assert not (tmp_path / "new.npz").exists()
