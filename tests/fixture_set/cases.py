"""A fixture before it is written: what to save and how, and what must be found in it afterwards."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ckptool.reference.trainer import save
from tests.fixture_set.expected import entries
from tests.fixture_set.forging import forged, true_tag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.fixture_set.forging import TagOf

SCHEMA = "ckptool.fixture/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """
    One file of the set. ``tensors`` are described from the live ones, never from the file.

    ``device`` is where most of its tensors claim to be; ``forged``: the claim is not true. ``torch_loads``:
    the torch that wrote the file can read it on a CPU, given ``map_location`` and ``weights_only=False``.
    """

    name: str
    shows: str
    form: str
    format: str
    tensors: list[dict[str, Any]]
    write: Callable[[Path], object]
    suffix: str = ".pth"
    device: str = "cpu"
    forged: bool = False
    torch_loads: bool = True

    @property
    def filename(self) -> str:
        """The name of the file within its folder."""
        return self.name + self.suffix

    def as_json(self) -> str:
        """Return the text of the JSON beside the file, with a line per tensor."""
        head = {
            "schema": SCHEMA,
            "file": self.filename,
            "shows": self.shows,
            "form": self.form,
            "format": self.format,
            "torch": str(torch.__version__),
            "device": self.device,
            "forged": self.forged,
            "torch_loads": self.torch_loads,
        }
        fields = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        tensors = ",\n".join(f"  {json.dumps(tensor)}" for tensor in self.tensors)
        return "\n".join(["{", *fields, ' "tensors": [', tensors, " ]", "}"]) + "\n"


@dataclass(frozen=True, slots=True)
class Place:
    """Where tensors are, or are said to be: a tag for the whole file, and the tag of each storage."""

    tag: str = "cpu"
    forged: bool = False
    tag_of: TagOf = true_tag

    @property
    def slug(self) -> str:
        """The part of a file's name that says so."""
        return ("forged-" if self.forged else "") + self.tag.replace(":", "")


CPU = Place()
CONTAINERS = ("zip", "legacy")


def torch_cases(
    name: str,
    content: Any,
    *,
    form: str,
    shows: str,
    place: Place = CPU,
    containers: Sequence[str] = CONTAINERS,
    protocol: int = 2,
    torch_loads: Sequence[str] = CONTAINERS,
    stands_for: Any = None,
) -> Iterator[Case]:
    """
    Yield a case for ``torch.save`` of the content, in each container asked for.

    ``torch_loads`` lists the containers that torch itself can read back. ``stands_for`` holds the tensors
    that must be found, where they cannot be seen in the content.
    """
    tensors = entries(content if stands_for is None else stands_for, place.tag_of)
    for container in containers:
        yield Case(
            name=f"{name}-{place.slug}-{container}",
            shows=shows,
            form=form,
            format="torch_zip" if container == "zip" else "torch_legacy",
            tensors=tensors,
            write=partial(_write, content, place, legacy=container == "legacy", protocol=protocol),
            device=place.tag,
            forged=place.forged,
            torch_loads=container in torch_loads,
        )


def _write(content: Any, place: Place, target: Path, *, legacy: bool, protocol: int) -> None:
    with forged(place.tag_of) if place.forged else nullcontext():
        save(content, target, legacy=legacy, protocol=protocol)
