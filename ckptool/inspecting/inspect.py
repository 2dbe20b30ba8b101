"""``inspect``: what is in a checkpoint, as a report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckptool.arguments import check_arguments
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.summary import summarise
from ckptool.formats import open_checkpoint
from ckptool.inspecting.columns import DEFAULT_COLUMNS, tensor_table
from ckptool.inspecting.facts import findings_of, head_sections
from ckptool.inspecting.object import inspect_object
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.sections import Section, html_of, text_of
from ckptool.sources.files import Origin

if TYPE_CHECKING:
    from ckptool.checkpoints.digest import Known


class InspectReport:
    """What is in a checkpoint. As text, what ``ckptool inspect`` prints; in a notebook, a table."""

    def __init__(self, checkpoint: Checkpoint, digest: Known | None = None) -> None:
        self.path = checkpoint.path
        self.digest = digest and digest.digest
        """That of the weights; None if it was not asked for, or there is none."""
        self.summary = summarise(checkpoint)
        """Counts over all tensors."""
        self.findings = findings_of(checkpoint)
        """What is notable, as far as the index shows that."""
        self._checkpoint = checkpoint
        self._digest = digest
        # The file may be closed later: all that has to be read of it is read now.
        self._head = list(head_sections(checkpoint, self.summary, self.findings, digest, whole=True))

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON, as the command line prints it."""
        tensors = self._checkpoint.tensors.values()
        found = inspect_object(self._checkpoint, self.summary, self.findings, tensors, self._digest)
        return {**found, "tensors": list(found["tensors"])}

    def _sections(self) -> Iterator[Section]:
        yield from self._head
        if tensors := self._checkpoint.tensors:
            yield from ("", tensor_table(self._checkpoint, tensors.values(), DEFAULT_COLUMNS))

    def __str__(self) -> str:
        return "\n".join(text_of(self._sections()))

    def __dir__(self) -> list[str]:
        return ["path", "digest", "summary", "findings", "as_dict"]

    def __repr__(self) -> str:
        return f"<InspectReport of {self._checkpoint!r}>"

    def _repr_html_(self) -> str:
        return html_of(self.path, self._sections())


def inspect(origin: Origin, *, digest: bool = False, limits: Limits = DEFAULT_LIMITS) -> InspectReport:
    """
    Say what is in a checkpoint, as ``ckptool inspect`` does. Nothing in it runs, and only the index is read.

    ``origin`` is a path, bytes or a binary file object. With ``digest``, the weights are read for their digest.

    Raises:
        CkptoolError: It cannot be read.
    """
    check_arguments(inspect, locals())
    with open_checkpoint(origin, limits=limits) as checkpoint:
        known = None
        if digest:
            from ckptool.checkpoints.digest import digest_or_why  # it reads every byte, and is seldom asked for

            known = digest_or_why(checkpoint, limits)
        return InspectReport(checkpoint, known)
