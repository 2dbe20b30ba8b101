from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from ckptool.reference import trainer
from ckptool.reference.nets import LeNet
from ckptool.reference.trainer import main
from tests.scale import exhaustive

if find_spec("sklearn") is None:
    pytest.skip("the reference nets train on scikit-learn's digits", allow_module_level=True)

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
QUICK = ["--net", "mlp", "--epochs", "1", "--device", "cpu"]


def run_apart(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run in a process of its own, as a user does; nothing of this machine's GPUs is visible to it."""
    command = [sys.executable, "-m", *words]
    started = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment},
    )
    try:
        stdout, stderr = started.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        # torchrun, asked politely, ends its workers; killed, it would leave them behind.
        started.terminate()
        started.communicate(timeout=30)
        raise
    return subprocess.CompletedProcess(command, started.returncode, stdout, stderr)


def test_a_run_tells_where_it_trains_and_how_each_epoch_went(tmp_path):
    result = CliRunner().invoke(main, [*QUICK, "--epochs", "2"], catch_exceptions=False)

    assert result.exit_code == 0
    assert result.stderr.splitlines() == ["training on cpu: asked for"]
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [["epoch", "1/2"], ["epoch", "2/2"]]
    assert all("loss" in line and "held-out accuracy" in line for line in result.stdout.splitlines())


def test_a_training_checkpoint_holds_what_training_resumes_from(tmp_path):
    target = tmp_path / "checkpoint.pth"
    CliRunner().invoke(main, [*QUICK, "--save", str(target), "--save-as", "checkpoint"], catch_exceptions=False)
    found = torch.load(target, weights_only=False)

    assert list(found) == ["epoch", "model", "optimizer", "scheduler", "best_accuracy", "args"]
    assert found["epoch"] == 1
    assert isinstance(found["best_accuracy"], np.float64)
    assert isinstance(found["args"], argparse.Namespace)
    assert found["optimizer"]["state"][0]["exp_avg"].shape == (64, 64)


def test_the_old_format_is_written_where_asked_for(tmp_path):
    target = tmp_path / "old.pth"
    CliRunner().invoke(main, [*QUICK, "--save", str(target), "--legacy"], catch_exceptions=False)

    assert target.read_bytes()[:2] == b"\x80\x02"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_asking_for_cuda_where_there_is_none_is_two_lines_and_exit_2(device):
    error, hint = lines(["--device", device])

    assert error.startswith(f"Error: no device '{device}' to train on: ")
    assert "CPU-only build" in error or "CUDA_VISIBLE_DEVICES" in error
    assert hint.startswith("Hint: ")


def lines(arguments: list[str]) -> list[str]:
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 2
    return [line for line in result.stderr.splitlines() if not line.startswith("training on")]


def test_a_missing_scikit_learn_is_answered_with_the_line_that_installs_it(monkeypatch):
    # None in sys.modules is how Python itself marks a module that must not be imported.
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)

    assert lines(QUICK) == [
        'Error: this needs scikit-learn, which is not installed: pip install "ckptool[train]"',
    ]


@pytest.mark.parametrize(
    ("arguments", "module"), [(["--net", "cifar"], "torchvision"), (["--logdir", "log"], "tensorboard")]
)
def test_other_missing_packages_are_named_too(arguments, module, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in (module, f"{module}.datasets"):
        monkeypatch.setitem(sys.modules, name, None)

    assert lines([*QUICK, *arguments]) == [
        f"Error: this needs {module}, which is not installed: pip install {module}",
    ]


def test_a_cifar_that_is_not_there_is_an_error_about_its_folder(monkeypatch, tmp_path):
    class Datasets:
        def CIFAR10(self, root: str, *, train: bool) -> None:  # noqa: N802
            raise RuntimeError("Dataset not found or corrupted. You can use download=True to download it")

    monkeypatch.setitem(sys.modules, "torchvision.datasets", Datasets())

    error, hint = lines(["--net", "cifar", "--device", "cpu", "--data-dir", str(tmp_path)])

    assert error == f"Error: {tmp_path}: CIFAR-10 is not in this folder"
    assert "--data-dir" in hint


def test_cifar_images_become_floats_with_their_channels_first(monkeypatch):
    class Part:
        data = np.full((2, 32, 32, 3), 255, dtype=np.uint8)
        targets = (1, 9)

    class Datasets:
        def CIFAR10(self, root: str, *, train: bool) -> Part:  # noqa: N802
            return Part()

    monkeypatch.setitem(sys.modules, "torchvision.datasets", Datasets())
    images, labels = trainer.cifar10(Path("anywhere")).held_out.tensors

    assert images.shape == (2, 3, 32, 32)
    assert float(images.max()) == 1
    assert labels.tolist() == [1, 9]


def test_a_folder_that_is_missing_is_said_before_training(tmp_path):
    target = tmp_path / "nowhere" / "model.pth"

    error, _ = lines([*QUICK, "--save", str(target)])

    assert error == f"Error: {target}: its folder does not exist"


@exhaustive
def test_ddp_runs_in_two_processes_and_the_first_one_speaks_and_saves(tmp_path):
    target = tmp_path / "ddp.pth"
    # Port 0 of the loopback: the processes meet wherever the system has room.
    torchrun = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    result = run_apart(
        *("torch.distributed.run", *torchrun, "--local-addr", "127.0.0.1", "-m", "ckptool.reference"),
        *("--wrap", "ddp", "--device", "cpu", "--epochs", "2", "--save", str(target)),
        GLOO_SOCKET_IFNAME=LOOPBACK,
    )

    assert result.returncode == 0, result.stderr
    assert result.stderr.count("training on cpu, 2 processes: asked for") == 1
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["epoch", "epoch", "saved"]
    assert list(torch.load(target)) == [f"module.{name}" for name in LeNet().state_dict()]


def test_ddp_without_torchrun_is_a_group_of_one(tmp_path):
    target = tmp_path / "alone.pth"
    result = CliRunner().invoke(main, [*QUICK, "--wrap", "ddp", "--save", str(target)], catch_exceptions=False)

    assert result.exit_code == 0
    assert next(iter(torch.load(target))) == "module.layers.0.weight"
    assert not torch.distributed.is_initialized()


def test_a_compiled_run_saves_the_prefix_of_torch_compile(tmp_path):
    target = tmp_path / "compiled.pth"
    # The wrapper is what matters; compiling for real takes a C++ compiler and 20 seconds.
    with torch.compiler.set_stance("force_eager"):
        CliRunner().invoke(main, [*QUICK, "--wrap", "compile", "--save", str(target)], catch_exceptions=False)

    assert next(iter(torch.load(target))) == "_orig_mod.layers.0.weight"
