"""Checkpoints in files: what the commands write is exact, whole, and read by others."""

import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import deepreduce as dr
from deepreduce import weights
from deepreduce.cli.main import main
from deepreduce.errors import FileError
from deepreduce.weights import files, slime
from deepreduce.weights.checkpoints import open_checkpoint

from .weights_data import models, same_bits


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


@pytest.mark.parametrize(
    "command",
    [
        "diff v0.npz v1.npz v1.npz",
        "diff v0.npz v1.npz 0.patch --after 0.patch",
        "patch v0.npz 0.patch 1.patch",
        "patch v0.npz 0.patch v0.npz",
        "patch v0.npz 0.patch 1.patch 2.patch.npz",
        "fold 0.patch 1.patch --base v0.npz",
        "fold 0.patch 1.patch 2.patch --base v0.npz",
        "fold 0.patch 1.patch 1.patch --base v0.npz",
    ],
)
def test_inputs_are_not_written_over(tmp_path, monkeypatch, command, capsys):
    monkeypatch.chdir(tmp_path)
    versions = models()
    for number, tensors in enumerate([*versions, versions[0] | {"bias": np.ones(8, np.float16)}]):
        np.savez(f"v{number}.npz", **tensors)
    for number in range(3):
        run("diff", f"v{number}.npz", f"v{number + 1}.npz", f"{number}.patch")
    Path("2.patch.npz").write_bytes(Path("2.patch").read_bytes())
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    capsys.readouterr()
    run(*command.split(), code=1)
    assert "last argument" in (told := capsys.readouterr().err) or "two patches at least" in told or "to a .npz file" in told
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_fold_can_be_written_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    versions = models()
    for number, tensors in enumerate([*versions, versions[0]]):
        np.savez(f"v{number}.npz", **tensors)
    for number in range(3):
        run("diff", f"v{number}.npz", f"v{number + 1}.npz", f"{number}.patch", "--portable")
    written = []
    for _ in range(2):
        run("fold", "0.patch", "1.patch", "folded.patch")
        run("fold", "0.patch", "1.patch", "2.patch", "nothing.patch")  # its base is its result
        written.append([Path(name).read_bytes() for name in ("folded.patch", "nothing.patch")])
    assert written[0] == written[1]


@pytest.mark.parametrize("write", [write_sharded, lambda path, tensors: np.savez(path, **tensors)], ids=["sharded", "npz"])
def test_max_numel_bounds_what_patches_bring(tmp_path, monkeypatch, write, capsys):
    monkeypatch.chdir(tmp_path)
    small, large = {"a": np.zeros(10), "b": np.zeros(10)}, {"a": np.ones(10), "b": np.zeros(10), "more": np.zeros(1000)}
    suffix = "" if write is write_sharded else ".npz"
    write(Path(f"old{suffix}"), small)
    write(Path(f"new{suffix}"), large)
    write(Path(f"float32{suffix}"), {name: array.astype(np.float32) for name, array in small.items()})
    run("diff", f"old{suffix}", f"new{suffix}", "0.patch")
    run("diff", f"new{suffix}", f"old{suffix}", "1.patch")
    run("diff", f"old{suffix}", f"float32{suffix}", "converted.patch")
    run("patch", f"old{suffix}", "0.patch", f"out{suffix}", "--max-numel", "979", code=3)
    run("fold", "0.patch", "1.patch", "folded.patch", "--base", f"old{suffix}", "--max-numel", "979", code=3)
    assert capsys.readouterr().err.count("1000 new elements, max_numel allows 999") == 2
    run("patch", f"old{suffix}", "0.patch", f"out{suffix}", "--max-numel", "980")
    run("patch", f"old{suffix}", "converted.patch", f"converted{suffix}", "--max-numel", "0")


def test_an_unknown_index_codec_is_refused_in_any_mode(layout, capsys):
    names, *_ = layout
    run("diff", names[0], names[1], "x.patch", "--index", "nonsense", code=2)
    assert "nonsense" in capsys.readouterr().err


def test_after_names_the_patch_that_made_the_old_checkpoint(layout, capsys):
    names, *_ = layout
    run("diff", names[1], names[2], "1.patch")
    run("diff", names[1], names[2], "x.patch", "--after", "1.patch", code=1)
    assert "not the result of the patch" in capsys.readouterr().err
    assert not Path("x.patch").exists()


def test_the_result_has_the_suffix_of_the_old_checkpoint(layout, capsys):
    names, _, _, suffix = layout
    run("diff", names[0], names[1], "0.patch")
    if suffix:
        run("patch", names[0], "0.patch", "out.npz" if suffix != ".npz" else "out.safetensors", code=1)
        assert "the result is a" in capsys.readouterr().err
    run("patch", names[0], "0.patch", ".", code=1)
    run("diff", names[0], names[1], ".", code=1)
    assert all(line.startswith("deepreduce: ") for line in capsys.readouterr().err.splitlines())


@pytest.mark.parametrize("metadata", [None, [], "text"])
def test_an_index_with_odd_metadata(tmp_path, metadata):
    old, new, _ = models()
    for name, tensors in (("old", old), ("new", new)):
        index = write_sharded(tmp_path / name, tensors) / "model.safetensors.index.json"
        index.write_text(json.dumps(json.loads(index.read_text()) | {"metadata": metadata}))
    run("diff", str(tmp_path / "old"), str(tmp_path / "new"), str(tmp_path / "patch"))
    run("patch", str(tmp_path / "old"), str(tmp_path / "patch"), str(tmp_path / "out"))
    written = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert written["metadata"] == {"total_size": sum(array.nbytes for array in new.values())}


def test_a_safetensors_file_has_no_tensor_of_the_name_of_its_metadata(tmp_path):
    save_file({"w": np.zeros(3)}, tmp_path / "old.safetensors")
    (tmp_path / "patch").write_bytes(weights.diff({"w": np.zeros(3)}, {"w": np.zeros(3), "__metadata__": np.ones(3)}))
    with pytest.raises(FileError, match="'__metadata__'"):
        files.patch_files(tmp_path / "old.safetensors", [tmp_path / "patch"], tmp_path / "new.safetensors")
    assert not (tmp_path / "new.safetensors").exists()


def test_sections_that_cannot_be_kept_are_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_SPOOLED_BYTES", 10)
    sink = files.SpoolSink(tmp_path / "gone")
    for write in (sink.group, sink.whole):
        with pytest.raises(FileError, match="cannot write temporary files in"):
            write(bytes(100))
    sink.close()


# slime's layout


def test_slime_knows_two_compressions(tmp_path):
    old, new, _ = same_names()
    with pytest.raises(dr.ConfigError, match="deepreduce or zstd, got 'gzip'"):
        slime.write_version(tmp_path, old, new, 1, compression="gzip")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("size", "error"), [(7, dr.TruncatedError), (9, dr.CorruptError)])
def test_slime_tensors_of_other_sizes_are_refused(tmp_path, size, error):
    folder = slime.write_version(tmp_path, {"w": np.zeros(size, np.uint8)}, {"w": np.ones(size, np.uint8)}, 1, compression="zstd")
    with pytest.raises(error, match="where 8 to 8 are expected"):
        slime.read_version(folder, {"w": np.zeros(8, np.uint8)}, 0)


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
