import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deepreduce as dr
from deepreduce.lab.data import load

from .tensors import gradients, same_bits


@given(gradient=gradients(), seed=st.integers(0, 2**63 - 1))
@settings(max_examples=150, deadline=None)
def test_lossless_specs_give_the_gradient_back_bit_for_bit(gradient, seed):
    exact = np.ascontiguousarray(gradient).reshape(gradient.shape)
    for spec in ("none/all/raw", "none/raw/raw", "none/bitmap/pco", "topr:1.0/raw/raw"):
        assert same_bits(dr.decode(dr.encode(gradient, spec, seed)), exact)
    positive_zeros = np.where(exact == 0, exact.dtype.type(0), exact)
    for spec in ("nonzero/raw/raw", "nonzero/bitmap/raw", "nonzero/auto/pco"):
        assert same_bits(dr.decode(dr.encode(gradient, spec, seed)), positive_zeros)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_nonzero_does_not_send_negative_zeros(dtype):
    rng = np.random.default_rng(0)
    gradient = (rng.standard_normal(1000) * (rng.random(1000) < 0.5)).astype(dtype)  # as dropout makes it: half of the zeros are negative
    assert np.signbit(gradient[gradient == 0]).any()
    sparse = dr.decode_sparse(dr.encode(gradient, "nonzero/rice/raw"))
    assert sparse.nnz == np.count_nonzero(gradient)
    assert np.array_equal(sparse.to_dense(), gradient)
    assert not np.signbit(sparse.to_dense()[gradient == 0]).any()


def test_nan_and_inf_stay_in_place():
    gradient = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    gradient[[3, 500, 999]] = [np.nan, np.inf, -np.inf]
    for spec in ("topr:0.01/raw/fp16", "topr:1/bitmap/raw", "threshold:2/raw/bf16", "chunktopr:1,chunk=100/raw/raw"):
        decoded = dr.decode(dr.encode(gradient, spec))
        assert np.isnan(decoded[3])
        assert decoded[500] == np.inf
        assert decoded[999] == -np.inf


def test_values_too_large_for_a_lossy_codec_go_raw_and_the_message_says_so():
    gradient = np.float32([1e6, 1.0])
    blob = dr.encode(gradient, "none/all/fp16")
    assert dr.inspect(blob).spec == "none/all/raw"
    assert same_bits(dr.decode(blob), gradient)


def relative_error(gradient, decoded):
    exact, got = gradient.astype(np.float64), decoded.astype(np.float64)
    return np.linalg.norm(exact - got) / np.linalg.norm(exact)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("scale", [10.0**power for power in range(-12, 4)])
def test_fp16_stays_within_its_error_or_hands_over(dtype, scale):
    rng = np.random.default_rng(0)
    for spread in (0, 3):
        gradient = (rng.standard_normal(5000) * 10.0 ** -rng.uniform(0, spread + 1e-9, 5000) * scale).astype(dtype)
        blob = dr.encode(gradient, "none/all/fp16")
        used, error = dr.inspect(blob).spec, relative_error(gradient, dr.decode(blob))
        assert used in ("none/all/fp16", "none/all/bf16")
        assert error <= (2**-10 if used == "none/all/fp16" else 2**-8)
        assert used == "none/all/fp16" or scale < 1e-3


def test_fp16_does_not_lose_tiny_gradients():
    gradient = np.full(1000, 1e-8, np.float32)  # nothing is left of it in float16
    assert relative_error(gradient, dr.decode(dr.encode(gradient, "none/all/fp16"))) < 2**-8
    few_tiny = np.concatenate([np.full(1000, 0.5, np.float32), gradient])  # these do not count beside the others
    assert dr.inspect(dr.encode(few_tiny, "none/all/fp16")).spec == "none/all/fp16"
    few_tiny[0] = np.inf
    assert dr.inspect(dr.encode(few_tiny, "none/all/fp16")).spec == "none/all/fp16"
    assert dr.inspect(dr.encode(np.array([1e-300, 1e-8]), "none/all/fp16")).spec == "none/all/bf16"
    assert dr.inspect(dr.encode(np.zeros(5, np.float32), "none/all/fp16")).spec == "none/all/fp16"


def test_half_precisions_keep_what_is_finite_finite_and_take_any_nan():
    signalling = np.array([0x7FA00000], np.uint32).view(np.float32)
    for spec in ("none/all/fp16", "none/all/bf16"):
        assert np.isnan(dr.decode(dr.encode(signalling, spec)))
    assert dr.decode(dr.encode(np.float16([65504]), "none/all/bf16")) == 65504


def test_negative_zeros_stay_small_in_threelc():
    assert not np.signbit(dr.decode(dr.encode(np.full(4, -0.0, np.float32), "none/all/threelc"))).any()


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, ">f4", ">f8"])
def test_shapes_and_dtypes_come_back(shape, dtype):
    gradient = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    decoded = dr.decode(dr.encode(gradient, "topr:0.5/raw/raw"))
    assert decoded.shape == shape
    assert decoded.dtype == np.dtype(dtype).newbyteorder("=")


