"""Validation loss against bytes: the `text` task of `train`, with all workers in one process.

    python benchmarks/quality.py dense "updates none/all/lloyd:1" "local:10 none/all/lloyd:2" [--rates 0.002 0.003] [--seeds 3]
        [--memory parameters] [--small 64] [--out FILE]

Workers take turns, so one core is enough, and all that they exchange are the messages that processes would send. The loop, the data, the
schedule and the evaluation are those of `deepreduce train`; `dense` computes the gradients of all workers at once, as their mean. With
`--out`, runs that the file has are not repeated. Prints the table: each way at the rate that is best for its first seed.
"""

from __future__ import annotations

import argparse
import csv
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from deepreduce.lab.train import torch_models
from deepreduce.lab.train.batches import Batch, Data
from deepreduce.lab.train.contract import Plan, RunRecord
from deepreduce.lab.train.outcome import ratio
from deepreduce.lab.train.run import Job
from deepreduce.lab.train.seeds import spread
from deepreduce.lab.train.tasks import read_data, task_of
from deepreduce.lab.train.torch_methods import Changes
from deepreduce.lab.train.torch_worker import TorchRun
from deepreduce.step.frame import FrameTag
from deepreduce.step.transport import Buffer, Padded

COLUMNS = ("way", "learning_rate", "seed", "steps", "workers", "batch", "memory", "small", "loss", "times_fewer_bytes")


class Turns:
    """Where the workers of one process meet. One at a time runs; it lets the others run while it waits for them."""

    def __init__(self, workers: int) -> None:
        self._held: list[Any] = [None] * workers
        self._meeting, self._turn = threading.Barrier(workers), threading.Lock()

    def gather(self, rank: int, thing: Any) -> list[Any]:
        """Return what each worker brought."""
        self._held[rank] = thing
        self._turn.release()
        try:
            self._meeting.wait()
            everything = list(self._held)
            self._meeting.wait()
        finally:
            self._turn.acquire()
        return everything

    def run(self, jobs: Sequence[Any]) -> list[Any]:
        """Return the results of all jobs, one for each worker; the first error ends all."""
        results: list[Any] = [None] * len(jobs)

        def work(rank: int) -> None:
            with self._turn:
                try:
                    results[rank] = jobs[rank]()
                except BaseException as error:
                    results[rank] = error
                    self._meeting.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return results


class ThreadTransport(Padded):
    """One worker of this process. Bytes are counted as gloo sends them."""

    def __init__(self, turns: Turns, rank: int, size: int) -> None:
        super().__init__()
        self._turns, self.rank, self.size = turns, rank, size

    def _all_gather(self, buffer: Buffer, tag: FrameTag) -> list[Buffer]:
        self.sent_bytes += (self.size - 1) * buffer.size
        return self._turns.gather(self.rank, buffer)


class Simulated(TorchRun):
    """The run of one worker of this process."""

    def __init__(self, job: Job, spec: str, turns: Turns) -> None:
        super().__init__(job, spec)
        self._turns = turns
        if isinstance(self.method, Changes):
            self.method._local._transport = ThreadTransport(turns, job.rank, job.plan.workers)

    def gathered(self, numbers: Sequence[float]) -> NDArray[np.float64]:
        return np.array(self._turns.gather(self.job.rank, list(numbers)), np.float64)


