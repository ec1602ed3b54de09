"""Official files are read as they are, and what is missing or wrong is told with what is expected where."""

import os
import pickle
import signal
import subprocess
import sys

import numpy as np
import pytest

from deepreduce.errors import ConfigError
from deepreduce.lab.train import imagenet, tasks
from deepreduce.lab.train.batches import Images, shares
from deepreduce.lab.train.contract import Plan, evaluation_steps
from deepreduce.lab.train.failures import DataError
from deepreduce.lab.train.method_specs import MethodSpec, method_text
from deepreduce.lab.train.tasks import TASKS, task_of
from deepreduce.lab.train.text import CONTEXT


def read_data(task, data, seed, negatives):
    where = None if data is None else str(data)
    plan = Plan(task, "", (), workers=1, batch=1, steps=1, evaluations=1, learning_rate=0.1, data=where, seed=seed, negatives=negatives)
    return tasks.read_data(plan)


NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def records(number, count=20):
    rng = np.random.default_rng(number)
    table = rng.integers(0, 256, (count, 3073), np.uint8)
    table[:, 0] = np.arange(count) % 10
    return table


@pytest.fixture
def binary(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for number, name in enumerate(NAMES):
        records(number).tofile(folder / f"{name}.bin")
    return tmp_path


@pytest.fixture
def python_version(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for number, name in enumerate(NAMES):
        table = records(number)
        batch = {b"labels": table[:, 0].tolist(), b"data": table[:, 1:].copy(), b"batch_label": b"x"}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return tmp_path


def test_both_versions_of_cifar10_hold_the_same(binary, python_version):
    ours = read_data("cifar10", binary, 0, 99)
    (binary / "cifar-10-batches-bin").rename(binary / "elsewhere")
    theirs = read_data("cifar10", python_version, 0, 99)
    assert np.array_equal(ours.train_images, theirs.train_images)
    assert np.array_equal(ours.test_labels, theirs.test_labels)
    assert ours.train_images.shape == (100, 3, 32, 32)
    images, labels = next(ours.train_batches(0, 2, 8, seed=0))
    assert (images.shape, images.dtype, labels.dtype) == ((8, 3, 32, 32), np.float32, np.int64)


def test_a_pickle_cannot_run_code(python_version):
    path = python_version / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(b"cos\nsystem\n(S'echo ran'\ntR.")
    with pytest.raises(DataError, match=r"data_batch_3.*os\.system"):
        read_data("cifar10", python_version, 0, 99)


@pytest.mark.parametrize("task", ["cifar10", "ml1m"])
def test_missing_data_says_what_is_expected(task, tmp_path):
    wanted = {"cifar10": "data_batch_1.bin", "ml1m": "ratings.dat"}[task]
    with pytest.raises(DataError, match=f"--data DIR.*{wanted}"):
        read_data(task, None, 0, 99)
    with pytest.raises(DataError, match=f"{tmp_path}.*{wanted}"):
        read_data(task, tmp_path, 0, 99)


def test_damaged_cifar10_is_refused(binary):
    folder = binary / "cifar-10-batches-bin"
    whole = (folder / "data_batch_2.bin").read_bytes()
    (folder / "data_batch_2.bin").write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"data_batch_2.bin has .* bytes: expected are 10,000 records"):
        read_data("cifar10", binary, 0, 99)
    (folder / "data_batch_2.bin").write_bytes(b"\x0b" + whole[1:])
    with pytest.raises(DataError, match=r"labels outside 0\.\.9"):
        read_data("cifar10", binary, 0, 99)
    (folder / "data_batch_2.bin").unlink()
    with pytest.raises(DataError, match=r"lacks data_batch_2\.bin"):
        read_data("cifar10", binary, 0, 99)


@pytest.fixture
def movies(tmp_path):
    """Four users; each saw items 10, 20, ... and last, by time but not by line, item 50."""
    lines = [f"{user}::{item}::5::{1000 if item == 50 else item}" for user in (1, 2, 3, 7) for item in (50, 10, 20, 30)]
    lines += [f"9::{item}::3::{item}" for item in range(60, 100)]
    (tmp_path / "ratings.dat").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_the_latest_rating_of_each_user_is_held_out(movies):
    data = read_data("ml1m", movies, 0, negatives=3)
    items = [10, 20, 30, 50, *range(60, 100)]
    assert (data.user_count, data.item_count) == (5, len(items))
    assert data.test_candidates[:, 0].tolist() == [items.index(50)] * 4 + [items.index(99)]
    assert items.index(50) not in data.items[data.users < 4]
    for user, row in enumerate(data.test_candidates):
        seen = set(data.items[data.users == user].tolist()) | {int(row[0])}
        assert not seen & set(row[1:].tolist())
        assert len(set(row.tolist())) == 4


def test_negatives_are_never_seen_items(movies):
    data = read_data("ml1m", movies, 0, negatives=3)
    users, items, labels = next(data.train_batches(0, 1, 16, seed=1))
    assert labels.sum() == 16
    assert users.size == 80
    positive = set(zip(data.users.tolist(), data.items.tolist(), strict=True)) | set(enumerate(data.test_candidates[:, 0].tolist()))
    pairs = set(zip(users[labels == 0].tolist(), items[labels == 0].tolist(), strict=True))
    assert not pairs & positive


def test_wrong_ratings_are_refused(tmp_path):
    (tmp_path / "ratings.dat").write_text("1::2::3\n")
    with pytest.raises(DataError, match="3 columns"):
        read_data("ml1m", tmp_path, 0, 99)
    (tmp_path / "ratings.dat").write_text("userId,movieId,rating,timestamp\n")
    with pytest.raises(DataError, match="UserID::MovieID"):
        read_data("ml1m", tmp_path, 0, 99)


def test_too_many_negatives_are_refused(movies):
    with pytest.raises(DataError, match="99 negatives"):
        read_data("ml1m", movies, 0, 99)


def test_shares_of_an_epoch_are_disjoint_and_complete():
    streams = [shares(24, rank, 3, 4, seed=5) for rank in range(3)]
    epoch = [number for _ in range(2) for stream in streams for number in next(stream).tolist()]
    assert sorted(epoch) == list(range(24))


def test_every_test_image_is_seen_once():
    labels = np.arange(1001)
    images = np.zeros((1001, 1, 2, 2), np.uint8)
    data = Images(images, labels, images, labels, np.zeros(1, np.float32), np.ones(1, np.float32))
    seen = [label for rank in range(3) for _, batch in data.test_batches(rank, 3) for label in batch.tolist()]
    assert sorted(seen) == labels.tolist()


def test_augmented_images_are_shifted_copies():
    images = np.arange(2 * 64, dtype=np.uint8).reshape(2, 1, 8, 8) + 1
    data = Images(
        images, np.zeros(2, np.int64), images, np.zeros(2, np.int64), np.zeros(1, np.float32), np.ones(1, np.float32), augment=True
    )
    batch, _ = next(data.train_batches(0, 1, 2, seed=3))
    assert batch.shape == images.shape
    assert {*np.unique(batch)} <= {0, *np.unique(images)}
    assert np.array_equal(images, np.arange(2 * 64).reshape(2, 1, 8, 8) + 1)


def test_unknown_tasks_are_listed():
    with pytest.raises(ConfigError, match="digits, cifar10, imagenet, ml1m, text, ml20m"):
        task_of("mnist")


@pytest.mark.parametrize(("steps", "evaluations"), [(1, 5), (7, 3), (500, 12)])
def test_the_last_step_is_always_evaluated(steps, evaluations):
    chosen = evaluation_steps(steps, evaluations)
    assert steps in chosen
    assert len(chosen) == min(steps, evaluations)
    assert min(chosen) >= 1


def test_models_are_named_by_their_tasks():
    assert {name: task.models[0] for name, task in TASKS.items()} == {
        "digits": "mlp",
        "cifar10": "resnet20",
        "imagenet": "resnet50",
        "ml1m": "neumf",
        "text": "gpt",
        "ml20m": "neumf",
    }


def test_digits_are_always_split_alike():
    first, second = read_data("digits", None, 0, 99), read_data("digits", None, 1, 99)
    assert np.array_equal(first.test_images, second.test_images)
    assert (len(first.train_labels), len(first.test_labels)) == (1347, 450)


def test_no_evaluations_is_none():
    assert evaluation_steps(10, 0) == set()


# ImageNet


@pytest.fixture
def folders(tmp_path):
    """Two classes of small images: one dark, one bright; wide, high, and one that is grey."""
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 6), ("val", 3)):
        for label, shade in (("n01", 20), ("n02", 230)):
            folder = tmp_path / part / label
            folder.mkdir(parents=True)
            for number in range(count):
                mode, fill = ("L", shade) if number == 0 else ("RGB", (shade,) * 3)
                image.new(mode, (300 + 40 * number, 340 - 40 * number), fill).save(folder / f"{number}.JPEG")
    return tmp_path


