"""Errors are data for programs and two lines for people; the only place where tests look at their wording."""

from __future__ import annotations

import copy
import inspect
import json
import os
import pickle
from functools import cache
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest

from ckptool import CkptoolError, Limits, errors, migrate, open_checkpoint
from ckptool.cli.text import with_options
from tests import build, zip_bytes
from tests.each import each
from tests.missing import on_windows
from tests.program import invoke

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__]
FIELDS = {
    "kind": "odd",
    "hint": "Look again.",
    "command": "ls a",
    "path": "a/b.pth",
    "offset": 5,
    "needed": 7,
    "actual": 6,
}


def example(cls: type[CkptoolError]) -> CkptoolError:
    return cls("it is not as it should be", **FIELDS)  # type: ignore[arg-type]


@each("cls", CLASSES)
@each("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_errors_keep_their_fields(cls: type[CkptoolError], protocol: int) -> None:
    error = example(cls)
    error.path = "given later"

    back = pickle.loads(pickle.dumps(error, protocol))
    assert type(back) is cls
    assert str(back) == str(error)
    assert back.__dict__ == error.__dict__
    assert {name: getattr(back, name) for name in FIELDS} == FIELDS | {"path": "given later"}


@each("cls", CLASSES)
def test_copied_errors_keep_their_fields(cls: type[CkptoolError]) -> None:
    for duplicate in (copy.copy, copy.deepcopy):
        assert duplicate(example(cls)).__dict__ == example(cls).__dict__


@each("cls", CLASSES)
def test_every_error_has_a_kind_of_its_own(cls: type[CkptoolError]) -> None:
    assert cls("x").kind == cls.default_kind
    assert [other.default_kind for other in CLASSES].count(cls.default_kind) == 1
    assert cls.default_kind == cls.default_kind.lower()
    assert " " not in cls.default_kind


@each("cls", CLASSES)
def test_every_error_is_in_the_drawn_tree(cls: type[CkptoolError]) -> None:
    assert issubclass(cls, CkptoolError)
    drawn = [line for line in (errors.__doc__ or "").splitlines() if line.strip().startswith(("*", "+", "-", "~", "."))]
    lines = [line for line in drawn if cls.__name__ in line.split()]
    assert len(lines) == 1
    depth = {"*": 1, "+": 2, "-": 3, "~": 4, ".": 5}[lines[0].strip()[0]]
    assert sum(issubclass(one, CkptoolError) for one in cls.__mro__) == depth


def test_the_path_stands_in_front_of_the_message() -> None:
    error = errors.TruncatedFile("truncated: 5 of 9 bytes", hint="Download it again.", path="dir/x.pth")

    assert str(error) == "dir/x.pth: truncated: 5 of 9 bytes"
    assert error.message == "truncated: 5 of 9 bytes"
    assert str(errors.TruncatedFile("truncated")) == "truncated"


def test_numbers_are_none_where_the_message_has_none() -> None:
    error = CkptoolError("x")

    assert (error.kind, error.hint, error.command, error.path) == ("error", None, None, None)
    assert (error.offset, error.needed, error.actual) == (None, None, None)


def test_options_are_keywords_in_the_library_and_flags_on_the_command_line(tmp_path: Path) -> None:
    path, target = tmp_path / "a.pth", tmp_path / "b.pth"
    path.write_bytes(build.one_of_each()["torch_zip"])
    target.write_bytes(b"taken")

    with pytest.raises(errors.OutputExists) as caught:
        migrate(path, target)
    assert caught.value.hint == "Choose another name, or overwrite it with `force=True`."
    assert caught.value.option == "force"
    result = invoke(["migrate", str(path), str(target)])
    assert result.stderr.splitlines()[1].startswith("Hint: Choose another name, or overwrite it with --force.")
    found = json.loads(invoke(["migrate", str(path), str(target), "--json"]).stdout)
    assert found["error"]["hint"].startswith("Choose another name, or overwrite it with --force.")


@pytest.mark.parametrize(
    ("hint", "shown"),
    [
        ("Take `form='state_dict'` or `form='same'`.", "Take --form state_dict or --form same."),
        ("Pick one with `key_a=`: 'a', 'b'", "Pick one with --key-a: 'a', 'b'"),
        ("Pass other `model_arguments=`.", "Pass other --model-arg."),
        ("Run `git lfs pull` and load with strict=False.", "Run `git lfs pull` and load with strict=False."),
    ],
)
def test_each_option_of_a_hint_is_spelled_for_a_shell(hint: str, shown: str) -> None:
    assert with_options(hint) == shown
    assert CkptoolError("x").option is None


def test_errors_cross_process_and_thread_pools() -> None:
    with ThreadPool(2) as pool, pytest.raises(errors.TruncatedFile) as caught:
        pool.map(open_checkpoint, [b""])
    assert caught.value.path == "<bytes>"


# The wording of all that can go wrong while opening


@cache
def broken_files() -> dict[str, bytes]:
    found: dict[str, bytes] = {"empty": b"", "noise": bytes(range(7, 99)), "html": b"<!DOCTYPE html><html>"}
    found["lfs"] = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 12345\n" % (b"a" * 64)
    found["json"] = b'{"error": "not found"}'
    found["hdf5"] = b"\x89HDF\r\n\x1a\n" + bytes(100)
    found["gguf"] = b"GGUF\x03\0\0\0" + bytes(100)
    for name, data in build.one_of_each().items():
        found[f"{name}, half"] = data[: len(data) // 2]
        found[f"{name}, a little short"] = data[:-1] if name != "torch_tar" else data[:-3000]
    member = zip_bytes.stored("archive/data.pkl", build.pickled({}))
    found["twins"] = zip_bytes.whole([member, member])
    found["encrypted"] = zip_bytes.whole([zip_bytes.Member(name=b"x", flags=1)])
    found["method"] = zip_bytes.whole([zip_bytes.Member(name=b"x", method=9)])
    found["future"] = build.torch_zip({}, members={"archive/version": b"99"})
    found["no record"] = build.torch_zip({"w": build.tensor(build.storage())})
    found["short record"] = build.torch_zip({"w": build.tensor(build.storage())}, {"0": b"1234"})
    found["out of storage"] = build.torch_zip({"w": build.tensor(build.storage(), (5,))}, {"0": build.floats()})
    found["bad name"] = zip_bytes.whole([zip_bytes.stored("x\x1b[31m\n")])
    found["bomb"] = zip_bytes.whole([zip_bytes.deflated("archive/data.pkl", bytes(80 << 20))])
    return found


@each("name", broken_files())
def test_messages_are_facts_in_one_printable_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file.pth"
    path.write_bytes(broken_files()[name])

    with pytest.raises(CkptoolError) as caught:
        open_checkpoint(path)
    error = caught.value
    assert error.path == str(path)
    assert str(error) == f"{path}: {error.message}"
    assert error.message
    assert not error.message[0].isupper()
    assert not error.message.endswith((".", "!", "\n"))
    assert error.message.isprintable()
    words = error.message.lower().split()
    assert not {"please", "sorry", "exception", "failed", "oops"} & set(words)
    if error.hint is not None:
        assert error.hint[0].isupper()
        assert error.hint.isprintable()
        assert not error.hint.startswith("Please")


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("torch_zip, half", "truncated: no zip central directory in the last", "Download the file again."),
        ("lfs", "not a checkpoint: a Git LFS pointer to a file of 12,345 bytes", "git lfs pull"),
        ("html", "not a checkpoint: an HTML page", None),
        ("empty", "empty", None),
        ("future", "file format version 99; the newest known is 10", "Update ckptool"),
        ("twins", "ambiguous zip at byte", "Save it again"),
        ("out of storage", "a tensor needs 5 elements of storage '0', which has 4", None),
    ],
)
def test_the_best_known_failures_are_worded_as_documented(name: str, message: str, hint: str | None) -> None:
    with pytest.raises(CkptoolError) as caught:
        open_checkpoint(broken_files()[name])

    assert message in caught.value.message
    if hint is not None:
        assert caught.value.hint is not None
        assert hint in caught.value.hint