@dataclass(frozen=True)
class MergedData:
    """The data of several workers as that of one, whose gradient is the mean of theirs."""

    data: Data
    workers: int
    note: str = field(default="", init=False)

    def steps_per_epoch(self, workers: int, batch: int) -> int:
        return self.data.steps_per_epoch(workers, batch)

    def train_batches(self, rank: int, workers: int, batch: int, seed: int) -> Iterator[Batch]:
        streams = [self.data.train_batches(rank, self.workers, batch // self.workers, seed) for rank in range(self.workers)]
        for batches in zip(*streams, strict=True):
            yield tuple(map(np.concatenate, zip(*batches, strict=True)))

    def test_batches(self, rank: int, workers: int) -> Iterator[Batch]:
        return self.data.test_batches(rank, workers)


def trained(plan: Plan, way: str) -> RunRecord:
    """Return the record of one way."""
    data = read_data(plan)
    size = torch_models.parameter_count(torch_models.build(plan.model, data, plan.seed))
    if way == "dense":
        plan, data = replace(plan, workers=1, batch=plan.workers * plan.batch), MergedData(data, plan.workers)
    turns = Turns(plan.workers)
    runs = [Simulated(Job(plan, data, rank, size), way, turns) for rank in range(plan.workers)]
    record: RunRecord = turns.run([lambda run=run: run.go(lambda event: None) for run in runs])[0]
    if not record.replicas_identical:
        raise RuntimeError(f"{way}: the workers have different parameters")
    return record


def row(plan: Plan, way: str) -> dict[str, str]:
    """Train, and return what is kept of it."""
    record = trained(plan, way)
    fewer = 1.0 if way == "dense" else ratio(record)
    return key_of(plan, way) | {"loss": f"{record.quality:.4f}", "times_fewer_bytes": f"{fewer:.1f}"}


def key_of(plan: Plan, way: str) -> dict[str, str]:
    """Return what tells a run from others."""
    values = (way, plan.learning_rate, plan.seed, plan.steps, plan.workers, plan.batch, plan.memory, plan.small)
    return dict(zip(COLUMNS, map(str, values), strict=False))


def rows_of(path: Path | None) -> list[dict[str, str]]:
    if path is None or not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise SystemExit(f"{path} has other columns than {', '.join(COLUMNS)}: give another file")
        return list(reader)


def append(path: Path, new: dict[str, str]) -> None:
    begins = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if begins:
            writer.writeheader()
        writer.writerow(new)


def print_table(rows: Sequence[dict[str, str]]) -> None:
    """As Markdown: each way at the rate that is best for its first seed, beside the first way."""
    print("| way | learning rate | fewer bytes | validation loss, mean ± deviation (each seed) | above the first |")
    print("|---|---|---|---|---|")
    base = 0.0
    for number, way in enumerate(dict.fromkeys(each["way"] for each in rows)):
        own = [each for each in rows if each["way"] == way]
        rate = min((each for each in own if each["seed"] == own[0]["seed"]), key=lambda each: float(each["loss"]))["learning_rate"]
        best = [each for each in own if each["learning_rate"] == rate]
        losses = [float(each["loss"]) for each in best]
        deviation = spread(losses)
        base = base if number else fmean(losses)
        print(
            f"| `{way}` | {rate} | {float(best[0]['times_fewer_bytes']):,.0f}x | {fmean(losses):.3f}"
            f"{'' if deviation is None else f' ± {deviation:.3f}'} ({', '.join(f'{loss:.3f}' for loss in losses)}) | "
            f"{fmean(losses) - base:.3f} |"
        )


def main() -> None:
    task = task_of("text")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="+", metavar="WAY", help="dense, or a method and a codec as `train` has them")
    parser.add_argument("--rates", nargs="+", type=float, default=[task.learning_rate], help="learning rates, each for the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many, at the best rate")
    parser.add_argument("--steps", type=int, default=task.steps)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=task.batch)
    parser.add_argument("--memory", choices=("residual", "parameters"), default="residual", help="where what was not sent is kept")
    parser.add_argument("--small", type=int, default=1024, help="tensors below so many elements are sent whole")
    parser.add_argument("--out", type=Path, help="a CSV file that rows are appended to")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # DDP wants one, of dense alone
    sizes = given.workers, given.batch, given.steps, task.evaluations, task.learning_rate
    base = Plan("text", "gpt", (), *sizes, memory=given.memory, small=given.small)
    known = rows_of(given.out)
    wanted: list[dict[str, str]] = []

    def run(way: str, rate: float, seed: int) -> dict[str, str]:
        plan = replace(base, specs=(way,), learning_rate=rate, seed=seed)
        found = next((each for each in known if key_of(plan, way).items() <= each.items()), None)
        if found is None:
            found = row(plan, way)
            if given.out is not None:
                append(given.out, found)
        wanted.append(found)
        return found

    for way in given.ways:
        best = min(given.rates, key=lambda rate: float(run(way, rate, 0)["loss"]))
        for seed in range(1, given.seeds):
            run(way, best, seed)
    print_table(wanted)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