def test_folders_of_images_are_read_by_class(folders):
    data = read_data("imagenet", folders, 0, 99)
    assert (len(data.train_files), len(data.test_files), data.note) == (12, 6, "")
    images, labels = next(data.train_batches(0, 1, 12, seed=0))
    assert (images.shape, images.dtype, sorted(labels.tolist())) == ((12, 3, 224, 224), np.float32, [0] * 6 + [1] * 6)
    assert np.array_equal(images.mean((1, 2, 3)) > 0, labels == 1)
    tested = [label for rank in range(2) for images, batch in data.test_batches(rank, 2) for label in batch.tolist()]
    assert sorted(tested) == [0] * 3 + [1] * 3


def test_wrong_folders_of_images_say_what_is_expected(folders):
    with pytest.raises(DataError, match=r"no folder .*train.*one folder per class"):
        read_data("imagenet", folders / "train", 0, 99)
    (folders / "val" / "n02").rename(folders / "val" / "n03")
    with pytest.raises(DataError, match="different classes"):
        read_data("imagenet", folders, 0, 99)
    for path in (folders / "val" / "n03").iterdir():
        path.unlink()
    with pytest.raises(DataError, match="2 class folders, 1 with images"):
        read_data("imagenet", folders, 0, 99)


def test_decoders_are_as_many_as_a_worker_has_cores(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(imagenet, "usable_cores", lambda: [4, 5, 6, 7])
    assert imagenet._decoder_count() == 4  # the launcher has bound the worker to its share
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # torchrun has not
    assert imagenet._decoder_count() == 2


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_decoders_end_with_a_worker_that_is_killed():
    script = (
        "import os, signal\nfrom deepreduce.lab.train.imagenet import _decoders\npool = _decoders()\n"
        "print(pool.submit(os.getpid).result(), flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as worker:
        decoder = int(worker.stdout.readline())
        try:
            worker.communicate(timeout=30)  # the pipe is closed when the last process that has it has ended
        except subprocess.TimeoutExpired:
            os.kill(decoder, 9)
            raise
    assert worker.returncode == -signal.SIGKILL


def test_made_data_says_so_and_has_the_size_of_the_original():
    images = read_data("imagenet", None, 0, 99)
    batch, labels = next(images.train_batches(0, 2, 3, seed=0))
    assert (batch.shape, labels.shape) == ((3, 3, 224, 224), (3,))
    ratings = read_data("ml20m", None, 0, 99)
    users, items, wanted = next(ratings.train_batches(0, 2, 50_000, seed=0))
    assert (users.size, wanted.sum()) == (250_000, 50_000)
    assert users.max() < ratings.user_count == 138_493
    assert items.max() < ratings.item_count == 26_744
    assert "made" in images.note
    assert "made" in ratings.note
    popular = np.mean(items[:50_000] < ratings.item_count // 10)
    assert popular == pytest.approx(0.444, abs=0.02)  # of ML-1M's ratings, those of the most popular tenth


# MovieLens-20M


def test_ratings_of_ml20m_are_read(tmp_path):
    lines = [f"{user},{item},3.5,{1000 if item == 50 else item}" for user in (1, 2) for item in (50, 10, 20)]
    lines += [f"9,{item},4.0,{item}" for item in range(60, 100)]
    (tmp_path / "ratings.csv").write_text("\n".join(["userId,movieId,rating,timestamp", *lines]) + "\n")
    data = read_data("ml20m", tmp_path, 0, negatives=3)
    assert (data.user_count, data.item_count) == (3, 43)
    assert data.test_candidates[:2, 0].tolist() == [2, 2]
    (tmp_path / "ratings.csv").write_text("1::2::3::4\n")
    with pytest.raises(DataError, match=r"begins with '1::2::3::4'; expected is ratings\.csv"):
        read_data("ml20m", tmp_path, 0, 99)
    with pytest.raises(DataError, match="no MovieLens-20M in"):
        read_data("ml20m", tmp_path / "elsewhere", 0, 99)


# Text


def test_the_standard_library_is_the_text_without_a_file():
    found = read_data("text", None, 0, 99)
    assert b"def " in found.train.tobytes()
    assert 5 * found.test.size < found.train.size
    assert "standard library" in found.note


def test_targets_are_the_bytes_that_follow(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(200)) * 10)
    found = read_data("text", tmp_path / "text", 0, 99)
    for rank in range(2):
        inputs, targets = next(found.train_batches(rank, workers=2, batch=3, seed=1))
        assert inputs.shape == targets.shape == (3, CONTEXT)
        assert np.array_equal((inputs + 1) % 200, targets)
    first, second = (next(found.train_batches(rank, workers=2, batch=3, seed=1))[0] for rank in range(2))
    assert not np.array_equal(first, second)


def test_ranks_share_the_validation_windows(tmp_path):
    (tmp_path / "text").write_bytes(np.random.default_rng(0).bytes(5000))
    found = read_data("text", tmp_path / "text", 0, 99)
    alone = [row.tobytes() for inputs, _ in found.test_batches(0, 1) for row in inputs]
    shared = [row.tobytes() for rank in range(3) for inputs, _ in found.test_batches(rank, 3) for row in inputs]
    assert sorted(alone) == sorted(shared)


def test_too_little_text_is_refused(tmp_path):
    (tmp_path / "text").write_bytes(b"short")
    with pytest.raises(DataError, match="more than 640 bytes of text, 5 were found"):
        read_data("text", tmp_path / "text", 0, 99)
    with pytest.raises(DataError, match="--data FILE"):
        read_data("text", tmp_path, 0, 99)


# Methods


@pytest.mark.parametrize(
    "method",
    [
        "local",
        "local:0",
        "local:x",
        "local:5,rate=1",
        "updates:3",
        "dgc",
        "averages",
        "local:5,outer",
        "local:5,warmup=1.5",
        "local:5,warmup=-1",
        "local:5,delay=0.5",
        "local:5,delay=1,delay=2",
        "local:5,fragments=x",
    ],
)
def test_unknown_methods_say_what_there_is(method):
    with pytest.raises(ConfigError, match=r"a method is gradients .* or local:EVERY"):
        method_text(method, "topr:0.01/rice/qsgd")


@pytest.mark.parametrize(
    ("spec", "options", "reason"),
    [
        ("local:10 none/all/lloyd:2", {"precision": "bf16"}, "train in fp32, got bf16"),
        ("updates topr:0.01/rice/qsgd", {"precision": "fp16"}, "train in fp32, got fp16"),
        ("dgc:100 nonzero/auto/qsgd", {}, "nonzero/auto/qsgd has none"),
        ("dgc:100 topr:0.5/raw/raw", {}, "at least the density of its spec"),
        ("dgc:100 topr:0.01/raw/raw", {"memory": "none"}, "residual memory, got memory none"),
        ("local:10,delay=10 none/all/lloyd:2", {}, "delay is below .* got delay=10, fragments=1 in local:10"),
        ("local:10,fragments=0 none/all/lloyd:2", {}, "fragments are at least 1 .* got delay=0, fragments=0 in local:10"),
        ("local:10 none/all/lloyd:2", {"framework": "jax"}, "jax trains by gradients"),
        ("dense", {"framework": "jax", "task": "cifar10"}, "jax trains digits .* got cifar10"),
        ("dense", {"framework": "jax", "link": "100mbit"}, "shaped links; got link 100mbit"),
    ],
)
def test_a_plan_that_no_worker_can_train_is_refused(spec, options, reason):
    settings = {"task": "digits", "workers": 2, "batch": 1, "steps": 1, "evaluations": 1, "learning_rate": 0.1} | options
    with pytest.raises(ConfigError, match=reason):
        Plan(model="mlp", specs=("dense", spec), **settings)


def test_a_method_is_what_its_text_says():
    assert MethodSpec.parse("local:10 none/all/lloyd:2").outer is None
    assert MethodSpec.parse("local:10,outer=0.9,momentum=0.5 topr:0.1/rice/qsgd").outer == (0.9, 0.5)
    assert MethodSpec.parse("local:10,warmup=40 none/all/lloyd:2") == MethodSpec("local", "none/all/lloyd:2", 10, None, 40)
    assert MethodSpec.parse("local:8,fragments=4,delay=1 none/all/raw") == MethodSpec("local", "none/all/raw", 8, delay=1, fragments=4)
    assert MethodSpec.parse("dgc:400 topr:0.1/rice/qsgd") == MethodSpec("dgc", "topr:0.1/rice/qsgd", 400)
