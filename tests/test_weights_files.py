"""Checkpoints in files: what the commands write is exact, whole, and read by others."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import deepreduce as dr
from deepreduce.cli.main import main
from deepreduce.weights import slime
from deepreduce.weights.checkpoints import open_checkpoint

from .weights_data import models, same_bits, trained


def write_sharded(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    """Two shards with an index, as transformers writes them."""
    folder.mkdir()
    names = list(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, inside in shards.items():
        save_file({name: tensors[name] for name in inside}, folder / shard, {"format": "pt"})
    weight_map = {name: shard for shard, inside in shards.items() for name in inside}
    index = {"metadata": {"total_size": sum(array.nbytes for array in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def read_sharded(folder: Path) -> dict[str, np.ndarray]:
    return {name: array for path in sorted(folder.glob("*.safetensors")) for name, array in load_file(path).items()}


WRITERS = {
    "sharded": (write_sharded, read_sharded, ""),
    "safetensors": (lambda path, tensors: save_file(tensors, path, {"format": "pt"}), load_file, ".safetensors"),
    "npz": (lambda path, tensors: np.savez(path, **tensors), None, ".npz"),
}


def read_any(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint, through our own reader."""
    source = open_checkpoint(path)
    found = {}
    for name in source.names:
        kind, shape = source.describe(name)
        found[name] = source.read(name, 0, int(np.prod(shape))).view(kind.dtype).reshape(shape)
    return found


@pytest.fixture(params=WRITERS)
def layout(request, tmp_path, monkeypatch):
    """Three versions in one layout: their names, what they hold, and the reader that others would use."""
    monkeypatch.chdir(tmp_path)
    write, read, suffix = WRITERS[request.param]
    versions = models()
    versions[2]["new"] = np.arange(7, dtype=np.int16)
    del versions[2]["norm"]
    for number, tensors in enumerate(versions):
        write(tmp_path / f"v{number}{suffix}", tensors)
    return [f"v{number}{suffix}" for number in range(3)], versions, read or read_any, suffix


def run(*arguments: str, code: int = 0) -> None:
    assert main(list(arguments)) == code


@pytest.mark.parametrize("portable", [[], ["--portable"]], ids=["conditional", "portable"])
def test_diff_patch_verify_and_fold(layout, portable, capsys):
    names, versions, read, suffix = layout
    for number, (old, new) in enumerate(pairwise(names)):
        run("diff", old, new, f"{number}.patch", *portable, *(["--after", "0.patch"] if number else []))
    assert "bits each" in capsys.readouterr().out
    run("patch", names[0], "0.patch", "1.patch", f"two{suffix}")
    assert same_bits(read(Path(f"two{suffix}")), versions[2])
    run("fold", "0.patch", "1.patch", "folded.patch", *([] if portable else ["--base", names[0]]))
    run("patch", names[0], "folded.patch", f"folded{suffix}")
    assert same_bits(read(Path(f"folded{suffix}")), versions[2])
    run("verify", names[0], "0.patch", "--expect", "base")
    run("verify", names[2], "folded.patch", "--expect", "result")
    assert "v2" in capsys.readouterr().out


def test_wrong_bases_are_told_apart_and_leave_nothing_behind(layout, capsys):
    names, _, _, suffix = layout
    run("diff", names[0], names[1], "0.patch")
    run("diff", names[1], names[2], "1.patch", "--after", "0.patch")
    before = sorted(os.listdir())
    run("patch", names[0], "1.patch", f"out{suffix}", code=1)
    assert "out of order" in capsys.readouterr().err
    run("patch", names[1], "0.patch", f"out{suffix}", code=1)
    assert "already applied" in capsys.readouterr().err
    run("patch", names[2], "0.patch", f"out{suffix}", code=1)
    assert "wrong base" in capsys.readouterr().err
    run("verify", names[1], "0.patch", "--expect", "base", code=1)
    assert "already applied" in capsys.readouterr().err
    assert sorted(os.listdir()) == before


def test_inspect_tells_what_changes(layout, capsys):
    names, *_ = layout
    run("diff", names[1], names[2], "1.patch")
    capsys.readouterr()
    run("inspect", "1.patch", "--json")
    found = json.loads(capsys.readouterr().out)
    actions = {row["name"]: row["action"] for row in found["tensors"]}
    assert (found["kind"], actions["layer0.weight"], actions["new"], actions["norm"]) == ("patch", "changed", "added", "removed")
    assert 4 < next(row["bits_per_changed"] for row in found["tensors"] if row["name"] == "layer0.weight") < 12
    run("inspect", "1.patch")
    assert "layer0.weight" in capsys.readouterr().out


def test_damaged_patches_and_missing_files(layout, capsys):
    names, *_ = layout
    run("diff", names[0], names[1], "0.patch")
    raw = Path("0.patch").read_bytes()
    for damaged in (raw[:-1], raw + b"\0", raw[:50] + bytes([raw[50] ^ 1]) + raw[51:], b""):
        Path("damaged.patch").write_bytes(damaged)
        run("verify", names[0], "damaged.patch", code=3)
    run("diff", names[0], "nowhere", "x.patch", code=1)
    run("diff", names[0], names[1], "nowhere/x.patch", code=1)
    run("verify", names[0], "nowhere.patch", code=1)
    assert "cannot read nowhere.patch" in capsys.readouterr().err


