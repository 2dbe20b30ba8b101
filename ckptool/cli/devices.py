"""``ckptool devices``: what torch sees on this machine, and why CUDA is missing where it is."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ckptool.cli.outputs import print_json, with_hints
from ckptool.cli.text import say_sections
from ckptool.cli.verbs import Command, flag
from ckptool.errors import MissingPackage
from ckptool.sections import Section, Table

if TYPE_CHECKING:
    from ckptool.torch_ops.devices import DeviceReport

SCHEMA = "ckptool.devices/1"
_HEADERS = ("device", "name", "free", "total", "compute capability")


@click.command(cls=Command)
@flag("--json", "as_json", says="Print one JSON object.")
def devices(*, as_json: bool) -> None:
    """
    Show what torch sees on this machine.

    Lists every device with its name, free and total memory and compute capability. Says why if CUDA is missing. Needs
    torch.
    """
    from ckptool.torch_ops import devices as torch_devices

    try:
        report = torch_devices.devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
    except MissingPackage as error:
        if not as_json:
            raise
        print_json(with_hints({"schema": SCHEMA, "error": error.as_dict()}))
        sys.exit(2)
    if as_json:
        print_json(_object(report))
    else:
        say_sections(_sections(report), None)


def _object(report: DeviceReport) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "torch": report.torch_version,
        "cuda_build": report.cuda_build,
        "devices": [
            {
                "device": device.tag,
                "name": device.name,
                "free_nbytes": device.free_nbytes,
                "total_nbytes": device.total_nbytes,
                "compute_capability": device.compute_capability,
            }
            for device in report.devices
        ],
        "cuda_missing": asdict(report.cuda_missing) if report.cuda_missing else None,
    }


def _sections(report: DeviceReport) -> Iterator[Section]:
    built = f", built for CUDA {report.cuda_build}" if report.cuda_build else ""
    yield f"torch {report.torch_version}{built}"
    yield ""
    rows = [
        (one.tag, one.name, _size(one.free_nbytes), _size(one.total_nbytes), one.compute_capability or "-")
        for one in report.devices
    ]
    yield Table(_HEADERS, rows, [False] * len(_HEADERS))
    if report.cuda_missing:
        yield from ("", f"No CUDA: {report.cuda_missing.message}", f"Hint: {report.cuda_missing.hint}")


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 2**30:,.1f} GiB"
