import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import deepreduce as dr
from deepreduce import kernels, weights
from deepreduce.cli import warm
from deepreduce.cli.main import main
from deepreduce.cli.training import DEMO_CODECS
from deepreduce.lab.data import load


def run(*arguments):
    return main([str(argument) for argument in arguments])


def test_one_tensor_there_and_back(tmp_path, capsys):
    gradient = load("resnet20")["l.8.c2.weight"]
    np.save(tmp_path / "g.npy", gradient)
    assert run("encode", tmp_path / "g.npy", tmp_path / "g.dr", "--codec", "topr:0.01/raw/fp16", "--seed", 3) == 0
    blob = (tmp_path / "g.dr").read_bytes()
    assert blob == dr.encode(gradient, "topr:0.01/raw/fp16", seed=3)
    assert f"{len(blob):,} bytes" in capsys.readouterr().out
    assert run("decode", tmp_path / "g.dr", tmp_path / "back.npy") == 0
    assert np.array_equal(np.load(tmp_path / "back.npy"), dr.decode(blob))
    assert run("inspect", tmp_path / "g.dr", "--json") == 0
    shown = json.loads(capsys.readouterr().out.partition("{")[2].join(["{", ""]))
    info = dr.inspect(blob)
    assert (shown["nbytes"], shown["index_bytes"], shown["spec"], shown["shape"]) == (
        len(blob),
        info.index_bytes,
        info.spec,
        [64, 64, 3, 3],
    )


def test_many_tensors_there_and_back(tmp_path, capsys):
    tensors = {"file": np.float32([1, 0, 2]), "a/b": np.ones((2, 2), np.float64), "h": np.ones(3, ml_dtypes.bfloat16)}
    np.savez(tmp_path / "g.npz", **{name: tensor for name, tensor in tensors.items() if name != "file"}, x=tensors["file"])
    assert run("encode", tmp_path / "g.npz", tmp_path / "g.dr", "--codec", "nonzero/bitmap/raw") == 0
    assert run("inspect", tmp_path / "g.dr") == 0
    shown = capsys.readouterr().out
    assert "nonzero/bitmap/raw" in shown
    assert "bfloat16" in shown
    assert run("decode", tmp_path / "g.dr", tmp_path / "back.npz") == 0
    back = np.load(tmp_path / "back.npz")
    assert back["a/b"].tolist() == [[1, 1], [1, 1]]
    assert back["x"].tolist() == [1, 0, 2]
    assert back["h"].view(ml_dtypes.bfloat16).tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", "a/../../b", "..", "a\\b", "C:/evil", "a\0b", "line\nbreak", "x" * 65_535])
def test_unsafe_tensor_names_are_refused_and_nothing_is_written(tmp_path, capsys, name):
    tensors = {"good": np.ones(2, np.float32), name: np.ones(2, np.float32)}
    (tmp_path / "m.dr").write_bytes(dr.parse("dense").encode_many(tensors))
    assert run("decode", tmp_path / "m.dr", tmp_path / "back.npz") == 1
    error = capsys.readouterr().err
    assert "nothing is written" in error
    assert error.count("\n") == 1
    assert len(error) < 500
    assert [path.name for path in tmp_path.iterdir()] == ["m.dr"]


@pytest.mark.parametrize("name", ["", "layer.0/weight:0", "w:0", "..a/b..", "module.weight", "größe", "a b"])
def test_usual_tensor_names_are_kept(tmp_path, name):
    (tmp_path / "m.dr").write_bytes(dr.parse("dense").encode_many({name: np.ones(2, np.float32)}))
    assert run("decode", tmp_path / "m.dr", tmp_path / "back.npz") == 0
    assert np.load(tmp_path / "back.npz").files == [name]


def test_codecs_lists_every_name_and_preset(capsys):
    from deepreduce import presets, registry

    assert run("codecs") == 0
    shown = capsys.readouterr().out
    for stage in registry.STAGES:
        assert all(f"\n{entry.name} " in shown for entry in stage.table)
    assert all(spec in shown for spec in presets.PRESETS.values())


def test_problems_are_told_in_one_line_with_an_exit_code(tmp_path, capsys):
    np.save(tmp_path / "g.npy", np.ones(4, np.float32))
    np.save(tmp_path / "int.npy", np.arange(4))
    (tmp_path / "bad.dr").write_bytes(b"nonsense")
    (tmp_path / "bad.npy").write_bytes(b"nonsense")
    good = ["--codec", "dense"]
    assert run("encode", tmp_path / "g.npy", tmp_path / "m.dr", *good) == 0
    for code, complaint, arguments in [
        (1, "none.npy is not a readable .npy or .npz file: No such file", ["encode", tmp_path / "none.npy", tmp_path / "x.dr", *good]),
        (1, "bad.npy is not a readable", ["encode", tmp_path / "bad.npy", tmp_path / "x.dr", *good]),
        (1, "float16, bfloat16, float32 or float64, got int64", ["encode", tmp_path / "int.npy", tmp_path / "x.dr", *good]),
        (1, "cannot write", ["encode", tmp_path / "g.npy", tmp_path / "no" / "x.dr", *good]),
        (2, "unknown index codec 'rawr'", ["encode", tmp_path / "g.npy", tmp_path / "x.dr", "--codec", "none/rawr/raw"]),
        (3, "not a deepreduce message", ["decode", tmp_path / "bad.dr", tmp_path / "x.npy"]),
        (3, "max_numel allows 3", ["decode", tmp_path / "m.dr", tmp_path / "x.npy", "--max-numel", 3]),
        (3, "not a deepreduce message", ["inspect", tmp_path / "bad.dr"]),
        (1, "write it to a .npy file", ["decode", tmp_path / "m.dr", tmp_path / "x.npz"]),
        (1, "cannot read", ["inspect", tmp_path / "none.dr"]),
    ]:
        capsys.readouterr()
        assert run(*arguments) == code, arguments
        shown = capsys.readouterr()
        assert complaint in shown.err
        assert "Traceback" not in shown.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.dr", "bad.npy", "g.npy", "int.npy", "m.dr"]