def test_metadata_and_index_are_kept(tmp_path):
    old, new, _ = models()
    write_sharded(tmp_path / "old", old)
    write_sharded(tmp_path / "new", new)
    run("diff", str(tmp_path / "old"), str(tmp_path / "new"), str(tmp_path / "patch"))
    run("patch", str(tmp_path / "old"), str(tmp_path / "patch"), str(tmp_path / "out"))
    kept = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert kept == json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    with safe_open(tmp_path / "out" / "model-00001-of-00002.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    run("patch", str(tmp_path / "old"), str(tmp_path / "patch"), str(tmp_path / "out"), code=1)  # exists already


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_killed_run_leaves_no_half_file_and_can_be_repeated(tmp_path):
    old, new = trained((3000, 3000), 1e-5)
    save_file({"w": old}, tmp_path / "old.safetensors")
    save_file({"w": new}, tmp_path / "new.safetensors")
    run("diff", str(tmp_path / "old.safetensors"), str(tmp_path / "new.safetensors"), str(tmp_path / "patch"))
    command = [sys.executable, "-m", "deepreduce.cli.main", "patch", "old.safetensors", "patch", "out.safetensors"]
    started = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    while started.poll() is None and not list(tmp_path.glob(".out.safetensors.*.part")):
        time.sleep(0.001)
    started.send_signal(signal.SIGKILL)
    if started.wait() != 0:
        assert not (tmp_path / "out.safetensors").exists()
    subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    assert same_bits(load_file(tmp_path / "out.safetensors"), {"w": new})
    assert not list(tmp_path.glob("*.part"))
    assert not list(tmp_path.glob(".*.part"))


# slime's layout


def same_names(seed: int = 0) -> list[dict[str, np.ndarray]]:
    return models(seed)


@pytest.mark.parametrize("compression", ["deepreduce", "zstd"])
def test_slime_versions_round_trip(tmp_path, compression):
    versions = same_names()
    for number, (old, new) in enumerate(pairwise(versions), 1):
        slime.write_version(tmp_path, old, new, number, compression=compression)
    tensors = {name: array.copy() for name, array in versions[0].items()}
    with pytest.raises(dr.WrongBaseError, match="out of order"):
        slime.read_version(tmp_path / "weight_v000002", tensors, 0)
    assert slime.read_version(tmp_path / "weight_v000001", tensors, 0) == 1
    assert slime.read_version(tmp_path / "weight_v000002", tensors, 1) == 2
    assert same_bits(tensors, versions[2])
    with pytest.raises(dr.WrongBaseError, match="already applied"):
        slime.read_version(tmp_path / "weight_v000002", tensors, 2)


@pytest.mark.parametrize("compression", ["deepreduce", "zstd"])
def test_slime_layout_is_that_of_its_source(tmp_path, compression):
    old, new, _ = same_names()
    folder = slime.write_version(tmp_path, old, new, 7, compression=compression)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    changed = {name for name in new if new[name].tobytes() != old[name].tobytes()}
    assert folder.name == "weight_v000007"
    assert set(index["weight_map"]) == changed
    expected = {"version": "000007", "base_version": "000006", "compression_format": compression, "checksum_format": "xxh3-128"}
    assert expected.items() <= index["metadata"].items()
    (path,) = folder.glob("model-*.safetensors")
    assert all(array.dtype == np.uint8 and array.ndim == 1 for array in load_file(path).values())


def test_slime_overwrite_and_adler32_are_read(tmp_path):
    """A version as slime's publisher writes it with these options: count, positions and new bytes, by zstd."""
    import zlib

    import zstandard

    old = {"w": np.arange(100, dtype=np.float32)}
    new = {"w": old["w"].copy()}
    new["w"][[3, 50]] = [7.5, -1]
    before, after = old["w"].view(np.uint8), new["w"].view(np.uint8)
    where = np.flatnonzero(before != after).astype("<u4")
    delta = np.concatenate([np.array([where.size], "<u4").view(np.uint8), where.view(np.uint8), after[where]])
    coded = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(delta.tobytes()), np.uint8)
    folder = tmp_path / "weight_v000001"
    folder.mkdir()
    save_file({"w": coded}, folder / "model-00000-of-00001.safetensors", {"w": f"{zlib.adler32(after.tobytes()):08x}"})
    metadata = {"version": "000001", "base_version": "000000", "delta_encoding": "overwrite", "compression_format": "zstd"}
    index = {"metadata": metadata | {"checksum_format": "adler32"}, "weight_map": {"w": "model-00000-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    slime.read_version(folder, old, 0)
    assert same_bits(old, new)


def test_slime_patch_on_the_wrong_weights_changes_nothing(tmp_path):
    old, new, _ = same_names()
    folder = slime.write_version(tmp_path, old, new, 1, compression="zstd")
    other = {name: array.copy() for name, array in same_names(seed=1)[0].items()}
    kept = {name: array.copy() for name, array in other.items()}
    with pytest.raises(dr.FormatError, match="checksum"):
        slime.read_version(folder, other, 0)
    assert same_bits(other, kept)
