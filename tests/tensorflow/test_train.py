"""`deepreduce train --framework tensorflow`: real workers, started by the launcher."""

from math import isnan

import pytest

from deepreduce.lab.train.contract import Plan, RunRecord
from deepreduce.lab.train.launcher import launch


def test_digits_by_two_workers():
    specs = ("dense", "topr:0.01/rice/qsgd")
    plan = Plan("digits", "cnn", specs, workers=2, batch=32, steps=8, evaluations=2, learning_rate=0.05, framework="tensorflow")
    events = []
    launch(plan, events.append)
    assert events[0] == {"event": "ready", "parameters": 151306, "steps": 8, "steps_per_epoch": 21}
    dense, sparse = (RunRecord(**event["record"]) for event in events if event["event"] == "run")
    assert (dense.spec, sparse.spec) == specs
    assert dense.replicas_identical
    assert sparse.replicas_identical
    assert dense.message_bytes == dense.bytes_sent == dense.bytes_dense == sparse.bytes_dense == 8 * 4 * 151306
    assert sparse.bytes_dense / sparse.bytes_sent > 50
    assert isnan(dense.seconds["communication"])  # the all-reduce of Keras does not tell
    assert sparse.seconds["communication"] > 0
    assert [point["step"] for point in sparse.curve] == [4, 8]
    assert dense.losses[0][1] == pytest.approx(sparse.losses[0][1])  # the same weights and the same first batch