def damaged_npz(path):
    np.savez_compressed(path, w=np.arange(4000, dtype=np.float32))
    whole = bytearray(path.read_bytes())
    whole[200:400] = b"\xff" * 200
    path.write_bytes(whole)


def forged_npy(path):
    np.save(path, np.ones(4, np.float32))
    path.write_bytes(path.read_bytes().replace(b"(4,), }           ", b"(99999999999999,)}"))


def broken_header_npy(path):
    np.save(path, np.ones(4, np.float32))
    path.write_bytes(path.read_bytes().replace(b"(4,)", b"((((", 1))


@pytest.mark.parametrize(("make", "name"), [(damaged_npz, "g.npz"), (forged_npy, "g.npy"), (broken_header_npy, "g.npy")])
def test_damaged_tensor_files_are_told_in_one_line(tmp_path, capsys, make, name):
    make(tmp_path / name)
    assert run("encode", tmp_path / name, tmp_path / "m.dr", "--codec", "dense") == 1
    error = capsys.readouterr().err
    assert f"{name} is not a readable .npy or .npz file" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("target", [".", "/"])
def test_target_without_a_name_is_told_in_one_line(tmp_path, capsys, target):
    np.save(tmp_path / "g.npy", np.ones(4, np.float32))
    assert run("encode", tmp_path / "g.npy", target, "--codec", "dense") == 1
    assert f"cannot write {target}" in capsys.readouterr().err


def test_nothing_is_left_beside_a_target_that_is_a_folder(tmp_path):
    np.save(tmp_path / "g.npy", np.ones(4, np.float32))
    (tmp_path / "m.dr").mkdir()
    assert run("encode", tmp_path / "g.npy", tmp_path / "m.dr", "--codec", "dense") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g.npy", "m.dr"]


def test_inspect_shows_the_names_of_a_peer_as_they_are(tmp_path, capsys):
    names = ["[/foo]", "a[bold]c", "\x1b[2Jw"]
    tensors = {name: np.ones(4, np.float32) for name in names}
    (tmp_path / "m.dr").write_bytes(dr.parse("dense").encode_many(tensors))
    (tmp_path / "p.patch").write_bytes(weights.diff({}, tensors))
    for path in tmp_path.iterdir():
        assert run("inspect", path) == 0
        shown = capsys.readouterr().out
        assert all(f"\n{name} " in shown for name in (*names[:2], r"\x1b[2Jw"))
        assert "\x1b" not in shown


@pytest.mark.parametrize("target", ["no/such/folder/out.json", "."])
def test_results_that_cannot_be_written_are_told_before_training(tmp_path, capsys, monkeypatch, target):
    monkeypatch.setattr("deepreduce.lab.train.launcher.launch", lambda *_: pytest.fail("it trains"))
    assert run("train", "--codec", "dense", "--json", tmp_path / target) == 1
    assert f"cannot write {tmp_path / target}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["encode", "--help"], ["decode", "--help"], ["inspect", "--help"], ["codecs", "--help"], ["warmup", "--help"]]
)
def test_help_has_an_example(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        run(*arguments)
    assert left.value.code == 0
    assert "example" in capsys.readouterr().out


def test_warmup_compiles_what_a_spec_needs(capsys):
    assert run("warmup", "--codec", "topr:0.1/bitmap/fp16") == 0
    assert "compiled the kernels of 1 spec" in capsys.readouterr().out


def test_warmup_compiles_the_selection_that_needs_no_sample(monkeypatch):
    sizes, top = [], kernels.selection.top
    monkeypatch.setattr(kernels.selection, "top", lambda bits, *rest: sizes.append(bits.size) or top(bits, *rest))
    warm.compile_messages("topr:0.1/raw/raw", np.dtype(np.float32))
    assert max(sizes) >= kernels.selection.SMALL


def test_compiling_is_announced_once(tmp_path):
    code = "import numpy as np; from deepreduce.kernels import bits; bits.unpack(bits.pack(np.uint64([1, 2]), 4), 4, 2)"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    first, second = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment).stderr for _ in range(2)
    )
    assert first.count("compiling kernels, once on this machine for each codec and dtype") == 1
    assert "compiling" not in second


def test_set_up_compiles_what_the_demo_needs():
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    assert f"DEMO_CODECS := {' '.join(DEMO_CODECS)}\n" in makefile


def test_the_installed_command_runs():
    result = subprocess.run([sys.executable, "-m", "deepreduce.cli.main", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == f"deepreduce {dr.__version__}"
