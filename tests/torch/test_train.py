"""Real workers: they learn, they agree, they are counted right, and they end when they should."""

import json
import os
import shutil
import signal
import subprocess
import sys
from math import nan
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from deepreduce.cli import training
from deepreduce.cli.main import main
from deepreduce.errors import ConfigError
from deepreduce.lab.train import launcher, links
from deepreduce.lab.train.contract import Plan
from deepreduce.lab.train.failures import LinkError, WorkerError
from deepreduce.lab.train.run import Job
from deepreduce.lab.train.tasks import read_data, task_of
from deepreduce.lab.train.torch_worker import TorchRun

from ..test_race import record

SPEC = "topr:0.01/bitmap/fp16"
PLAN = Plan("digits", "mlp", (SPEC,), workers=2, batch=32, steps=4, evaluations=1, learning_rate=0.1)


@pytest.fixture
def fake_worker(tmp_path, monkeypatch):
    """Workers of a few lines in place of those that train."""

    def install(body):
        (tmp_path / "fake_worker.py").write_text(f"import json, os, sys, threading, time\nrank = int(os.environ['RANK'])\n{body}\n")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
        monkeypatch.setattr(launcher, "worker_module", lambda framework: "fake_worker")

    return install


def test_training_learns_and_is_accounted_for(tmp_path):
    arguments = [
        "train",
        "--model",
        "cnn",
        "--steps",
        "40",
        "--codec",
        SPEC,
        "--learning-rate",
        "0.1",
        "--json",
        str(tmp_path / "all.json"),
    ]
    assert main([*arguments, "--report", str(tmp_path)]) == 0
    outcome = json.loads((tmp_path / "all.json").read_text())
    dense, sparse = outcome["runs"]
    assert (dense["spec"], sparse["spec"]) == ("dense", SPEC)
    for run in outcome["runs"]:
        assert run["replicas_identical"]
        assert run["losses"][-1][1] < run["losses"][0][1]
        assert run["bytes_dense"] == 40 * 4 * run["parameters"]  # a ring of two sends everything once
        assert {"total", "forward_backward", "encode", "decode", "communication"} <= set(run["seconds"])
        assert run["curve"][-1]["step"] == 40
        assert run["versions"]["torch"]
        assert run["machine"]
    assert dense["message_bytes"] == 40 * 4 * dense["parameters"]
    assert dense["bytes_sent"] == pytest.approx(dense["bytes_dense"], rel=1e-3)
    assert sparse["message_bytes"] <= sparse["bytes_sent"]
    assert dense["curve"][-1]["bytes_sent"] == dense["bytes_sent"]
    assert 20 < sparse["ratio"] < 60
    assert dense["losses"][0] == pytest.approx(sparse["losses"][0], rel=1e-5)  # same weights, same data
    assert dense["quality"] > 0.5
    report = (tmp_path / "report.html").read_text()
    assert SPEC in report
    assert "151,306 parameters" in report


def test_a_compiled_model_trains_as_the_model_does(tmp_path):
    losses = []
    for options in ([], ["--compile"]):
        command = ["train", "--steps", "6", "--recipe", "sgd", "--evaluations", "1", "--json", str(tmp_path / "all.json"), *options]
        assert main(command) == 0
        runs = json.loads((tmp_path / "all.json").read_text())["runs"]
        assert all(run["replicas_identical"] for run in runs)
        losses.append([loss for run in runs for _, loss in run["losses"]])
    plain, compiled = losses
    assert compiled == pytest.approx(plain, rel=1e-3)


