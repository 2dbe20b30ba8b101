"""Text: web pages and errors saved as a file, pointers that stand for one, and any other text."""

from __future__ import annotations

import html
import json
import re
from itertools import islice

from ckptool.errors import NotACheckpoint
from ckptool.formats.identify.magic import ACCESS, AGAIN, Head, not_a_checkpoint
from ckptool.messages import counted, quoted

_INDEX_NBYTES = 16 << 20
_SHARDS_TOLD_APART = 10_000
_LONGEST_JSON_ERROR = 8_192
_OBJECT = re.compile(r'\s*\{\s*(?:"(?:[^"\\\n]|\\.){0,1000}"\s*:|\}\s*\Z)')
_WEIGHT_MAP = re.compile(rb'"weight_map"\s{0,100}:\s{0,100}\{')
_WEIGHT = re.compile(rb'\s*"(?:[^"\\]|\\.){0,4000}"\s*:\s*"((?:[^"\\]|\\.){0,4000})"\s*(,|\})')
_ERRORS = ("error", "message", "detail", "error_description", "Message", "msg")
_BESIDE = "Open the weights beside it."
_KINDS = (
    (re.compile(r'\s*\{\s*"cells"\s*:'), "a Jupyter notebook", None),
    (re.compile(r'.*"peft_type"\s*:', re.DOTALL), "the configuration of an adapter", _BESIDE),
    (re.compile(r'.*"(?:architectures|model_type)"\s*:', re.DOTALL), "the configuration of a model", _BESIDE),
    (re.compile(r'.*"added_tokens"\s*:', re.DOTALL), "a tokenizer", _BESIDE),
)