def test_sparse_tensors_go_the_same_way_as_dense_ones():
    dense = np.zeros((50, 40), np.float32)
    dense[[3, 17, 49], [0, 5, 39]] = [1.5, -2, 7]
    sparse = dr.SparseTensor(np.flatnonzero(dense), dense[dense != 0], dense.shape)
    for spec in (
        "nonzero/raw/raw",
        "topr:2/bitmap/fp16",
        "threshold:1.7/raw/raw",
        "chunktopr:1,chunk=64/raw/raw",
        "randomr:0.1/seeded/raw",
    ):
        if spec.startswith("chunktopr"):  # empty chunks hold nothing in a sparse tensor, and zeros in a dense one
            assert np.array_equal(dr.decode(dr.encode(sparse, spec)), dr.decode(dr.encode(dense, spec)))
        else:
            assert dr.encode(sparse, spec, seed=5) == dr.encode(dense, spec, seed=5)
    assert np.array_equal(dr.decode_sparse(dr.encode(sparse, "none/raw/raw")).indices, sparse.indices)


def test_sparse_tensor_checks_what_it_is_given():
    values = np.float32([1, 2])
    for indices, shape, complaint in [
        ([1, 1], (4,), "increase"),
        ([2, 1], (4,), "increase"),
        ([0, 4], (4,), "0 to 3"),
        ([-1, 2], (4,), "run from -1"),
        ([0, 1, 2], (4,), "as many indices as values"),
        ([0.0, 1.0], (4,), "integers"),
        ([0, 1], (4, -1), "not negative"),
        ([0, 1], (2.7,), "whole numbers, got .2.7"),
        ([0, 1], 5, "whole numbers, got 5"),
        ([0, 1], b"ab", "whole numbers, got b'ab'"),
        ([0, 1], None, "whole numbers, got None"),
        ([0, 1], (2**62, 2), r"fewer than 2\*\*63 elements"),
        ([], (2**62, 2, 0), r"fewer than 2\*\*63 elements"),
    ]:
        with pytest.raises(dr.InputError, match=complaint):
            dr.SparseTensor(np.array(indices), values, shape)
    with pytest.raises(dr.InputError, match="got int32"):
        dr.SparseTensor(np.array([0, 1]), np.int32([1, 2]), (4,))
    assert dr.SparseTensor.from_unsorted([3, 0], values, (4,)).values.tolist() == [2, 1]


@pytest.mark.parametrize("bad", [np.arange(3), np.ones(3, bool), np.ones(3, complex), np.array(["a"]), [1.0, 2.0], 3.0, None])
def test_other_inputs_are_refused(bad):
    with pytest.raises(dr.InputError, match=r"float16|numpy array"):
        dr.encode(bad, "dense")


def test_seeds():
    gradient = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    assert dr.encode(gradient, "randomr:0.1/seeded/raw", seed=1) != dr.encode(gradient, "randomr:0.1/seeded/raw", seed=2)
    with pytest.raises(dr.InputError, match="between 0 and"):
        dr.encode(gradient, "dense", seed=-1)
    with pytest.raises(dr.InputError, match="between 0 and"):
        dr.encode(gradient, "dense", seed=2**63)


@pytest.mark.parametrize("seed", [1.5, "3", None, [1]])
def test_a_seed_is_a_whole_number(seed):
    gradient = np.ones(4, np.float32)
    with pytest.raises(dr.InputError, match="a seed is a whole number, got"):
        dr.encode(gradient, "dense", seed=seed)
    with pytest.raises(dr.InputError, match="a seed is a whole number, got"):
        dr.parse("dense").encode_many({"a": gradient}, seed=seed)


def test_numpy_numbers_are_seeds_and_limits_too():
    gradient = np.random.default_rng(0).standard_normal(300).astype(np.float32)
    codec, tensors = dr.parse("randomr:0.1/seeded/raw"), {"a": gradient, "b": gradient}
    assert codec.encode(gradient, np.int8(127)) == codec.encode(gradient, 127)
    assert codec.encode_many(tensors, np.int8(127)) == codec.encode_many(tensors, 127)
    assert dr.decode(codec.encode(gradient), np.int64(300)).size == 300


@pytest.mark.parametrize("max_numel", [1.5, "3", None])
def test_max_numel_is_a_whole_number(max_numel):
    with pytest.raises(dr.InputError, match="max_numel is a whole number, got"):
        dr.decode(dr.encode(np.ones(2, np.float32), "dense"), max_numel)
    with pytest.raises(dr.InputError, match="max_numel is a whole number, got"):
        dr.decode_many(dr.parse("dense").encode_many({}), max_numel)