def test_torchrun_workers_join(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(launcher.free_port())]
    train = ["-m", "deepreduce.cli.main", "train", "--model", "cnn", "--steps", "3", "--no-dense", "--codec", SPEC]
    done = subprocess.run(
        [*command, *train, "--json", str(tmp_path / "all.json")], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sum(line.startswith(f"{SPEC} ") for line in done.stdout.splitlines()) == 1
    assert json.loads((tmp_path / "all.json").read_text())["runs"][0]["replicas_identical"]


@pytest.mark.skipif(sys.platform != "linux", reason="cores are given out on Linux only")
def test_workers_have_cores_of_their_own(fake_worker, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    fake_worker(
        "event = {'event': 'step', 'cores': list(os.sched_getaffinity(0)), 'policy': os.sched_getscheduler(0)}\n"
        "print(json.dumps(event | {'threads': os.environ['OMP_NUM_THREADS']}))"
    )
    ours, policy, workers = os.sched_getaffinity(0), os.sched_getscheduler(0), []
    launcher.launch(PLAN, workers.append)
    assert os.sched_getscheduler(0) == policy
    assert all(worker["policy"] == os.SCHED_BATCH for worker in workers)
    first, second = (set(worker["cores"]) for worker in workers)
    assert first | second == ours == os.sched_getaffinity(0)
    assert len(ours) == 1 or not first & second
    assert all(int(worker["threads"]) == len(worker["cores"]) for worker in workers)


def test_the_first_failure_is_shown_once(fake_worker):
    fake_worker(
        "if rank == 1:\n"
        "    print(json.dumps({'event': 'failed', 'rank': 1, 'time': 1.0, 'traceback': 'ValueError: the reason'}), flush=True)\n"
        "    sys.exit(1)\n"
        "print(json.dumps({'event': 'failed', 'rank': 0, 'time': 2.0, 'traceback': 'RuntimeError: peer gone'}), flush=True)\n"
        "threading.Event().wait()"
    )
    with pytest.raises(WorkerError) as caught:
        launcher.launch(PLAN, lambda event: None)
    assert str(caught.value) == "worker 1 failed:\nValueError: the reason"


def test_a_killed_worker_is_named(fake_worker):
    fake_worker("os.kill(os.getpid(), 9) if rank == 0 else threading.Event().wait()")
    with pytest.raises(WorkerError, match="worker 0 was killed by SIGKILL"):
        launcher.launch(PLAN, lambda event: None)


def test_a_crash_shows_what_was_written_last(fake_worker):
    fake_worker("print('terminate called', file=sys.stderr); sys.exit(7 if rank == 0 else 0)")
    with pytest.raises(WorkerError, match=r"exit code 7\nterminate called"):
        launcher.launch(PLAN, lambda event: None)


def test_lines_that_are_no_events_do_not_stop_the_listening(fake_worker):
    noise = "print('hello from a library'); print(17); sys.stdout.flush(); sys.stdout.buffer.write(b'\\xff\\n'); sys.stdout.flush()\n"
    fake_worker(f"{noise}print(json.dumps({{'event': 'step'}})); sys.stdout.write('{{\"event\": \"st')")
    events = []
    launcher.launch(PLAN, events.append)
    assert events == [{"event": "step"}] * 2
    fake_worker(f"{noise}sys.exit(7)")
    with pytest.raises(WorkerError, match=r"exit code 7\nhello from a library\n17"):
        launcher.launch(PLAN, events.append)


@pytest.fixture
def pretended_launch(monkeypatch):
    """A launch that delivers a run of each spec in place of workers that train; an error ends it before the second."""

    def install(error=None, **numbers):
        def launch(plan, listen):
            for spec in plan.specs:
                if error is not None and spec != plan.specs[0]:
                    raise error
                run = record(spec, [0.5 + 0.1 * plan.seed], 10**6, plan.seed, lower=False)
                listen({"event": "run", "record": vars(run) | numbers})

        monkeypatch.setattr(launcher, "launch", launch)

    return install


def exit_code(arguments):
    try:
        return main(arguments)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize(("error", "code"), [(WorkerError("worker 1 failed"), 1), (KeyboardInterrupt(), 130)])
def test_runs_that_ended_are_kept_when_a_later_one_fails(pretended_launch, tmp_path, capsys, error, code):
    pretended_launch(error)
    path = tmp_path / "all.json"
    assert exit_code(["train", "--codec", SPEC, "--json", str(path)]) == code
    assert [run["spec"] for run in json.loads(path.read_text())["runs"]] == ["dense"]
    assert "1 of 2 runs" in capsys.readouterr().out


def test_every_seed_is_trained_written_and_averaged(pretended_launch, tmp_path, capsys):
    pretended_launch()
    path = tmp_path / "all.json"
    assert main(["train", "--seeds", "2", "--json", str(path)]) == 0
    found = json.loads(path.read_text())["runs"]
    assert [(run["seed"], run["quality"], run["as_good_as_dense"]["step"]) for run in found] == [(0, 0.5, 10), (1, 0.6, 10)]
    assert "55.0% ± 7.1%" in capsys.readouterr().out


def test_seeds_without_a_quality_are_written_and_shown(pretended_launch, tmp_path, capsys):
    pretended_launch(quality=nan, best_quality=nan, curve=[])
    path = tmp_path / "all.json"
    assert main(["train", "--evaluations", "0", "--seeds", "2", "--codec", SPEC, "--json", str(path)]) == 0
    assert [run["quality"] for run in json.loads(path.read_text())["runs"]] == [None] * 4
    shown = capsys.readouterr().out
    assert f"{SPEC}: no quality to compare with dense" in shown
    assert "as good as dense" not in shown


def test_the_files_are_written_before_the_results_are_shown(pretended_launch, tmp_path, monkeypatch):
    pretended_launch()
    monkeypatch.setattr(training, "_table", lambda outcome: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["train", "--json", str(tmp_path / "all.json")])
    assert (tmp_path / "all.json").exists()


def test_torchrun_is_refused_for_other_frameworks(monkeypatch, capsys):
    monkeypatch.setattr(launcher, "find_spec", lambda name: True)
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--framework", "jax"]) == 2
    assert "run it without torchrun for jax" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_workers(fake_worker, tmp_path, number):
    fake_worker("print(json.dumps({'event': 'step', 'pid': os.getpid()}), flush=True); threading.Event().wait()")
    script = (
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell may have started this in the background
        "from deepreduce.lab.train import launcher\nfrom deepreduce.lab.train.contract import Plan\n"
        "launcher.worker_module = lambda framework: 'fake_worker'\n"
        f"launcher.launch(Plan.from_json({PLAN.to_json()!r}), lambda event: print(event['pid'], flush=True))"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    workers = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


def test_a_worker_does_not_outlive_its_launcher(fake_worker):
    fake_worker(
        "from deepreduce.lab.train.contract import serve\n"
        "def wait(plan, emit):\n    emit({'event': 'step', 'pid': os.getpid()})\n    threading.Event().wait()\n"
        "sys.exit(serve(wait))"
    )
    environment = os.environ | {"RANK": "0"}
    command = [sys.executable, "-m", "fake_worker", PLAN.to_json()]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert json.loads(process.stdout.readline())["pid"] == process.pid
    process.stdin.close()
    assert process.wait(timeout=60) == 1
    process.stdout.close()


@pytest.mark.parametrize("rate", ["100", "100mb", "fast", "0mbit", "1e3gbit"])
def test_wrong_rates_are_refused(rate, capsys):
    assert main(["train", "--link", rate]) == 2
    assert "100mbit" in capsys.readouterr().err


def test_what_is_missing_for_links_is_said(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool in ("ip", "tc") else f"/sbin/{tool}")
    with pytest.raises(LinkError, match="ip, tc: install iproute2"):
        links.check_links()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LinkError, match="Linux"):
        links.check_links()


def test_a_system_that_forbids_namespaces_is_told_in_one_line(monkeypatch, tmp_path):
    forbidding = tmp_path / "unshare"
    forbidding.write_text("#!/bin/sh\necho usage >&2\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n")
    forbidding.chmod(0o755)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(LinkError, match="says: unshare: unshare failed: Operation not permitted") as caught:
        links.check_links()
    assert "\n" not in str(caught.value)


@pytest.fixture(params=["root", "user"])
def as_whom(request, monkeypatch):
    """Links as whoever runs the tests makes them, and as a user without rights would."""
    if request.param == "user":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    try:
        links.check_links()
    except LinkError as error:
        pytest.skip(str(error))


def on(host, *command):
    return subprocess.run(host.command(command), capture_output=True, text=True, check=True).stdout


def test_links_use_cubic_and_are_gone_after_a_failure(as_whom):
    has_cubic = "cubic" in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text()

    def fail(rate):
        with links.shaped_links(2, rate) as hosts:
            assert hosts[0].address in on(hosts[0], "ip", "address")
            assert ("congctl cubic" in on(hosts[1], "ip", "route")) == has_cubic
            raise ValueError(*[host.namespace.holder for host in hosts])

    with pytest.raises(ValueError, match="Popen") as caught:
        fail("10mbit")
    assert all(holder.poll() is not None for holder in caught.value.args)


def test_the_rate_of_a_link_can_change_while_it_is_in_use(as_whom):
    with links.shaped_links(2, None) as hosts:
        assert "tbf" not in on(hosts[0], "tc", "qdisc")
        hosts[0].limit("100mbit")
        assert "rate 100Mbit" in on(hosts[0], "tc", "qdisc")
        hosts[0].limit("1gbit")
        assert "rate 1Gbit" in on(hosts[0], "tc", "qdisc")
        hosts[0].limit(None)
        hosts[0].limit(None)
        assert "tbf" not in on(hosts[0], "tc", "qdisc")


def planned_by_demo(monkeypatch):
    plans = []
    monkeypatch.setattr(training, "_conduct", lambda plan, *outputs: plans.append(plan))
    assert main(["demo"]) == 0
    return plans[0]


def test_the_demo_runs_over_a_link(as_whom, monkeypatch):
    plan = planned_by_demo(monkeypatch)
    assert plan.link == "100mbit"
    assert plan.specs == ("dense", *training.DEMO_CODECS)


def test_the_demo_runs_without_a_link_where_none_can_be_made(monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    assert planned_by_demo(monkeypatch).link is None
    said = capsys.readouterr().err
    assert "shaped links need the command(s) tc: install iproute2" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "resnet20"], "mlp, cnn"),
        (["--task", "mnist"], "digits, cifar10, imagenet, ml1m, text, ml20m"),
        (["--precision", "int8"], "fp32, fp16, bf16"),
        (["--schedule", "step:0.5"], "step:SHARE=FACTOR"),
        (["--codec", "dense", "--sweep", "fpr=0.1"], "no codec has {fpr}"),
        (["--framework", "jax", "--accumulate", "2"], "without accumulation"),
        (["--codec", "topr:0.01/nonsense/raw"], "nonsense"),
        (["--framework", "mxnet"], "torch, tensorflow, jax"),
        (["--no-dense"], "nothing to train"),
        (["--precision", "bf16", "--method", "local:10", "--codec", "none/all/lloyd:2"], "train in fp32, got bf16"),
        (["--method", "dgc:100", "--codec", "nonzero/auto/qsgd"], "nonzero/auto/qsgd has none"),
        (["--framework", "jax", "--fp16-hook"], "jax trains by gradients, got 'fp16_hook'"),
        (["--memory", "parameters", "--codec", "topr:0.01/rice/qsgd"], "memory parameters is for updates and local steps"),
        (["--recipe", "adam", "--codec", "dense"], "--recipe names the method and the codec"),
        (["--recipe", "rmsprop"], "adam, sgd, got 'rmsprop'"),
    ],
)
def test_wrong_arguments_are_told_in_a_line(arguments, reason, capsys):
    assert main(["train", *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_missing_data_is_told_without_a_traceback(tmp_path, capsys):
    assert main(["train", "--task", "ml1m", "--data", str(tmp_path)]) == 1
    errors = capsys.readouterr().err
    assert "ratings.dat" in errors
    assert "Traceback" not in errors


def test_a_framework_must_be_known():
    with pytest.raises(ConfigError, match="torch, tensorflow, jax"):
        launcher.worker_module("caffe")


# Parameters of the paper's Table 1


def test_models_have_the_parameters_that_the_paper_prints():
    from deepreduce.lab.train.torch_models import DenseNet40, NeuMF, ResNet20, parameter_count
    from deepreduce.lab.train.torch_resnet50 import ResNet50

    assert parameter_count(ResNet20()) == 269_722
    assert parameter_count(ResNet50()) == 25_557_032
    with torch.device("meta"):
        assert parameter_count(NeuMF(138_493, 26_744)) == 31_832_577
    assert parameter_count(DenseNet40()) == 1_019_722  # the paper prints 357,491, which no standard variant has


def test_resnet50_gives_scores_of_all_classes():
    from deepreduce.lab.train.torch_resnet50 import ResNet50

    with torch.no_grad():
        assert ResNet50().eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)


# Accumulation and precision


def train(tmp_path, *arguments):
    command = ["train", "--model", "cnn", "--steps", "12", "--evaluations", "1", *arguments, "--json", str(tmp_path / "all.json")]
    assert main(command) == 0
    return json.loads((tmp_path / "all.json").read_text())["runs"]


def test_accumulated_batches_make_the_same_step_as_one_large_batch(tmp_path):
    (whole,) = train(tmp_path, "--batch", "32")
    (parts,) = train(tmp_path, "--batch", "8", "--accumulate", "4")
    assert [loss for _, loss in parts["losses"]] == pytest.approx([loss for _, loss in whole["losses"]], rel=1e-3)
    assert parts["bytes_dense"] == whole["bytes_dense"]
    assert parts["steps_per_epoch"] == whole["steps_per_epoch"]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_16_bits_halve_what_travels(tmp_path, precision):
    dense, sparse = train(tmp_path, "--precision", precision, "--codec", SPEC)
    assert dense["gradient_bytes"] == 12 * 2 * dense["parameters"]
    assert (dense["relative_volume"], dense["replicas_identical"], sparse["replicas_identical"]) == (pytest.approx(1, rel=1e-3), True, True)
    assert dense["losses"][-1][1] < dense["losses"][0][1]
    assert sparse["relative_volume"] == pytest.approx(sparse["message_bytes"] / sparse["gradient_bytes"])


def test_a_sweep_trains_one_run_per_value(tmp_path):
    runs = train(
        tmp_path, "--no-dense", "--codec", "topr:0.01/bloom:p0,fpr={fpr}/raw", "--sweep", "fpr=0.1,0.001", "--schedule", "constant"
    )
    assert [run["spec"] for run in runs] == ["topr:0.01/bloom:p0,fpr=0.1/raw", "topr:0.01/bloom:p0,fpr=0.001/raw"]
    assert runs[0]["relative_volume"] > 2 * runs[1]["relative_volume"]


def test_every_method_trains_and_is_counted(tmp_path):
    spec = "topr:0.05/rice/qsgd"
    methods = [word for method in ("updates", "local:4", "dgc:6") for word in ("--method", method)]
    found = train(tmp_path, "--model", "cnn", "--codec", spec, *methods, "--steps", "10", "--evaluations", "2")
    assert [run["spec"] for run in found] == ["dense", f"updates {spec}", f"local:4 {spec}", f"dgc:6 {spec}"]
    for run in found:
        assert run["replicas_identical"]
        assert run["gradient_bytes"] == 10 * 4 * run["parameters"]
        assert run["losses"][-1][1] < run["losses"][0][1]
    dense, updates, local, dgc = found
    assert [point["step"] for point in local["curve"]] == [8, 10]
    assert local["message_bytes"] == pytest.approx(3 / 9 * updates["message_bytes"], rel=0.1)  # at the end the rate is 0: no change
    assert updates["message_bytes"] < dgc["message_bytes"] < dense["message_bytes"]


def test_the_hook_of_pytorch_for_half_precision_is_beside_dense(tmp_path):
    dense, half = train(tmp_path, "--model", "cnn", "--fp16-hook", "--steps", "10", "--evaluations", "2")
    assert half["spec"] == "fp16_hook"
    assert half["bytes_sent"] * 2 == dense["bytes_sent"]
    assert half["quality"] == pytest.approx(dense["quality"], abs=0.05)
    assert half["replicas_identical"]
    assert half["seconds"]["communication"] > 0


def test_what_is_not_sent_stays_in_the_parameters(tmp_path):
    spec = "topr:0.02/rice/lloyd:1"
    found = train(
        tmp_path, "--model", "cnn", "--codec", spec, "--method", "updates", "--memory", "parameters", "--steps", "20", "--evaluations", "2"
    )
    dense, updates = found
    assert all(run["replicas_identical"] and run["losses"][-1][1] < run["losses"][0][1] for run in found)
    assert updates["message_bytes"] < 0.1 * dense["message_bytes"]


def test_a_recipe_names_what_is_trained(tmp_path):
    runs = train(tmp_path, "--model", "cnn", "--recipe", "sgd", "--steps", "8", "--evaluations", "1")
    assert [run["spec"] for run in runs] == ["dense", "local:4 none/all/lloyd:1"]
    assert runs[1]["message_bytes"] < runs[0]["message_bytes"] / 90  # the layers of 32 and 64 elements at one bit too


def test_several_seeds_train_the_text(tmp_path, capsys):
    command = ["train", "--task", "text", "--workers", "1", "--steps", "2", "--evaluations", "1", "--batch", "2", "--seeds", "2"]
    assert main([*command, "--json", str(tmp_path / "all.json")]) == 0
    found = json.loads((tmp_path / "all.json").read_text())["runs"]
    assert [run["seed"] for run in found] == [0, 1]
    assert found[0]["quality"] != found[1]["quality"]
    assert all(run["lower_is_better"] and 4 < run["quality"] < 6 for run in found)
    assert all(run["as_good_as_dense"]["step"] == 2 for run in found)
    assert " ± 0.0" in capsys.readouterr().out


# One worker in this process


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_local_steps_end_with_a_sync_where_nothing_is_evaluated(alone):
    spec = "local:3 none/all/raw"
    plan = Plan("digits", "cnn", (spec,), workers=1, batch=8, steps=4, evaluations=0, learning_rate=0.1)
    run = TorchRun(Job(plan, read_data(plan), 0, 151306), spec)
    found = run.go(lambda event: None)
    assert run.method._local.syncs == 2
    assert found.message_bytes > 1.5 * run.method._local.stats().last.message_bytes  # both are counted


def scoring(task, precision, scores):
    """A run whose model gives these scores."""
    run = TorchRun.__new__(TorchRun)
    run.task, run.model = task_of(task), lambda *inputs: scores
    run.plan = Plan(task, "", (), workers=1, batch=1, steps=1, evaluations=1, learning_rate=0.1, precision=precision)
    return run


def test_a_ranking_by_scores_that_are_not_numbers_hits_nothing():
    users, items = np.arange(4), np.zeros((4, 100), np.int64)
    assert scoring("ml1m", "fp32", torch.full((4, 100), nan)).score((users, items)) == 0
    best_first = torch.arange(100.0, 0, -1).expand(4, 100)
    assert scoring("ml1m", "fp32", best_first).score((users, items)) == 4
    assert scoring("ml1m", "fp32", best_first.flip(1)).score((users, items)) == 0


def test_a_loss_of_16_bits_is_computed_in_32():
    scores = torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(128).reshape(2, 64)
    exact = 2 * float(functional.cross_entropy(scores.float().flatten(0, 1), targets.flatten()))
    assert scoring("text", "bf16", scores).score((np.zeros((2, 64), np.int64), targets.numpy())) == pytest.approx(exact, rel=1e-6)


def test_no_step_begins_before_all_workers_are_there():
    calls = []

    class Recorded(TorchRun):
        def step(self, number, batch):
            calls.append("step")
            return super().step(number, batch)

        def gathered(self, numbers):
            calls.append("gathered")
            return np.array([numbers])

    spec = f"updates {SPEC}"
    plan = Plan("digits", "mlp", (spec,), workers=1, batch=32, steps=2, evaluations=1, learning_rate=0.1)
    Recorded(Job(plan, read_data(plan), 0, 1), spec).go(lambda event: None)
    assert calls[:3] == ["gathered", "step", "step"]
