"""The numbers of `deepreduce bench` are those of `inspect`, and a codec that lies is found before it is timed."""

import csv
import json

import numpy as np
import pytest

import deepreduce as dr
from deepreduce.cli.main import main
from deepreduce.lab.bench.measure import RoundTripError, check, measure
from deepreduce.lab.bench.peers import measure_peers
from deepreduce.lab.bench.specs import DEFAULT, FIGURE_10
from deepreduce.lab.bench.store import as_record
from deepreduce.lab.data import load


@pytest.fixture(scope="module")
def convolution():
    return load("resnet20")["l.8.c2.weight"]


@pytest.mark.parametrize("spec", ["topr:0.01/raw/raw", "topr:0.01/pco/qsgd", "topr:0.01/raw/fitpoly", "dense"])
def test_numbers_of_one_tensor_are_those_of_inspect(convolution, spec):
    row = measure("g", convolution, spec, repeat=1)
    info = dr.inspect(dr.encode(convolution, spec))
    for name in ("nbytes", "header_bytes", "index_bytes", "order_bytes", "value_bytes", "nnz", "numel", "bits_per_index", "bits_per_value"):
        assert getattr(row, name) == getattr(info, name), name
    assert row.used == info.spec


def test_numbers_of_many_tensors_are_those_of_inspect():
    gradient = load("resnet20")
    row = measure("g", gradient, "topr:0.01/pco/fp16", repeat=1)
    info = dr.inspect(dr.parse("topr:0.01/pco/fp16").encode_many(gradient))
    assert (row.nbytes, row.header_bytes, row.nnz, row.numel) == (info.nbytes, info.header_bytes, info.nnz, info.numel)
    assert row.index_bytes == sum(tensor.index_bytes for tensor in info.tensors.values())
    assert row.header_bytes + row.index_bytes + row.order_bytes + row.value_bytes == row.nbytes


def test_errors_are_relative_norms(convolution):
    row = measure("g", convolution, "topr:0.01/raw/fp16", repeat=1)
    dense = convolution.astype(np.float64)
    received = dr.decode(dr.encode(convolution, "topr:0.01/raw/fp16")).astype(np.float64)
    kept = received != 0
    assert row.relative_error == pytest.approx(np.linalg.norm(received - dense) / np.linalg.norm(dense), rel=1e-9)
    assert row.codec_error == pytest.approx(np.linalg.norm((received - dense)[kept]) / np.linalg.norm(dense[kept]), rel=1e-6)
    assert measure("g", convolution, "dense", repeat=1).relative_error == 0


def test_a_changed_value_is_refused(convolution):
    blob = dr.encode(convolution, "topr:0.01/raw/raw")
    sent = dr.decode_sparse(blob)
    changed = dr.SparseTensor(sent.indices, sent.values * np.float32(1.001), sent.shape)
    with pytest.raises(RoundTripError, match="does not allow"):
        check({"": convolution}, {"": dr.inspect(blob)}, {"": changed})


def test_a_lossy_codec_is_held_to_its_bound(convolution):
    blob = dr.encode(convolution, "topr:0.01/raw/fp16")
    sent = dr.decode_sparse(blob)
    changed = dr.SparseTensor(sent.indices, sent.values * np.float32(1.01), sent.shape)
    check({"": convolution}, {"": dr.inspect(blob)}, {"": sent})
    with pytest.raises(RoundTripError, match="does not allow"):
        check({"": convolution}, {"": dr.inspect(blob)}, {"": changed})


@pytest.mark.parametrize("value", ["raw", "fp16", "bf16", "qsgd"])
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_a_right_round_trip_of_non_finite_values_is_right(convolution, value, number):
    gradient = convolution.copy().reshape(-1)
    gradient[[7, 4000]] = number
    row = measure("g", gradient, f"topr:0.01/raw/{value}", repeat=1)
    assert np.isfinite(row.relative_error)
    assert row.codec_error < 0.01


def test_a_wrong_round_trip_of_non_finite_values_is_wrong(convolution):
    gradient = convolution.copy().reshape(-1)
    gradient[7] = np.inf
    blob = dr.encode(gradient, "topr:0.01/raw/fp16")
    sent = dr.decode_sparse(blob)
    for wrong in (-np.inf, np.nan, 65504.0):
        values = np.where(np.isinf(sent.values), np.float32(wrong), sent.values)
        with pytest.raises(RoundTripError, match="does not allow"):
            check({"": gradient}, {"": dr.inspect(blob)}, {"": dr.SparseTensor(sent.indices, values, sent.shape)})
    lost = measure("g", gradient, "randomr:10/raw/raw", repeat=1)
    assert lost.relative_error == np.inf
    assert as_record(lost)["relative_error"] == "inf"


def test_default_specs_are_valid_and_cover_the_paper():
    for spec in DEFAULT.values():
        dr.parse(spec)
    assert {"Top-r", "BF-P2", "Fit-Poly", "Fit-DExp", "QSGD", "SKCompress"} <= set(FIGURE_10)
    assert any("/auto/" in spec for spec in DEFAULT.values())


def test_peers_count_what_they_send(convolution):
    rows = {row.method: row for row in measure_peers("g", convolution, repeat=1)}
    assert rows["zlib"].relative_error == rows["pcodec"].relative_error == 0
    if "torch.topk" in rows:
        kept = dr.inspect(dr.encode(convolution, "topr:0.01/raw/raw")).nnz
        assert rows["torch.topk"].nbytes == 12 * kept
        assert rows["fp16 hook"].nbytes == 2 * convolution.size
        assert rows["PowerSGD hook"].nbytes == 4 * (64 + 576)


def test_command_writes_rows_with_their_origin(tmp_path, convolution, capsys):
    np.save(tmp_path / "g.npy", convolution)
    spec = "topr:0.01/pco/fp16"
    arguments = ["bench", "--gradient", str(tmp_path / "g.npy"), "--codec", spec, "--codec", "dense", "--repeat", "1"]
    assert main([*arguments, "--report", str(tmp_path / "out")]) == 0
    rows = list(csv.DictReader((tmp_path / "out" / "bench.csv").read_text().splitlines()))
    plain = json.loads((tmp_path / "out" / "bench.json").read_text())
    info = dr.inspect(dr.encode(convolution, spec))
    first = next(row for row in rows if row["spec"] == spec)
    assert int(first["nbytes"]) == info.nbytes == plain["rows"][0]["nbytes"]
    assert float(first["bits_per_index"]) == info.bits_per_index
    assert first["machine"] == plain["provenance"]["machine"]
    assert "numpy=" in first["versions"]
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()
    assert "report.html" in capsys.readouterr().out


def test_a_wrong_spec_is_told_before_anything_is_measured(tmp_path, capsys):
    assert main(["bench", "--codec", "topr:0.01/nonsense/raw", "--report", str(tmp_path / "out")]) == 2
    assert "nonsense" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
