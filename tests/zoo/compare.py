"""One file as ckptool sees it, compared with what the libraries' own loaders give."""

from __future__ import annotations

import copy
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import ckptool
from tests.zoo import advice, truth
from tests.zoo.box import Expected
from tests.zoo.truth import Content


class Comparison:
    """What became of one file: ``wrong`` and ``refused`` hold one line for each thing that is so."""

    def __init__(self, path: Path, shown: str) -> None:
        self.path = path
        self.shown = shown
        self.tensors = 0
        self.unreadable: str | None = None
        self.wrong: list[str] = []
        self.refused: list[str] = []
        self.bad_advice: list[str] = []
        self.is_index = False
        """The tensors are in other files, which its own loader does not read with it."""

    @property
    def verdict(self) -> str:
        if self.unreadable is not None:
            return "unreadable"
        return "wrong" if self.wrong else "refused" if self.refused else "equal"

    def record(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"file": self.shown, "verdict": self.verdict} | {
            name: getattr(self, name) for name in ("tensors", "unreadable", "wrong", "refused", "bad_advice")
        }


def compare(path: Path, shown: str, expected: list[Expected], scratch: Path) -> Comparison | None:
    """Compare one file or folder; None if no loader takes it, and nobody said that it holds weights."""
    there: dict[str, Content] | None = None
    if path.is_file():
        try:
            there = truth.named(truth.read(path))
        except truth.NotOpened:
            there = None
    if there is None and not expected:
        return None
    found = Comparison(path, shown)
    found.tensors = len(there or {})
    try:
        with ckptool.open_checkpoint(path) as checkpoint:
            found.is_index = bool(checkpoint.shards)
            if there:
                _compare_tensors(found, [*_contents(checkpoint), *_of_files_inside(path)], there)
    except ckptool.CkptoolError as error:
        found.unreadable = _said(error)
        advice.follow(found, scratch)
        return found
    except Exception as error:  # noqa: BLE001 - every one is a mistake of ours
        found.wrong.append(f"open raised {type(error).__name__}: {error}")
    for one in expected or [Expected(path, {})]:
        _compare_weights(found, one, there, scratch)
    _compare_verdict(found)
    advice.follow(found, scratch)
    return found


def _said(error: ckptool.CkptoolError) -> str:
    return f"{type(error).__name__}: {error.message}"[:300]


def _compare_tensors(found: Comparison, read: list[tuple[str, Content]], there: Mapping[str, Content]) -> None:
    ours, values = dict(read), {one for _, one in read}
    lost = [name for name, expected in there.items() if ours.get(name) != expected and expected not in values]
    lost = sorted(set(lost) - _made_by_code(found.path, lost, there))
    if lost:
        shown = ", ".join(f"{name!r} {there[name].dtype}{list(there[name].shape)}" for name in lost[:3])
        found.wrong.append(f"{len(lost)} of {len(there)} tensors are not read, or have other bytes: {shown}")


def _made_by_code(path: Path, lost: list[str], there: Mapping[str, Content]) -> set[str]:
    """
    Return the tensors that are not in the file, but made by code of classes; what a module adds to its state_dict()
    must be refused by ``load``, by the name of its class.
    """
    made = truth.not_in_file(path, {name: there[name] for name in lost})
    if not made:
        return set()
    refused: tuple[str, ...] = ()
    try:
        ckptool.load(path)
    except ckptool.IncompleteWeights as error:
        refused = error.missing
    except ckptool.CkptoolError:
        pass
    modules = truth.modules(truth.read(path))
    return {name for name in made if _is_inside(name, refused) or not _is_inside(name, modules)}


def _is_inside(name: str, paths: Iterable[str]) -> bool:
    return any(not path or name == path or name.startswith(f"{path}.") for path in paths)


def _of_files_inside(path: Path) -> Iterator[tuple[str, Content]]:
    """Yield the tensors of files inside values, which are opened one by one, by the names that findings give."""
    for one in ckptool.check(path).findings:
        if one.code == "CK131" and one.command:
            with ckptool.open_checkpoint(shlex.split(one.command)[2]) as inside:
                yield from _contents(inside)


def _contents(checkpoint: ckptool.Checkpoint) -> Iterator[tuple[str, Content]]:
    for name, tensor in [*checkpoint.tensors.items(), *checkpoint.attributes.items()]:
        yield from _content(name, tensor)
    for inside in checkpoint.inside.values():
        yield from _contents(inside)


def _content(name: str, tensor: ckptool.LazyTensor) -> Iterator[tuple[str, Content]]:
    for part, info in tensor.info.parts:
        yield from _content(f"{name}[{part}]", ckptool.LazyTensor(f"{name}[{part}]", info))
    digest = truth.hashlib.sha1
    if tensor.info.storage is None:
        yield name, Content(tensor.dtype, tensor.shape, digest(b"").hexdigest())
        return
    try:
        data = tensor.read()
    except ckptool.CkptoolError:
        return
    yield name, Content(tensor.dtype, tensor.shape, digest(data).hexdigest())


