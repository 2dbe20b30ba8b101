from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from ckptool.cli.more import devices
from ckptool.torch_ops import devices as torch_devices


@pytest.fixture
def broken_cuda(monkeypatch):
    """Return a way to make this torch one that was built for CUDA and fails to start it with a message."""

    def breaks(message: str) -> None:
        def fail() -> None:
            raise RuntimeError(message)

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "init", fail)

    return breaks


def test_json_lists_the_cpu_with_its_memory():
    result = CliRunner().invoke(devices, ["--json"], catch_exceptions=False)
    found = json.loads(result.stdout)

    assert result.exit_code == 0
    assert found["schema"] == "ckptool.devices/1"
    assert found["torch"] == str(torch.__version__)
    assert found["devices"][0]["device"] == "cpu"
    assert 0 < found["devices"][0]["free_nbytes"] <= found["devices"][0]["total_nbytes"]
    assert set(found["devices"][0]) == {"device", "name", "free_nbytes", "total_nbytes", "compute_capability"}
    assert (found["cuda_missing"] is None) == torch.cuda.is_available()
    assert any(row["device"].startswith("cuda:") for row in found["devices"]) == torch.cuda.is_available()


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_a_cpu_only_build_is_named_as_the_reason():
    result = CliRunner().invoke(devices, catch_exceptions=False)

    assert f"No CUDA: torch {torch.__version__} is a CPU-only build\nHint: " in result.stdout


@pytest.mark.parametrize(
    ("says", "value", "kind", "message"),
    [
        ("The NVIDIA driver on your system is too old (found version 11040). Please update.\nmore", None, "old-driver",
         "found version 11040"),
        ("The NVIDIA driver on your system is too old (found version 11040)", None, "old-driver", "CUDA 13.0"),
        ("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU", None, "no-driver", ""),
        ("No CUDA GPUs are available", "", "hidden", "CUDA_VISIBLE_DEVICES is ''"),
        ("No CUDA GPUs are available", "-1,0", "hidden", "CUDA_VISIBLE_DEVICES is '-1,0'"),
        ("No CUDA GPUs are available", "7", "hidden", "CUDA_VISIBLE_DEVICES is '7'"),
        ("system not yet initialized", None, None, "system not yet initialized"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_cuda_is_named(broken_cuda, says, value, kind, message):
    broken_cuda(says)
    missing = torch_devices.devices(value).cuda_missing

    assert missing is not None
    assert kind in (None, missing.kind)
    assert message in missing.message


def test_the_command_reads_the_environment(broken_cuda, monkeypatch):
    broken_cuda("No CUDA GPUs are available")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    result = CliRunner().invoke(devices, ["--json"], catch_exceptions=False)

    assert json.loads(result.stdout)["cuda_missing"]["kind"] == "hidden"


def test_a_card_is_listed_with_memory_and_compute_capability(monkeypatch):
    class Properties:
        name, major, minor, total_memory = "NVIDIA H200", 9, 0, 150 << 30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (100 << 30, 150 << 30))
    result = CliRunner().invoke(devices, catch_exceptions=False)

    line = next(line for line in result.stdout.splitlines() if line.startswith("cuda:0"))
    assert line.split() == ["cuda:0", "NVIDIA", "H200", "100.0", "GiB", "150.0", "GiB", "9.0"]
    assert "No CUDA" not in result.stdout


@pytest.mark.parametrize("module", ["ckptool.cli.more", "ckptool.torch_ops"])
def test_torch_is_imported_only_when_a_command_runs(module):
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