def name_json(head: Head, text: str) -> NotACheckpoint | None:
    """Name an object, whole or cut short, or a whole list."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    value = _parsed(text)
    if isinstance(value, list):
        return not_a_checkpoint(f"a JSON file of {head.size}: a list of {counted(len(value), 'value')}", "json")
    if not _OBJECT.match(text):
        return None
    index = _name_index(head)
    if index is not None:
        return index
    pairs = value if isinstance(value, dict) else {}
    said = _said_by(pairs) if head.nbytes <= _LONGEST_JSON_ERROR else None
    if said is not None:
        return not_a_checkpoint(f"a JSON error message: {quoted(said)}", "json", ACCESS)
    known = ((what, hint) for pattern, what, hint in _KINDS if pattern.match(text))
    what, hint = next(known, ("a JSON file", None))
    keys = ", ".join(quoted(key, 30) for key in islice(pairs, 4)) + (", …" if len(pairs) > 4 else "")
    return not_a_checkpoint(f"{what}, {head.size} of JSON" + (f" with {keys}" if keys else ""), "json", hint)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _said_by(pairs: dict[str, object]) -> str | None:
    for key in _ERRORS:
        value = pairs.get(key)
        if isinstance(value, dict):
            value = value.get("message")
        if isinstance(value, str) and value.strip():
            return value
    return None


def _name_index(head: Head) -> NotACheckpoint | None:
    # Not json.loads: the index of a large model is megabytes, and the objects would take many times that.
    data = head.source.read(0, min(head.nbytes, _INDEX_NBYTES))
    match = _WEIGHT_MAP.search(data)
    if not match:
        return None
    tensors, at, end = 0, match.end(), b""
    shards: dict[bytes, None] = {}
    while end != b"}" and len(shards) < _SHARDS_TOLD_APART and (entry := _WEIGHT.match(data, at)):
        tensors += 1
        at, end = entry.end(), entry[2]
        shards.setdefault(entry[1])
    if not tensors:
        return None
    least = "" if end == b"}" else "at least "
    what = f"an index of {least}{counted(tensors, 'tensor')} in {least}{counted(len(shards), 'file')}"
    first = quoted(next(iter(shards)).decode("utf-8", "replace"))
    return not_a_checkpoint(
        what, "index-json", f"Open it by its path, beside the files that it names, such as {first}."
    )


_LONGEST_ERROR = 1024
_HTML = re.compile(r"\s*<(?:!doctype html|html|head|body|title|script|meta)\b", re.IGNORECASE)
_XML = re.compile(r"\s*<(?:\?xml|error>|svg)", re.IGNORECASE)
_SAID = re.compile(
    r"not found|access ?denied|forbidden|unauthori[sz]ed|invalid username|too many requests"
    r"|rate limit exceeded|bad gateway|gateway time-?out|service unavailable|internal server error"
    r"|has expired|no ?such ?key|is restricted|quota exceeded|^[45]\d\d(?:: | [A-Z])",
    re.IGNORECASE,
)
_PICKLED = re.compile(r"\(?[dlt]p\d+\n|\(?[ci][\w.]+\n[\w.<>]+\n[p(]")
"""The start of a pickle of protocol 0, which is text: it may be a checkpoint cut short."""
_FOLDER, _LINK = "Open the files in that folder.", "Open the file that it names."
_ROWS = tuple(
    (re.compile(pattern), kind, what, hint)
    for pattern, kind, what, hint in (
        (r"# xet version", "xet-pointer", "a Xet pointer", "Download the file again with huggingface_hub."),
        (r"(?:[^\n]*\n){0,9}outs:[ \r]*\n *- *\w+:", "dvc-pointer", "a DVC pointer", "Run 'dvc pull'."),
        (r"\S{0,400}/annex/objects/", "annex-pointer", "a git-annex pointer", "Run 'git annex get' on it."),
        (r"model_checkpoint_path: \"", "tensorflow", "TensorFlow's list of checkpoints", None),
        (r"[34]\n1\n\d+\n", "torch7", "a Lua Torch7 file in text form", None),
        (r"%PDF-", "pdf", "a PDF document", None),
        (r"(?:global_)?(?:step|iter)_?\d+\s*\Z", "text", "the name of a checkpoint folder", _FOLDER),
        (r"\.\.?/\S+\Z", "text", "a path, as in a symbolic link copied as text", _LINK),
    )
)
_SITE_LINE = re.compile(r"import[ \t].*|(?:/(?![/*])|\.{1,2}[/\\]|[A-Za-z]:[/\\]).*")


def name_markup(head: Head, text: str) -> NotACheckpoint | None:
    """Name an HTML page by its title, and an XML error of an object store by what it says."""
    if not re.match(r"\s*<", text):
        return None
    start = text[:1024].lower()
    if _HTML.match(text) or "<html" in start:
        title = _element(text, "title")
        what = f"an HTML page of {head.size}" + (f" titled {quoted(title)}" if title else "")
        return not_a_checkpoint(what, "html", "Download the file itself: the address gave a page about it.")
    if not _XML.match(text):
        return None
    said = [part for part in (_element(text, "code"), _element(text, "message")) if part]
    if said and "<error" in start:
        return not_a_checkpoint(f"an XML error message: {quoted(': '.join(said))}", "xml", ACCESS)
    return not_a_checkpoint(f"an XML file of {head.size}", "xml")


def _element(text: str, name: str) -> str:
    """Return what the first element of this name holds, unescaped; empty if there is none."""
    match = re.search(f"<{name}(?:\\s[^>]{{0,200}})?>", text, re.IGNORECASE)
    if not match:
        return ""
    inside = text[match.end() : match.end() + 1000]
    return " ".join(html.unescape(inside.split("<")[0]).split())


def name_text(head: Head, text: str) -> NotACheckpoint | None:
    """Name any text but a pickle, at least by its first line."""
    if _PICKLED.match(text):
        return None
    if text.startswith("version https://git-lfs.github.com/"):
        return _name_lfs(text[:1024])
    lines = [line.strip() for line in text.splitlines()]
    told = [line for line in lines if line]
    if not told:
        return not_a_checkpoint(f"a text file of {head.size}, all blank", "text", AGAIN)
    begin = quoted(told[0])
    for pattern, kind, what, hint in _ROWS:
        if pattern.match(text):
            return not_a_checkpoint(f"{what}, {begin}", kind, hint)
    if head.nbytes <= _LONGEST_ERROR and _SAID.search(text.strip()):
        return not_a_checkpoint(f"an error message: {quoted(text)}", "text", ACCESS)
    size = counted(len(lines), "line") if head.whole else head.size
    if head.whole and all(_SITE_LINE.fullmatch(line) for line in told):
        what = "a list of paths or imports, as in a .pth file of Python's site module"
        return not_a_checkpoint(f"{what}, {size}, beginning {begin}", "site-pth")
    return not_a_checkpoint(f"a text file of {size}, beginning {begin}", "text")


def _name_lfs(pointer: str) -> NotACheckpoint:
    size = re.search(r"^size (\d{1,19})\s*$", pointer, re.MULTILINE)
    oid = re.search(r"^oid sha256:([0-9a-f]{12})", pointer, re.MULTILINE)
    what = "a Git LFS pointer"
    if size:
        what += f" to a file of {counted(int(size[1]), 'byte')}"
    if oid:
        what += f" (sha256 {oid[1]}…)"
    return not_a_checkpoint(what, "lfs-pointer", "Run 'git lfs pull'.")
