"""
All exceptions of ckptool.

* CkptoolError
  + Failure                 something is wrong with a file, or with the request
    - FileUnavailable       missing, not permitted, or not a regular file
    - UnreadableFile        the bytes are not what a checkpoint should be
      ~ NotACheckpoint      they are something else, and we know what
      ~ UnknownFormat       no format recognises them
      ~ TruncatedFile       they end too early
      ~ MalformedFile       they contradict themselves
        . DamagedFile       by their own checksum: they are not those that were written
      ~ AmbiguousFile       two readers could understand them differently
      ~ SourceChanged       they changed while being read
    - UnsafePickle          reading it would mean running it, or consulting this process
    - UnsupportedFeature    well formed, but not handled
    - LimitExceeded         reading it would cost more than the limits allow
    - WeightsNotFound       no state dict is the requested weights
      ~ AmbiguousWeights    several could be
      ~ IncompleteWeights   a part of them is not in the file, or cannot be named
    - MigrationRefused      the requested change would lose or confuse something
    - OutputFailed          the result could not be written
      ~ OutputExists        and nothing may be overwritten
    - UnfinishedEdit        an edit in place did not end, or goes on
    - WeightsMismatch       the weights do not fit the model
      ~ KeyMismatch         by their names
      ~ ShapeMismatch       by their shapes
    - DeviceUnavailable     no such device, or not here
    - MissingPackage        a package that this needs is not installed, or does not start; an ImportError, too
    - OutOfMemory           the weights need more memory than there is
  + Cancelled               the caller did not want it any more, or not any longer

A message is the fact, in numbers, in lower case, without a full stop. The path is printed before it and the hint, one
imperative sentence, after it; both are attributes of their own. Inner code does not know the path:
``open_checkpoint`` adds it.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it since Python 3.11

OPTION: Final = r"`(\w+)=([^`]*)`"
"""An option in a hint: a keyword of the library, and its value, which may be empty."""
_LONGEST: Final = 1 << 16
"""Characters of a message. Lists of names that do not fit a model may be long."""


class CkptoolError(Exception):
    """
    Base of all errors of ckptool.

    ``kind`` is a stable slug for programs (``"truncated-zip"``), ``path`` the file, ``hint`` what to do about it
    and ``command`` a command line for a POSIX shell that does it, or None. A hint names options between
    backticks, as keywords of the library: "Leave them out with `drop_unsupported=True`."
    ``offset`` (bytes), ``needed`` and ``actual`` hold the numbers of the message where it has any.
    """

    default_kind = "error"

    def __init_subclass__(cls, *, kind: str | None = None) -> None:
        cls.default_kind = kind or cls.default_kind

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        hint: str | None = None,
        command: str | None = None,
        path: str | None = None,
        offset: int | None = None,
        needed: int | None = None,
        actual: int | None = None,
    ) -> None:
        if len(message) > _LONGEST:  # it quotes the file
            message = f"{message[:_LONGEST]}… ({len(message):,} characters)"
        super().__init__(message)
        self.message = message
        self.kind = kind or self.default_kind
        self.hint = hint
        self.command = command
        self.path = path
        self.offset = offset
        self.needed = needed
        self.actual = actual

    def __str__(self) -> str:
        text = f"{self.path}: {self.message}" if self.path else self.message
        return text.encode(errors="backslashreplace").decode()  # a path may have surrogates, which UTF-8 lacks

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON, as the command line prints it."""
        names = ("path", "kind", "message", "hint", "command", "offset", "needed", "actual")
        return {name: self.__dict__[name] for name in names}

    @property
    def option(self) -> str | None:
        """The keyword that ``hint`` names first, for example ``drop_unsupported``; None if it names none."""
        found = re.search(OPTION, self.hint or "")
        return found[1] if found else None


@contextmanager
def about(path: str | None) -> Iterator[None]:
    """Set ``path`` on errors of the block that have none; a ``MissingPackage`` is about no file and stays as it is."""
    try:
        yield
    except MissingPackage:
        raise
    except CkptoolError as error:
        error.path = error.path or path
        raise


@contextmanager
def within(what: str, known: str = "") -> Iterator[None]:
    """Put ``what``, a part of a file, before messages of errors of the block, unless these contain ``known``."""
    try:
        yield
    except CkptoolError as error:
        if not known or known not in error.message:
            error.message = f"{what}: {error.message}"
        raise


def drop_tracebacks(error: BaseException) -> None:
    """Remove the tracebacks of an error and its causes, which keep the local variables of failed calls in memory."""
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and one.__traceback__ is not None:
            one.__traceback__ = None
            todo += (one.__cause__, one.__context__)


def as_ours(error: Exception) -> CkptoolError:
    """Return any error as a CkptoolError, for callers that record it and go on; its tracebacks are removed."""
    drop_tracebacks(error)
    if isinstance(error, CkptoolError):
        return error
    if isinstance(error, MemoryError):
        return CkptoolError("there is not enough memory", kind="out-of-memory")
    return CkptoolError(f"{type(error).__name__}: {error}", kind="unforeseen")


_ON_WINDOWS: Final = {32: "another program has it open", 123: "Windows has no such names", 206: "its path is too long"}
"""Texts for errors of Windows whose ``errno`` would give a misleading one."""


def is_not_permitted(error: OSError) -> bool:
    """Return whether the system denies permission, rather than that another program has the file open."""
    return error.errno in (errno.EACCES, errno.EPERM) and getattr(error, "winerror", 0) not in _ON_WINDOWS


