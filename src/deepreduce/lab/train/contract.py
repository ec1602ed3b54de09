"""What a worker is given and what it answers, the same for every framework.

A worker is started as ``python -m deepreduce.lab.train.FRAMEWORK_worker`` with the plan as its first argument (JSON) and the environment of
torchrun: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. It trains every spec of the plan in turn from the same initial weights. It answers
with events, one JSON object per line, on standard output; rank 0 speaks for all, except for failures:

- ``{"event": "ready", "parameters": 301066, "steps": 840, "steps_per_epoch": 21}``
- ``{"event": "step", "spec": "...", "step": 17, "loss": 0.4}``, now and then
- ``{"event": "evaluation", "spec": "...", "step": 21, "quality": 0.93}``
- ``{"event": "run", "record": {...}}``, a `RunRecord` for each spec
- ``{"event": "failed", "rank": 1, "time": 12.5, "traceback": "..."}``

It ends when its standard input does, so that no worker outlives its launcher.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from ...errors import ConfigError
from .method_specs import FP16_HOOK, MethodSpec
from .schedules import schedule_of

PRECISIONS = ("fp32", "fp16", "bf16")

Event = dict[str, Any]
Emit = Callable[[Event], None]

_STEP_EVENTS_APART_SECONDS = 0.1


@dataclass(frozen=True)
class Plan:
    """One training job: the same model and data for every spec, which may have a method before it (`method_specs`).

    `dense` is the framework's own allreduce, `fp16_hook` that of PyTorch in half precision.
    A worker takes `batch` examples `accumulate` times for one step. `schedule` is the text of a `schedules.RateSchedule`; `evaluations` may
    be 0, for runs whose quality nobody asks for; before each run there are `warm_up` steps that are not counted.
    Quality is measured on `test_batches` batches per worker, of all that there are if None. `compiled` is for `torch.compile`.

    >>> plan = Plan(task="digits", model="mlp", specs=("dense",), workers=2, batch=32, steps=10, evaluations=2, learning_rate=0.1)
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    task: str
    model: str
    specs: tuple[str, ...]
    workers: int
    batch: int
    steps: int | None
    evaluations: int
    learning_rate: float
    epochs: int = 1
    topology: str = "allgather"
    memory: str = "residual"
    small: int = 1024
    seed: int = 0
    data: str | None = None
    negatives: int = 99
    framework: str = "torch"
    link: str | None = None
    accumulate: int = 1
    precision: str = "fp32"
    schedule: str = "cosine"
    warm_up: int = 3
    test_batches: int | None = None
    compiled: bool = False

    def __post_init__(self) -> None:
        schedule_of(self.schedule)
        if self.precision not in PRECISIONS:
            raise ConfigError(f"a precision is {', '.join(PRECISIONS)}; got {self.precision!r}")
        for method in map(MethodSpec.parse, self.specs):
            method.check(self.precision, self.memory)
        if self.framework != "torch":
            self._check_other_framework()

    def _check_other_framework(self) -> None:
        name = self.framework
        if (self.task, self.accumulate, self.precision, self.compiled) != ("digits", 1, "fp32", False):
            got = f"{self.task}, {self.precision}, accumulate {self.accumulate}{', --compile' if self.compiled else ''}"
            raise ConfigError(f"{name} trains digits in fp32 without accumulation and torch.compile; got {got}")
        methods = [spec for spec in self.specs if MethodSpec.parse(spec).kind != "gradients" or spec == FP16_HOOK]
        if methods:
            raise ConfigError(f"{name} trains by gradients, got {methods[0]!r}")
        if name == "jax" and self.link:  # seen in 0.10: its gloo takes the loopback address in each network namespace
            raise ConfigError(f"workers of jax do not find each other on shaped links; got link {self.link}")

    def to_json(self) -> str:
        """Return the plan as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote."""
        plain = json.loads(text)
        return cls(**plain | {"specs": tuple(plain["specs"])})


@dataclass
class RunRecord:
    """One run. Bytes are those of one worker (the largest); seconds are wall time of the steps, without evaluations.

    `gradient_bytes` is the size of the gradients and `message_bytes` what the codec made of them; `relative_volume`, the second over the
    first, is what the paper calls relative data volume. `bytes_sent` is what a worker put on the network for it, by the topology, and
    `bytes_dense` what an allreduce of dense gradients puts there (`ring_bytes`). Of the seconds, `communication` counts only while the last
    worker to arrive was in it: waiting for slower workers is `waiting`. Parts may overlap, so they may add up to more than `total`.
    Where a framework does not tell how long its all-reduce took, `communication`, `waiting` and `forward_backward` are NaN.
    `stolen_share` of the time of the cores was used by the host of this (virtual) machine for others: seconds are longer for it.
    """

    spec: str
    metric: str
    quality: float
    best_quality: float
    parameters: int
    steps: int
    steps_per_epoch: int
    bytes_sent: int
    bytes_dense: int
    message_bytes: int
    gradient_bytes: int
    seconds: dict[str, float]
    replicas_identical: bool
    gradient_zeros: float
    stolen_share: float = 0.0
    data_note: str = ""
    lower_is_better: bool = False
    seed: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)
    curve: list[dict[str, float]] = field(default_factory=list)

    @property
    def relative_volume(self) -> float:
        """Bytes of the messages over bytes of the dense gradients."""
        return self.message_bytes / self.gradient_bytes if self.gradient_bytes else 1.0

    def reaches(self, quality: float, wanted: float) -> bool:
        """Return whether a quality is at least as good as another."""
        return quality <= wanted if self.lower_is_better else quality >= wanted

    def to_event(self) -> Event:
        """Return the event that carries this record."""
        return {"event": "run", "record": asdict(self)}


def evaluation_steps(steps: int, evaluations: int, period: int = 1) -> set[int]:
    """Return the steps after which quality is measured: evenly spaced, the last one always. None for no evaluations.

    With a `period` they are its multiples, but for the last: between two syncs the workers have different models.

    >>> sorted(evaluation_steps(10, 4)), sorted(evaluation_steps(100, 4, period=30))
    ([3, 5, 8, 10], [30, 60, 90, 100])
    """
    count = min(steps, evaluations)
    evenly = (round(steps * number / count + 1e-9) for number in range(1, count + 1))
    return {min(steps, -(-step // period) * period) for step in evenly}


class Throttle:
    """Lets through a few events per second: a terminal cannot show more."""

    def __init__(self, apart_seconds: float = _STEP_EVENTS_APART_SECONDS) -> None:
        self._apart, self._last = apart_seconds, float("-inf")

    def ready(self) -> bool:
        """Return whether enough time went by since the last yes."""
        now = time.monotonic()
        if now - self._last < self._apart:
            return False
        self._last = now
        return True


def serve(train: Callable[[Plan, Emit], None]) -> int:
    """Run a worker and return its exit code."""
    events = _claim_stdout()
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    emit = _writer(events)
    try:
        train(Plan.from_json(sys.argv[1]), emit)
    except BaseException:
        emit({"event": "failed", "rank": int(os.environ["RANK"]), "time": time.time(), "traceback": traceback.format_exc()})
        return 1
    return 0


def _claim_stdout() -> TextIO:
    """Standard output is for events alone: what libraries print goes to standard error."""
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return events


def _writer(stream: TextIO) -> Emit:
    def emit(event: Event) -> None:
        stream.write(json.dumps(event) + "\n")
        stream.flush()

    return emit


def _end_with_launcher() -> None:
    sys.stdin.buffer.read()
    os._exit(1)
