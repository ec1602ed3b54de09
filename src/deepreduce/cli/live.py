"""What a person sees while workers train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from ..lab.train.contract import Event, Plan, RunRecord
    from ..lab.train.outcome import Outcome


class Live:
    """Shows how far the workers are: moving bars in a terminal, a line a run elsewhere."""

    def __init__(self, plan: Plan, outcome: Outcome, quiet: bool = False) -> None:
        from ..lab.report.quantity import quality_format
        from ..lab.train.tasks import task_of

        self._plan, self._outcome = plan, outcome
        self._show = quality_format(task_of(plan.task).lower_is_better)
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=self._console, disable=quiet or not self._console.is_terminal)
        self._bars: dict[str, Any] = {}
        self._quality: dict[str, float] = {}
        self._steps = 0

    def __enter__(self) -> Live:
        self._console.print(f"starting {self._plan.workers} workers; the first run with a codec compiles its kernels")
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def listen(self, event: Event) -> None:
        """Take one event of the workers."""
        from ..lab.train.contract import RunRecord

        handlers = {"ready": self._ready, "step": self._step, "evaluation": self._evaluation}
        if event["event"] == "run":
            self._ran(RunRecord(**event["record"]))
        else:
            handlers[event["event"]](event)

    def _ready(self, event: Event) -> None:
        self._steps = event["steps"]
        self._console.print(
            f"{self._plan.model}: {event['parameters']:,} parameters, {self._steps:,} steps, {event['steps_per_epoch']:,} per epoch"
        )

    def _bar(self, spec: str) -> Any:
        if spec not in self._bars:
            self._bars[spec] = self._progress.add_task(spec, total=self._steps, note="")
        return self._bars[spec]

    def _step(self, event: Event) -> None:
        quality = self._quality.get(event["spec"])
        note = f"loss {event['loss']:.3f}" + (f", {self._show(quality)}" if quality is not None else "")
        self._progress.update(self._bar(event["spec"]), completed=event["step"], note=note)

    def _evaluation(self, event: Event) -> None:
        self._quality[event["spec"]] = event["quality"]
        self._progress.update(self._bar(event["spec"]), completed=event["step"])

    def _ran(self, record: RunRecord) -> None:
        self._outcome.records.append(record)
        self._progress.update(self._bar(record.spec), completed=record.steps, note=f"{record.metric} {self._show(record.quality)}")
        if not self._console.is_terminal:
            self._console.print(
                f"{record.spec}: {record.metric} {self._show(record.quality)} after {record.steps:,} steps in "
                f"{record.seconds['total']:.1f} s"
            )