def reason_of(error: OSError) -> str:
    """Return why the system refused something."""
    found = _ON_WINDOWS.get(getattr(error, "winerror", 0))
    return found or (os.strerror(error.errno).lower() if error.errno else str(error))


def first_line(error: BaseException) -> str:
    """Return the first line of a foreign error's text that is not blank; the name of its class if there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


class Failure(CkptoolError, kind="failure"):
    """Every error but ``Cancelled``: for handlers that go on, and must not when the call was cancelled."""


class FileUnavailable(Failure, kind="unavailable"):
    """A path cannot be opened: missing, a pipe, not permitted, or a folder in which files are missing."""

    @classmethod
    def of_set(cls, fact: str, hint: str, needed: int, actual: int) -> FileUnavailable:
        """Return the error for missing files of a set; ``needed`` and ``actual`` count files."""
        return cls(fact, kind="missing-shards", hint=hint, needed=needed, actual=actual)


class UnreadableFile(Failure, kind="unreadable"):
    """The bytes are not what a checkpoint should be."""


class NotACheckpoint(UnreadableFile, kind="not-a-checkpoint"):
    """The bytes are a known kind of file that holds no tensors: a Git LFS pointer, an HTML page, an image."""


class UnknownFormat(UnreadableFile, kind="unknown-format"):
    """No format recognises the first bytes."""


class TruncatedFile(UnreadableFile, kind="truncated"):
    """The file ends before the data that it announces: ``needed`` and ``actual`` count bytes."""

    @classmethod
    def early(cls, what: str, kind: str, actual: int, needed: int | None = None, offset: int | None = None) -> Self:
        """Return the error for a ``kind`` of data that ends too early; ``what`` says where, in numbers."""
        hint = "Download the file again."
        return cls(
            f"truncated: {what}", kind=f"truncated-{kind}", hint=hint, offset=offset, needed=needed, actual=actual
        )


class MalformedFile(UnreadableFile, kind="malformed"):
    """The file contradicts its own format at ``offset``."""


class DamagedFile(MalformedFile, kind="damaged-record"):
    """A record does not match the checksum that was written with it."""


class AmbiguousFile(UnreadableFile, kind="ambiguous"):
    """Two readers could understand the same bytes differently, so neither reading is given."""


class SourceChanged(UnreadableFile, kind="source-changed"):
    """The file was written to or truncated while it was being read."""


class UnsafePickle(Failure, kind="unsafe-pickle"):
    """The pickle needs code to run, or something that only the process that wrote it had."""


class UnsupportedFeature(Failure, kind="unsupported"):
    """The file is well formed, but uses something that is not handled."""


class LimitExceeded(Failure, kind="limit-exceeded"):
    """Reading on would cost more than the ``Limits`` allow: ``needed`` against ``actual``."""


class WeightsNotFound(Failure, kind="no-state-dict"):
    """
    No state dict in the file is the requested weights.

    ``candidates`` are the keys of state dicts that can be chosen with ``key``; the empty one is the root.
    """

    candidates: tuple[str, ...] = ()


class AmbiguousWeights(WeightsNotFound, kind="which-weights"):
    """Several state dicts could be the requested weights; none is chosen by guessing."""


class IncompleteWeights(WeightsNotFound, kind="incomplete-weights"):
    """
    A part of the weights is not in the file, or only code could name it.

    ``missing`` are the paths of modules, or the names of tensors, that are not there.
    """

    missing: tuple[str, ...] = ()


class MigrationRefused(Failure, kind="refused"):
    """The requested change would lose or confuse something; nothing was written."""


class OutputFailed(Failure, kind="output-failed"):
    """The result could not be written. A file that has its name already is not changed."""


class OutputExists(OutputFailed, kind="output-exists"):
    """The name of the output is taken, and overwriting was not requested."""


class UnfinishedEdit(Failure, kind="unfinished-edit"):
    """
    An edit in place of the file goes on or was cut off, and left it neither old nor new; nothing was read or changed.

    The ``command`` makes it what it was before the edit.
    """


class WeightsMismatch(Failure, kind="weights-mismatch"):
    """
    The weights do not fit the model, which was not changed.

    ``missing`` and ``unexpected`` are names, ``reshaped`` is names with the model's shape and the file's.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()


class KeyMismatch(WeightsMismatch, kind="key-mismatch"):
    """Names that the model has and the file has not, or the other way round."""


class ShapeMismatch(WeightsMismatch, kind="shape-mismatch"):
    """Names agree, shapes do not."""


class DeviceUnavailable(Failure, kind="device-unavailable"):
    """The requested device does not exist, or is not on this machine; the message says why."""


class MissingPackage(Failure, ImportError, kind="missing-package"):
    """
    The call needs ``package``, which is not installed (or does not start: ``broken-package``).

    The message ends with the pip command, which is the ``command``. Everything else works without the package.
    """

    package: str = ""
    path: str | None = None  # overrides ImportError's attribute, which is not pickled

    @classmethod
    def named(cls, package: str, command: str, kind: str | None = None) -> MissingPackage:
        """Return the error for a package that is not installed, with the pip command that installs it."""
        error = cls(f"this needs {package}, which is not installed: {command}", kind=kind, command=command)
        error.package = package
        return error


class OutOfMemory(Failure, kind="out-of-memory"):
    """The weights need ``needed`` bytes where ``actual`` are free. Nothing was loaded."""


class Cancelled(CkptoolError, kind="cancelled"):
    """
    The call was cancelled, or passed its deadline (``deadline-exceeded``); the message says after how many seconds.

    Nothing is wrong with the file, as far as was seen.
    """
