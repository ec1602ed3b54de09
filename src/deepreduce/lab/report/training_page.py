"""The report of `deepreduce train`: the table, quality against epochs and bytes, volume, and the time of a step as in Figure 11."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .charts import Bar, Line, line_chart, stacked_bars
from .page import figures, page, section, table
from .quantity import in_bytes, in_percent, in_seconds, in_times

if TYPE_CHECKING:
    from ..train.contract import Plan, Record
    from ..train.outcome import Outcome

_PARTS = ("forward/backward", "encode/decode", "communication", "waiting")


def training_page(outcome: Outcome) -> str:
    """The whole page."""
    plan, records = outcome.plan, outcome.records
    metric = records[0].metric
    machines = "one machine, links not shaped" if outcome.one_machine else "machines of their own"
    where = f"links of {plan.link}" if plan.link else machines
    lead = (
        f"{plan.model} on {plan.task}: {records[0].parameters:,} parameters, {plan.workers} workers on {where}, "
        f"{records[0].steps:,} steps of {_examples(plan)} examples per worker in {plan.precision}, "
        f"topology {plan.topology}, seed {plan.seed}. All runs start from "
        f"the same weights and see the same data; {records[0].gradient_zeros:.0%} of a gradient's elements are zero before anything is "
        "left out."
    )
    charts = [
        (f"{metric} against epochs", quality_by_epochs(records)),
        (f"{metric} against bytes sent by a worker, logarithmic", quality_by_bytes(records)),
        ("Relative data volume: bytes of the messages over bytes of the gradients", volume_chart(records)),
        ("Time of one step", time_chart(records)),
        ("Training loss against steps", loss_chart(records)),
    ]
    notes = (
        "Seconds are those of the training steps, without evaluation. Encoding and exchange run beside the backward pass, so the parts may "
        "add up to more than the whole. Communication counts from when the last worker is there; before that it is waiting. "
        f"{outcome.data_note()} {outcome.outlook()} {outcome.disturbance()}"
    )
    return page(
        f"deepreduce train: {plan.task}",
        lead,
        [section("Results", table(outcome.columns(), outcome.rows()), lead=notes), section("Pictures", figures(charts))],
        outcome.origin,
    )


def quality_by_epochs(records: Sequence[Record], labels: Sequence[str] | None = None) -> str:
    """Return quality at every evaluation; curves are labelled by their specs, or as given."""
    lines = [
        Line(label, [(point["step"] / record.steps_per_epoch, point["quality"]) for point in record.curve])
        for label, record in zip(labels or [record.spec for record in records], records, strict=True)
    ]
    return line_chart("Quality against epochs", lines, "epochs", records[0].metric, _plain, in_percent)


def quality_by_bytes(records: Sequence[Record]) -> str:
    """Quality at every evaluation, by what was sent until then."""
    lines = [Line(record.spec, [(point["bytes_sent"], point["quality"]) for point in record.curve]) for record in records]
    return line_chart("Quality against bytes", lines, "bytes sent", records[0].metric, in_bytes, in_percent, log_x=True)


def loss_chart(records: Sequence[Record]) -> str:
    """The training loss of rank 0."""
    lines = [Line(record.spec, [(float(step), loss) for step, loss in record.losses]) for record in records]
    return line_chart("Training loss", lines, "steps", "loss", _plain, _plain)


def volume_chart(records: Sequence[Record]) -> str:
    """Return one bar per run."""
    bars = [
        Bar(record.spec, {"message": record.relative_volume}, in_times(1 / record.relative_volume) if record.relative_volume else "")
        for record in records
    ]
    return stacked_bars("Relative data volume", bars, ("message",))


def time_chart(records: Sequence[Record]) -> str:
    """Figure 11: what a step spends its time with."""
    return stacked_bars("Time of one step", [_time_bar(record) for record in records], _PARTS)


def _time_bar(record: Record) -> Bar:
    seconds, steps = record.seconds, record.steps
    values = (seconds["forward_backward"], seconds["encode"] + seconds["decode"], seconds["communication"], seconds["waiting"])
    parts = {name: value / steps for name, value in zip(_PARTS, values, strict=True)}
    return Bar(record.spec, parts, in_seconds(seconds["total"] / steps))


def _examples(plan: Plan) -> str:
    return f"{plan.accumulate} x {plan.batch:,}" if plan.accumulate > 1 else f"{plan.batch:,}"


def _plain(number: float) -> str:
    return f"{number:g}"
