"""What the pages say of the code, written from the code: findings, errors, names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable

import ckptool
from ckptool import errors
from ckptool.checking.explain import explain
from ckptool.checking.finding import CODES
from ckptool.pickles.constructions import ROWS

MESSAGES = (
    "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False",
    "Weights only load failed. … Unsupported global: GLOBAL argparse.Namespace was not an allowed global by default.",
    'Missing key(s) in state_dict: "conv1.weight", … Unexpected key(s) in state_dict: "module.conv1.weight", …',
    'Missing key(s) in state_dict: "conv1.weight", … Unexpected key(s) in state_dict: "epoch", "state_dict", …',
    "KeyError: 'state_dict'",
    "size mismatch for fc.weight: copying a param with shape torch.Size([1000, 512]) from checkpoint, the shape in …",
    "invalid load key, 'v'.",
    "invalid load key, '<'.",
    "PytorchStreamReader failed reading zip archive: failed finding central directory",
    "PytorchStreamReader failed locating file constants.pkl: file not found",
    "unexpected EOF, expected 104 more bytes. The file might be corrupted.",
    "Can't get attribute 'Net' on <module '__main__'>",
    "No module named 'models'",
    "Error while deserializing header: HeaderTooLarge",
    "'collections.OrderedDict' object has no attribute 'eval'",
    "'Conv2d' object has no attribute 'padding_mode'",
    "loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
    "CUDA out of memory. Tried to allocate 20.00 MiB.",
)
"""Messages that people paste, shortened where they are long."""


def _paragraph(text: str | None) -> str:
    """Return the first paragraph of a docstring, on one line, in Markdown."""
    paragraph = inspect.cleandoc(text or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).replace("``", "`").replace("|", r"\|")


def _sentence(text: str | None) -> str:
    return re.split(r"(?<=\.) (?=[A-Z`])", _paragraph(text))[0]


def _rows(*rows: Iterable[str]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def codes() -> str:
    """Return the table of findings."""
    rows = ((f"`{code}`", entry.severity or "depends", entry.says) for code, entry in CODES.items())
    return _rows(("code", "severity", "finding"), ("---", "---", "---"), *rows)


def exceptions(cls: type = errors.CkptoolError, depth: int = 0) -> str:
    """Return a list of the exceptions, each under its base."""
    below = [one for one in cls.__subclasses__() if one.__module__ == errors.__name__]
    own = f"{'  ' * depth}- `{cls.__name__}`: {_sentence(cls.__doc__)}\n"
    return own + "".join(exceptions(one, depth + 1) for one in below)


def names() -> str:
    """Return the table of public names that are not exceptions."""
    public = {name: getattr(ckptool, name) for name in ckptool.__all__}
    others = {
        name: value
        for name, value in public.items()
        if not (isinstance(value, type) and issubclass(value, errors.CkptoolError))
    }
    rows = ((f"`{name}`", _sentence(value.__doc__)) for name, value in others.items())
    return _rows(("name", "what it is"), ("---", "---"), *rows)


def constructions() -> str:
    """Return the calls that a pickle may have and be data."""
    header = ("name", "arguments", "state, items", "what it does", "source")
    rows = (
        (
            ", ".join(f"`{name}`" for name in row.names),
            " or ".join(f"`{one.strip()}`" if one.strip() else "none" for one in row.forms.split(" | ")),
            ", ".join(filter(None, (row.state, row.items))),
            ("made without a call; " if row.builds else "") + row.why,
            f"`{row.source}`",
        )
        for row in ROWS
    )
    return _rows(header, ("---",) * len(header), *rows)


def messages() -> str:
    """Return the table of error messages that people paste, with what ``check --explain`` says to each."""
    rows = []
    for message in MESSAGES:
        found = explain(message)
        assert found, f"not known: {message}"
        command = f"`{found[0].command}`" if found[0].command else ""
        hint = " ".join(filter(None, (found[0].hint, command)))
        rows.append((f"`{message}`", found[0].meaning.replace("|", r"\|"), hint.replace("|", r"\|")))
    return _rows(("you see", "it means", "do"), ("---", "---", "---"), *rows)


PARTS: dict[str, Callable[[], str]] = {
    "constructions": constructions,
    "codes": codes,
    "exceptions": exceptions,
    "messages": messages,
    "names": names,
}
"""Each part of a page that is generated, by the name in its markers."""
