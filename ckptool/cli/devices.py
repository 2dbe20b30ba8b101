"""``ckptool devices``: what torch sees on this machine, and why CUDA is missing where it is."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ckptool.cli.printing import print_json, with_hints
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
        listed = [{"device": one.pop("tag"), **one} for one in map(asdict, report.devices)]
        missing = report.cuda_missing and asdict(report.cuda_missing)
        head = {"schema": SCHEMA, "torch": report.torch_version, "cuda_build": report.cuda_build}
        print_json({**head, "devices": listed, "cuda_missing": missing})
    else:
        say_sections(_sections(report), None)


def _sections(report: DeviceReport) -> Iterator[Section]:
    built = f", built for CUDA {report.cuda_build}" if report.cuda_build else ""
    yield f"torch {report.torch_version}{built}"
    yield ""
    rows = []
    for one in report.devices:
        sizes = ("-" if size is None else f"{size / 2**30:,.1f} GiB" for size in (one.free_nbytes, one.total_nbytes))
        rows.append((one.tag, one.name, *sizes, one.compute_capability or "-"))
    yield Table(_HEADERS, rows, [False] * len(_HEADERS))
    if report.cuda_missing:
        yield from ("", f"No CUDA: {report.cuda_missing.message}", f"Hint: {report.cuda_missing.hint}")
