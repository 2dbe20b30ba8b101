"""
Names what a file is when no format accepts it, from its first bytes; imported only then.

A kind that begins with bytes of its own, or is a zip with a telling member, is a row in ``magic``. A kind of text is a
row in ``text``.
"""

from __future__ import annotations

from ckptool.errors import NotACheckpoint, TruncatedFile, UnsupportedFeature
from ckptool.formats.identify.magic import AGAIN, Head, name_binary, name_by_magic, name_foreign_zip, not_a_checkpoint
from ckptool.formats.identify.text import name_json, name_markup, name_text
from ckptool.messages import counted
from ckptool.sources.source import Source

__all__ = ["name_foreign", "name_foreign_zip"]

Foreign = NotACheckpoint | TruncatedFile | UnsupportedFeature


def name_foreign(source: Source) -> Foreign | None:
    """
    Say what a file is that no checkpoint format accepts, or return None if nothing here knows it.

    The error is returned for the caller to raise; nothing is raised but what ``source.read`` raises. Reads
    64 KiB from the start and 8 bytes from the end; 16 MiB of JSON, as an index of shards can be that long.
    """
    head = Head.of(source)
    if not head.data.strip(b"\0"):
        return _name_zeros(head)
    if head.text is None:
        return name_by_magic(head) or name_binary(head)
    return name_markup(head, head.text) or name_json(head, head.text) or name_text(head, head.text)


def _name_zeros(head: Head) -> Foreign:
    if not head.nbytes:
        hint = "Download or save the file again."
        return TruncatedFile("empty: the file has 0 bytes", kind="empty", hint=hint, actual=0)
    fact = f"{head.size} of zeros"
    if not head.whole:
        fact = f"the first {counted(len(head.data), 'byte')} of {head.nbytes:,} are zero"
    return not_a_checkpoint(f"{fact}, as in a download that reserved its space and stopped", "zeros", AGAIN)