def test_limits_are_told_with_what_they_are() -> None:
    with pytest.raises(errors.LimitExceeded) as caught:
        open_checkpoint(build.one_of_each()["torch_zip"], limits=Limits(entries=2))

    assert (caught.value.needed, caught.value.actual) == (4, 2)
    assert "2 are allowed" in caught.value.message


def test_the_operating_systems_reason_is_in_the_message(tmp_path: Path) -> None:
    with pytest.raises(errors.FileUnavailable) as caught:
        open_checkpoint(tmp_path / "none.pth")

    assert str(caught.value) == f"{os.fspath(tmp_path / 'none.pth')}: no such file"


def test_an_error_is_about_the_file_that_is_known_first() -> None:
    def path_of(known: str | None) -> str | None:
        with pytest.raises(CkptoolError) as caught, errors.about("outer.pth"), errors.about(known):
            raise CkptoolError("it is not as it should be")
        return caught.value.path

    assert (path_of("inner.pth"), path_of(None)) == ("inner.pth", "outer.pth")


@on_windows("its paths are text")
def test_a_path_that_is_no_text_leaves_a_message_that_is() -> None:
    path = os.fsdecode(b"a/\xff.pth")
    error = CkptoolError("it is not there", path=path)

    assert str(error) == "a/\\udcff.pth: it is not there"
    assert error.path == path
