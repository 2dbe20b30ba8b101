"""Rows as a Parquet file, whole or not at all, through ``pyarrow``, which is imported when it is needed."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final, Literal, TypeAlias

from ckptool.errors import MissingPackage, OutputFailed
from ckptool.migration.output import Output

Kind: TypeAlias = "Literal['text', 'count', 'texts', 'sizes', 'counts'] | Mapping[str, Any]"
"""What a column holds: a text, a number, lists of either, numbers by names; or fields, each of its own kind."""
EACH: Final = "*"
"""The only key of fields that stand for values by any names."""

_COMMAND: Final = "pip install 'ckptool[parquet]'"
_MAGIC: Final = b"PAR1"
_ROWS: Final = 10_000
"""Of a group: so many are in memory at once."""
_LARGEST: Final = (1 << 63) - 1


def need_parquet() -> Any:
    """
    Return what writes Parquet.

    Raises:
        MissingPackage: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError as error:
        raise MissingPackage.named("pyarrow", _COMMAND) from error
    return pa


def write_parquet(path: str, rows: Iterable[Mapping[str, Any]], columns: Mapping[str, Kind]) -> int:
    """
    Write rows to a file, in the place of an older one, and return how many there were.

    Text that is no Unicode has ``\\udc80`` and the like for its bytes; numbers beyond 64 bits are the largest of these.

    Raises:
        MissingPackage: pyarrow is not installed.
        OutputFailed: Something else than Parquet has this name, or the system refuses.
    """
    arrow = need_parquet()
    _refuse_others(path)
    schema = arrow.schema([(name, _type(kind, arrow)) for name, kind in columns.items()])
    count = 0
    with Output(path, force=True) as output:
        with arrow.parquet.ParquetWriter(_Stream(output), schema, compression="zstd") as writer:
            for group in _groups(rows):
                arrays = {name: [_value(row.get(name), kind) for row in group] for name, kind in columns.items()}
                writer.write_table(arrow.Table.from_pydict(arrays, schema=schema))
                count += len(group)
        output.publish()
    return count


def _refuse_others(path: str) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError):  # whoever writes says what is wrong with it
        return
    try:
        begin = os.read(fd, len(_MAGIC))
    except OSError:
        begin = b""
    finally:
        os.close(fd)
    if begin != _MAGIC:
        raise OutputFailed("is there, and is no Parquet file", kind="not-parquet", path=path, hint="Move it away.")


def _groups(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    every = iter(rows)
    while group := list(islice(every, _ROWS)):
        yield group


def _type(kind: Kind, arrow: Any) -> Any:
    if isinstance(kind, Mapping):
        if EACH in kind:
            return arrow.map_(arrow.string(), _type(kind[EACH], arrow))
        return arrow.struct([(name, _type(one, arrow)) for name, one in kind.items()])
    return {
        "text": arrow.string(),
        "count": arrow.int64(),
        "texts": arrow.list_(arrow.string()),
        "sizes": arrow.list_(arrow.int64()),
        "counts": arrow.map_(arrow.string(), arrow.int64()),
    }[kind]


def _value(value: Any, kind: Kind) -> Any:
    """Return a value as Arrow takes it."""
    if value is None:
        return None
    if isinstance(kind, Mapping):
        if EACH in kind:
            return [(_value(key, "text"), _value(one, kind[EACH])) for key, one in value.items()]
        return {name: _value(value.get(name), one) for name, one in kind.items()}
    if kind == "text":
        return str(value).encode("utf-8", "backslashreplace").decode()
    if kind == "count":
        return min(value, _LARGEST)
    if kind == "counts":
        return [(_value(key, "text"), _value(one, "count")) for key, one in value.items()]
    return [_value(one, "text" if kind == "texts" else "count") for one in value]


class _Stream(io.RawIOBase):
    """An output as a file object that is only written to."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._output.write(view)
        return view.nbytes

    def tell(self) -> int:
        return self._output.position
