"""The commands on a large sharded checkpoint: time, peak memory, and what a killed run leaves.

    python benchmarks/weights_checkpoint.py FOLDER [--gigabytes 4]

Makes three versions of a bfloat16 checkpoint in shards of half a gigabyte in FOLDER (which needs five times the size, and is emptied
again), then runs `deepreduce diff`, `patch`, `verify` and `fold` as processes. Each of diff, patch and fold is killed first, when it has
read half of what it reads. Linux only: the kernel tells peak memory and bytes read.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

SHAPE = (4096, 4096)
TENSOR_BYTES = 2 * SHAPE[0] * SHAPE[1]
PER_SHARD = 16


def make(folder: Path, versions: int, tensors: int) -> None:
    """Checkpoints v0, v1, ...: float32 master weights that move a little, rounded; parts of one large random array stand for all."""
    rng = np.random.default_rng(0)
    size = SHAPE[0] * SHAPE[1]
    noise = rng.standard_normal(2 * size, np.float32)
    offsets = rng.integers(size, size=(versions, tensors))
    shards = [range(first, min(first + PER_SHARD, tensors)) for first in range(0, tensors, PER_SHARD)]
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    weight_map = {f"layer.{tensor}": name for name, inside in zip(names, shards, strict=True) for tensor in inside}
    for version in range(versions):
        target = folder / f"v{version}"
        target.mkdir()
        index = {"metadata": {"total_size": tensors * TENSOR_BYTES}, "weight_map": weight_map}
        (target / "model.safetensors.index.json").write_text(json.dumps(index))
        for name, inside in zip(names, shards, strict=True):
            save_file({f"layer.{tensor}": weights_of(noise, offsets[: version + 1, tensor]) for tensor in inside}, target / name)


def weights_of(noise: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    size = SHAPE[0] * SHAPE[1]
    master = noise[offsets[0] : offsets[0] + size] * np.float32(0.02)
    for offset in offsets[1:]:
        master += noise[offset : offset + size] * np.float32(1e-6)
    return master.astype(ml_dtypes.bfloat16).reshape(SHAPE)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "deepreduce.cli.main", *arguments]


def run(folder: Path, *arguments: str) -> None:
    """Run a command; print its seconds and its peak memory."""
    start = time.perf_counter()
    process = subprocess.Popen(command(*arguments), cwd=folder, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, arguments
    print(f"{' '.join(arguments)}: {time.perf_counter() - start:.0f} s, peak memory {usage.ru_maxrss / 1024:.0f} MB", flush=True)


def run_killed(folder: Path, read_bytes: int, *arguments: str) -> None:
    """Kill a command when it has read so much; its target must not be there, and the folder not have changed but for hidden files."""
    before = set(os.listdir(folder))
    process = subprocess.Popen(command(*arguments), cwd=folder, stdout=subprocess.DEVNULL)
    while process.poll() is None and bytes_read(process.pid) < read_bytes:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, f"{arguments} was done before it could be killed"
    left = set(os.listdir(folder)) - before
    assert all(name.startswith(".") and name.endswith(".part") for name in left), left
    print(f"{arguments[0]} killed after {read_bytes / 1e9:.1f} GB read: left {sorted(left) or 'nothing'}", flush=True)


def bytes_read(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/io").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def check_equal(left: Path, right: Path) -> None:
    names = sorted(os.listdir(left))
    assert names == sorted(os.listdir(right))
    weights = [name for name in names if name.endswith(".safetensors")]
    assert filecmp.cmpfiles(left, right, weights, shallow=False)[0] == weights, f"{left} differs from {right}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=4)
    args = parser.parse_args()
    tensors = round(args.gigabytes * 2**30 / TENSOR_BYTES)
    dense, folder = tensors * TENSOR_BYTES, args.folder
    folder.mkdir(parents=True)
    try:
        maker = multiprocessing.get_context("spawn").Process(target=make, args=(folder, 3, tensors))  # peak memory is handed down
        maker.start()
        maker.join()
        assert maker.exitcode == 0
        print(f"three versions of {dense / 2**30:.2f} GiB", flush=True)
        run_killed(folder, dense, "diff", "v0", "v1", "01.patch")
        run(folder, "diff", "v0", "v1", "01.patch")
        run(folder, "diff", "v1", "v2", "12.patch", "--after", "01.patch")
        print(*(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB" for path in sorted(folder.glob("*.patch"))), sep="\n", flush=True)
        run(folder, "verify", "v1", "01.patch", "--expect", "result")
        run_killed(folder, dense * 3 // 2, "patch", "v0", "01.patch", "result")
        run(folder, "patch", "v0", "01.patch", "result")
        check_equal(folder / "result", folder / "v1")
        shutil.rmtree(folder / "result")
        run_killed(folder, dense * 3 // 2, "fold", "01.patch", "12.patch", "02.patch", "--base", "v0")
        run(folder, "fold", "01.patch", "12.patch", "02.patch", "--base", "v0")
        run(folder, "patch", "v0", "02.patch", "result")
        check_equal(folder / "result", folder / "v2")
        assert not list(folder.glob(".*"))
        print("all results are equal to the versions, nothing is left over")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
