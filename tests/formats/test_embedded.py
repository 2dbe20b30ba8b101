"""Files of torch.save inside the values of others: told of, and opened by ``FILE::PATH`` alone."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool import MalformedFile, WeightsNotFound, open_checkpoint
from tests import build, zip_bytes
from tests.each import each
from tests.formats.said import refused

ZIP = build.torch_zip({"w": build.tensor(build.storage("0"))}, {"0": build.floats()})
LEGACY = build.legacy({"v": build.tensor(build.storage(rest=(None,)))}, [("0", 4, build.floats())])
IN_MEMORY = build.named("_io", "BytesIO") + b")\x81" + build.ops((build.raw(ZIP), 0, None)) + b"b"


def latin(data: bytes) -> bytes:
    """Return the opcodes for bytes as protocol 2 has them."""
    return build.call(build.named("_codecs", "encode"), data.decode("latin-1"), "latin1")


TREE: dict[str, Any] = {
    "torch": build.raw(ZIP),
    "config": {"rate": 1, "old": build.raw(LEGACY), "list": ["a", build.raw(b"x" * 100), IN_MEMORY]},
    "latin": latin(ZIP),
    "twice": build.raw(build.pickled({"inner": build.raw(ZIP), "n": 1})),
    "deep": build.raw(build.torch_zip({"inner": build.raw(LEGACY)})),
}
PATHS = {"torch": "w", "config.old": "v", "config.list.2": "w", "latin": "w", "deep::inner": "v"}


@pytest.fixture(params=["pickle", "zip", "gzip"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    import gzip

    made = {"pickle": build.pickled(TREE), "zip": build.torch_zip(TREE), "gzip": gzip.compress(build.pickled(TREE))}
    (tmp_path / "x.d3").write_bytes(made[request.param])
    return tmp_path / "x.d3"


def test_they_are_named_with_the_command_that_opens_them_and_not_opened(path: Path) -> None:
    found = [one for one in ckptool.check(path).findings if one.code == "CK131"]

    assert [one.command for one in found] == [
        f"ckptool inspect {path}::{name}" for name in ("torch", "config.old", "config.list.2", "latin", "deep")
    ]
    with open_checkpoint(path) as checkpoint:
        assert (checkpoint.form, dict(checkpoint.inside)) == ("data", {})


def test_where_torch_load_refuses_what_has_no_weights_itself_the_file_inside_is_advised(tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(build.pickled({"torch": build.raw(ZIP), "of": build.named("mypkg", "Estimator")}))

    (found,) = (one for one in ckptool.check(tmp_path / "x.pkl").findings if one.code == "CK202")

    assert found.command == f"ckptool inspect {tmp_path / 'x.pkl'}::torch"
    assert "no state dict itself" in str(found.hint)


@each(("member", "tensor"), PATHS.items())
def test_the_path_of_one_opens_it(path: Path, member: str, tensor: str) -> None:
    with open_checkpoint(f"{path}::{member}") as checkpoint:
        assert checkpoint.member == member
        assert list(checkpoint.tensors) == [tensor]
        assert checkpoint.tensors[tensor].read() == build.floats()


def test_every_verb_takes_the_path(path: Path, tmp_path: Path) -> None:
    member = f"{path}::config.old"

    assert ckptool.check(member, deep=True).error is None
    assert ckptool.diff(f"{path}::torch", f"{path}::latin").same
    ckptool.migrate(member, tmp_path / "x.safetensors")
    assert list(ckptool.load(member)) == list(ckptool.load(tmp_path / "x.safetensors")) == ["v"]


def test_without_weights_the_error_says_where_they_may_be(path: Path) -> None:
    assert f"{path}::torch" in (refused(path, WeightsNotFound, by=ckptool.load).hint or "")


@each("member", ["tors", "config", "torch::w", "torch::", "::torch", "config.list.1", "latin.0"])
def test_what_is_no_file_is_an_error_that_lists_those_that_are(path: Path, member: str) -> None:
    caught = refused(f"{path}::{member}")
    assert isinstance(caught, MalformedFile)


def test_in_a_member_of_an_archive(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(
        zip_bytes.whole([zip_bytes.stored("net.pkl", build.pickled(TREE)), zip_bytes.stored("x.pth", ZIP)])
    )

    assert list(open_checkpoint(f"{tmp_path}/a.zip::net.pkl::config.old").tensors) == ["v"]


def test_bytes_that_are_all_there_is(tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(build.pickled(build.raw(ZIP)))

    assert list(open_checkpoint(f"{tmp_path}/x.pkl::content").tensors) == ["w"]


def test_a_million_values_without_files_and_a_deep_tree_cost_little() -> None:
    nested: Any = build.raw(ZIP)
    for _ in range(2_000):
        nested = b"}X\1\0\0\0k" + nested + b"s"

    data = build.pickled({"deep": nested, "many": list(range(100_000))})
    assert "CK131" not in {
        one.code for one in ckptool.check(data).findings
    }  # its path is longer than anyone would type


def test_one_that_is_cut_short_is_an_error_when_it_is_opened(tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(build.pickled({"torch": build.raw(ZIP[:-30])}))

    assert refused(f"{tmp_path}/x.pkl::torch").path == str(tmp_path / "x.pkl")


@pytest.mark.parametrize("protocol", [2, 5])
def test_a_pickle_with_tensors_is_one_too(tmp_path: Path, protocol: int) -> None:
    model = torch.nn.Linear(2, 1)
    inside = pickle.dumps({"module_": model, "rate": 0.1}, protocol)
    path = tmp_path / "net.pkl"
    others = {"plain": pickle.dumps(list(range(100)), protocol), "cut": inside[:-1]}
    path.write_bytes(pickle.dumps({"lr": 0.1, "attributes": inside, **others}, 4))

    assert f"{path}::attributes" in (refused(path, WeightsNotFound, by=ckptool.load).hint or "")
    assert [one.command for one in ckptool.check(path).findings if one.code == "CK131"] == [
        f"ckptool inspect {path}::attributes"
    ]
    found = ckptool.load(f"{path}::attributes")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