@pytest.mark.parametrize("spec", [3, b"dense", None, dr.TopR(1)])
def test_encode_takes_a_spec_or_a_codec(spec):
    with pytest.raises(dr.ConfigError, match="a spec is a string"):
        dr.encode(np.ones(2, np.float32), spec)


def test_what_no_reader_takes_is_not_written():
    deep, codec, one = np.ones((1,) * 33, np.float32), dr.parse("dense"), np.ones(1, np.float32)
    with pytest.raises(dr.InputError, match="a tensor has 33 dimensions, at most 32"):
        codec.encode(deep)
    with pytest.raises(dr.InputError, match="tensor 'b' has 33 dimensions, at most 32"):
        codec.encode_many({"a": one, "b": deep})
    with pytest.raises(dr.InputError, match=r"tensor 'é.*65536 bytes of UTF-8, at most 65535"):
        codec.encode_many({"é" * 32768: one})
    with pytest.raises(dr.InputError, match=r"tensor '\\ud800': the name cannot be written in UTF-8"):
        codec.encode_many({"\ud800": one})
    with pytest.raises(dr.InputError, match=r"names and shapes take \d+ bytes, at most 16777216"):
        codec.encode_many({f"{i:03}" + "x" * 65000: one for i in range(260)})
    widest = {"x" * 65535: one, "d": deep[0]}
    assert dr.decode_many(codec.encode_many(widest)).keys() == widest.keys()


def test_seeded_gives_the_positions_of_randomr():
    gradient = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    by_seed = dr.decode_sparse(dr.encode(gradient, "randomr:0.1/seeded/raw", seed=9))
    by_key = dr.decode_sparse(dr.encode(gradient, "randomr:0.1/raw/raw", seed=9))
    assert np.array_equal(by_seed.indices, by_key.indices)
    assert by_seed.nnz == 500


def test_header_is_small():
    assert len(dr.encode(np.ones(16, np.float32), "none/all/raw")) <= 64 + 32


def test_many_small_tensors_cost_little():
    tensors = {f"layer{i // 40}.{i // 8}.conv{i % 8}.weight": np.full((i % 7 + 1, 3, 3, 3), i, np.float32) for i in range(161)}
    blob = dr.parse("none/all/raw").encode_many(tensors)
    assert len(blob) - sum(tensor.nbytes for tensor in tensors.values()) <= 16 * 161
    decoded = dr.decode_many(blob)
    assert list(decoded) == list(tensors)
    assert all(same_bits(decoded[name], tensors[name]) for name in tensors)


def test_many_tensors_of_a_recorded_gradient():
    tensors = load("resnet20")
    blob = dr.parse("topr:0.01/raw/fp16").encode_many(tensors, seed=4)
    info, decoded = dr.inspect(blob), dr.decode_many(blob)
    assert info.nbytes == len(blob)
    assert info.numel == 269_722
    for name, tensor in tensors.items():
        kept = decoded[name] != 0
        assert kept.sum() == max(1, round(0.01 * tensor.size)) == info.tensors[name].nnz
        assert np.abs(tensor[kept]).min() >= np.abs(tensor[~kept]).max(initial=0)


def test_many_tensors_name_the_one_that_is_wrong():
    with pytest.raises(dr.InputError, match=r"tensor 'b': .*int64"):
        dr.parse("dense").encode_many({"a": np.ones(2, np.float32), "b": np.arange(3)})
    with pytest.raises(dr.InputError, match="named by strings"):
        dr.parse("dense").encode_many({1: np.ones(2, np.float32)})
    assert dr.decode_many(dr.parse("dense").encode_many({})) == {}


def test_any_bytes_like_can_be_decoded():
    blob = dr.encode(np.float32([1, 2]), "dense")
    for form in (bytearray(blob), memoryview(blob), np.frombuffer(blob, np.uint8), np.frombuffer(blob, np.uint8).copy()):
        assert dr.decode(form).tolist() == [1, 2]


@pytest.mark.parametrize("wrong", [None, "abc", [1, 2], 3, np.ones(3, ml_dtypes.bfloat16), np.zeros(8, np.uint8)[::2]])
def test_what_is_not_bytes_is_refused(wrong):
    for read in (dr.decode, dr.decode_many, dr.inspect):
        with pytest.raises(dr.FormatError, match="a message is bytes, bytearray, memoryview or a uint8 array, got"):
            read(wrong)


def test_no_bytes_are_a_truncated_message():
    for empty in (b"", np.zeros(0, np.uint8), np.zeros((0, 3), np.uint8)):
        with pytest.raises(dr.TruncatedError):
            dr.decode(empty)


def test_decoded_arrays_are_the_callers_own():
    for spec in ("dense", "nonzero/raw/raw"):
        decoded = dr.decode(dr.encode(np.float32([1, 2]), spec))
        decoded += 1
        assert decoded.tolist() == [2, 3]