def _compare_weights(found: Comparison, expected: Expected, there: Mapping[str, Content] | None, scratch: Path) -> None:
    options = {"key": expected.key, "weights": expected.choice, "strip": "wrappers" if expected.wrapped else None}
    wanted = truth.named(expected.entries)
    try:
        loaded = ckptool.load(expected.origin, **options)
    except ckptool.CkptoolError as error:
        is_none = isinstance(error, ckptool.WeightsNotFound) and not isinstance(error, ckptool.IncompleteWeights)
        if wanted or (there and not is_none):
            found.refused.append(f"load: {_said(error)}")
        loaded = None
    except Exception as error:  # noqa: BLE001 - every one is a mistake of ours
        found.wrong.append(f"load raised {type(error).__name__}: {error}")
        loaded = None
    if loaded is not None:
        got = truth.named(dict(loaded))
        if wanted:
            _same(found, "load", got, wanted)
        elif there is not None and not found.is_index:
            values = {*there.values(), *truth.arrays(truth.read(found.path)).values()}
            found.wrong.extend(f"load: {name!r} is in no such file" for name, one in got.items() if one not in values)
        wanted = wanted or got
    if wanted:
        for form in ("state_dict", "safetensors"):
            _compare_migrated(found, expected, form, wanted, scratch)
    if expected.model is not None:
        _compare_filled(found, expected)


def _same(found: Comparison, what: str, got: Mapping[str, Content], wanted: Mapping[str, Content]) -> None:
    missing, extra = [name for name in wanted if name not in got], [name for name in got if name not in wanted]
    if missing or extra:
        found.wrong.append(f"{what}: missing {missing[:4]} ({len(missing)}), unexpected {extra[:4]} ({len(extra)})")
    different = [name for name in wanted if name in got and got[name] != wanted[name]]
    if different:
        name = different[0]
        found.wrong.append(f"{what}: {len(different)} differ, {name!r}: {got[name]}, not {wanted[name]}")


def _compare_migrated(
    found: Comparison, expected: Expected, form: str, wanted: Mapping[str, Content], scratch: Path
) -> None:
    result = scratch / f"migrated.{'safetensors' if form == 'safetensors' else 'pt'}"
    result.unlink(missing_ok=True)
    try:
        options = {"key": expected.key, "weights": expected.choice, "strip_wrappers": expected.wrapped}
        ckptool.migrate(expected.origin, result, form=form, force=True, **options)
        if form == "safetensors":
            raw = truth.named(load_file(result))  # ties are under one name there, and back again in load()
            _same(found, f"migrate {form}", raw, {name: one for name, one in wanted.items() if name in raw})
            again = ckptool.load(result, strip="wrappers" if expected.wrapped else None)
            _same(found, f"migrate {form}, load", truth.named(dict(again)), wanted)
            return
        if not advice.opens(result):
            found.wrong.append(f"migrate {form}: torch.load() does not open the result")
            return
        opened = torch.load(result, weights_only=True)
        _same(found, f"migrate {form}", truth.named(opened), wanted)
        lost = [name for name in expected.entries if name not in opened]
        if lost:
            found.wrong.append(f"migrate {form}: {lost[:4]} lost")
    except ckptool.CkptoolError as error:
        found.refused.append(f"migrate {form}: {_said(error)}")
    except Exception as error:  # noqa: BLE001 - every one is a mistake of ours
        found.wrong.append(f"migrate {form} raised {type(error).__name__}: {str(error)[:300]}")
    finally:
        result.unlink(missing_ok=True)


def _compare_filled(found: Comparison, expected: Expected) -> None:
    assert expected.model is not None
    try:
        model = copy.deepcopy(expected.model)
    except Exception:  # noqa: BLE001 - models that cannot be copied
        return
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not tensor.is_meta:
                tensor.zero_()
    try:
        ckptool.load_into(model, expected.origin, key=expected.key, weights=expected.choice)
        filled = {name: value for name, value in model.state_dict().items() if name in expected.entries}
        _same(found, "load_into", truth.named(filled), truth.named(expected.entries))
    except ckptool.CkptoolError as error:
        found.refused.append(f"load_into: {_said(error)}")
    except Exception as error:  # noqa: BLE001 - every one is a mistake of ours
        found.wrong.append(f"load_into raised {type(error).__name__}: {str(error)[:300]}")


def _compare_verdict(found: Comparison) -> None:
    """CK202 says that plain ``torch.load`` does not open a file: so it must, and must not otherwise."""
    try:
        report = ckptool.check(found.path)
        if found.path.is_dir() or report.format not in ("torch_zip", "torch_legacy", "pickle"):
            return
        torch.serialization.clear_safe_globals()  # libraries allow their own when they are imported
        refused = not advice.opens(Path(report.path))  # of a folder, the file that was opened
        if refused != any(one.code == "CK202" for one in report.findings):
            found.wrong.append(f"torch.load() {'refuses' if refused else 'opens'} it, check says otherwise")
    except ckptool.CkptoolError:
        return
    except Exception as error:  # noqa: BLE001 - every one is a mistake of ours
        found.wrong.append(f"check raised {type(error).__name__}: {error}")


def clear(folder: Path) -> None:
    """Empty a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
