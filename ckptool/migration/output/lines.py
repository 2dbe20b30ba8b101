"""
Files of lines that are appended to, as the rows of ``scan``; and their tables in Parquet.

Also rows as a Parquet file, complete or not at all, through ``pyarrow``, which is imported when it is needed.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

import ckptool.system as system
from ckptool.errors import MissingPackage, OutputFailed
from ckptool.migration.output import Output, failed
from ckptool.sources.source import Closing

_AT_ONCE: Final = 1 << 20


class Lines(Closing):
    """
    A file of lines, each of which begins with ``head``; used in a ``with`` block.

    A file with other content is not changed.

    Raises:
        OutputFailed: It holds something else, another process writes it, or the system refuses.
    """

    def __init__(self, path: str, head: bytes) -> None:
        self.path = path
        self._head = head
        try:
            self._fd = system.open_appending(path)
        except (OSError, ValueError) as error:
            raise failed(error if isinstance(error, OSError) else OSError(str(error)), path) from error
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise OutputFailed("not a file that could be appended to", kind="not-a-file", path=path)
            if system.lock(self._fd) is False:
                raise OutputFailed("another process writes to it", kind="in-use", path=path)
            begin = system.read_at(self._fd, len(head), 0)
            if begin != head[: len(begin)]:
                raise self.foreign(1)
        except BaseException:
            os.close(self._fd)
            raise

    def __iter__(self) -> Iterator[bytes]:
        """Yield the complete lines, without their ends; then remove an incomplete last line."""
        position, number, rest = 0, 0, b""
        while data := system.read_at(self._fd, _AT_ONCE, position):
            position += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                number += 1
                if not line.startswith(self._head):
                    raise self.foreign(number)
                yield line
        if rest[: len(self._head)] != self._head[: len(rest)]:
            raise self.foreign(number + 1)
        if rest:
            os.ftruncate(self._fd, position - len(rest))

    def foreign(self, number: int, is_what: str = "none of those that would be appended") -> OutputFailed:
        """Return the error for a line that is something else."""
        fact = f"line {number:,} is {is_what}"
        return OutputFailed(fact, kind="foreign-lines", path=self.path, hint="Choose another file.")

    def append(self, lines: Iterable[bytes]) -> None:
        """Append lines to the file, in one piece."""
        view = memoryview(b"".join(b"%b\n" % line for line in lines))
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise failed(error, self.path) from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


_COMMAND: Final = 'pip install "ckptool[parquet]"'
_MAGIC: Final = b"PAR1"
_ROWS: Final = 10_000
"""Rows in a group: so many are in memory at once."""
_LARGEST: Final = (1 << 63) - 1


def need_parquet() -> Any:
    """Return ``pyarrow``, with ``pyarrow.parquet`` imported."""
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError as error:
        raise MissingPackage.named("pyarrow", _COMMAND) from error
    return pa


def write_parquet(path: str, rows: Iterable[Mapping[str, Any]], schema: Mapping[str, Any]) -> int:
    """
    Write rows to a file, in the place of an older one, and return how many there were.

    ``schema`` is the JSON Schema of a row; its field ``schema`` is not a column.
    Text that is not Unicode has ``\\udc80`` and the like for its bytes; larger numbers than 64 bits are the largest.

    Raises:
        MissingPackage: pyarrow is not installed.
        OutputFailed: A file with this name is not Parquet, or the system refuses.
    """
    arrow = need_parquet()
    refuse_others(path, (_MAGIC,), "Parquet")
    given = {name: one for name, one in schema["properties"].items() if name != "schema"}
    columns = {name: _type(one, schema.get("$defs", {}), arrow) for name, one in given.items()}
    types = arrow.schema(list(columns.items()))
    count = 0
    with Output(path, force=True) as output:
        with arrow.parquet.ParquetWriter(OutputStream(output), types, compression="zstd") as writer:
            every = iter(rows)
            while group := list(islice(every, _ROWS)):
                arrays = {
                    name: [_value(row.get(name), kind, arrow.types) for row in group] for name, kind in columns.items()
                }
                writer.write_table(arrow.Table.from_pydict(arrays, schema=types))
                count += len(group)
        output.publish()
    return count


def refuse_others(path: str, begins: tuple[bytes, ...], what: str) -> None:
    """Raise OutputFailed if the file exists and does not begin with one of ``begins``."""
    try:
        fd = system.open_reading(path)
    except (OSError, ValueError):  # writing reports what is wrong with it
        return
    try:
        begin = os.read(fd, max(map(len, begins)))
    except OSError:
        begin = b""
    finally:
        os.close(fd)
    if begin not in begins:
        kind = f"not-{what.lower()}"
        raise OutputFailed(f"is there, and is not a {what} file", kind=kind, path=path, hint="Move it away.")


def _type(schema: Mapping[str, Any], defs: Mapping[str, Any], arrow: Any) -> Any:
    """Return the Arrow type for values of a JSON Schema; every value may be null."""
    schema = next((one for one in schema.get("anyOf", ()) if one.get("type") != "null"), schema)
    schema = defs[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    kind = schema.get("type", "string")
    if "integer" in kind:
        return arrow.int64()
    if "array" in kind:
        return arrow.list_(_type(schema["items"], defs, arrow))
    if "object" in kind and "properties" in schema:
        return arrow.struct([(name, _type(one, defs, arrow)) for name, one in schema["properties"].items()])
    if "object" in kind:
        return arrow.map_(arrow.string(), _type(schema["additionalProperties"], defs, arrow))
    return arrow.string()


def _value(value: Any, kind: Any, types: Any) -> Any:
    """Return a value as Arrow takes it."""
    if value is None:
        return None
    if types.is_string(kind):
        return str(value).encode("utf-8", "backslashreplace").decode()
    if types.is_integer(kind):
        return min(value, _LARGEST)
    if types.is_list(kind):
        return [_value(one, kind.value_type, types) for one in value]
    if types.is_map(kind):
        return [(_value(key, kind.key_type, types), _value(one, kind.item_type, types)) for key, one in value.items()]
    return {field.name: _value(value.get(field.name), field.type, types) for field in kind}


class OutputStream(io.RawIOBase):
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
