"""Files on the Hugging Face hub: a server on loopback answers as the hub does, redirects included."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from ckptool import CkptoolError, Remote, open_checkpoint
from tests.remote.servers import Server, serving
from tests.remote.test_requests import LARGE

pytest.importorskip("huggingface_hub", reason='huggingface_hub is not installed: pip install "ckptool[hub]"')

SHA = "0123456789abcdef0123456789abcdef01234567"
NAMES = ("config.json", "pytorch_model.bin", "old/pytorch_model.bin", "runs/last.ckpt")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The hub: it knows one repository, and a second that has two checkpoints under unusual names."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serving({f"/org/net/resolve/{SHA}/{name}": LARGE for name in NAMES}) as server:
        repositories = {"org/net": NAMES, "org/two": ("one.pth", "two.pth")}

        def answers(handler) -> bool:
            path = handler.path.partition("?")[0]
            server.tokens.append(handler.headers.get("Authorization"))  # type: ignore[attr-defined]
            if not path.startswith("/api/models/"):
                return False
            name = path.removeprefix("/api/models/").partition("/revision/")
            if name[0] not in repositories:
                handler.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif name[2] not in ("", "main", "v1", SHA):
                handler.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            else:
                files = [{"rfilename": one} for one in repositories[name[0]]]
                body = {"id": name[0], "sha": SHA, "siblings": files}
                handler.answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
            return True

        server.tokens = []  # type: ignore[attr-defined]
        server.before = answers
        yield server


def at(hub: Server, address: str) -> Remote:
    return Remote(address, endpoint=hub.url)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("hf://org/net", "pytorch_model.bin"),
        ("hf://org/net@v1", "pytorch_model.bin"),
        (f"hf://org/net@{SHA}/runs/last.ckpt", "runs/last.ckpt"),
        ("hf://org/net/old/pytorch_model.bin", "old/pytorch_model.bin"),
    ],
)
def test_a_file_is_read_at_a_commit(hub: Server, address: str, name: str) -> None:
    with open_checkpoint(at(hub, address)) as found:
        assert (len(found.tensors), found.path) == (200, address)
    asked = [path for path, ranged in hub.requests if ranged]
    assert set(asked) == {f"/org/net/resolve/{SHA}/{name}"}
    assert len(asked) <= 3


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("hf://org/none", "no repository"), ("hf://org/net@nowhere", "no such revision"),
        ("hf://org/net/none.pth", "no such file"), ("hf://org/two", "several files"),
        ("hf://", "without a repository"), ("hf://org", "without a repository"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_named(hub: Server, address: str, says: str) -> None:
    with pytest.raises(CkptoolError, match=says) as caught:
        open_checkpoint(at(hub, address))
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    assert "hf_secret" not in f"{caught.value}{caught.value.hint}"


def test_the_token_is_for_the_hub_alone(hub: Server) -> None:
    with serving({"/blob": LARGE}) as store:
        sent: list[str | None] = []
        store.before = lambda handler: sent.append(handler.headers.get("Authorization")) or False
        answers = hub.before

        def redirects(handler) -> bool:
            if "/resolve/" not in handler.path:
                return answers(handler)
            hub.tokens.append(handler.headers.get("Authorization"))  # type: ignore[attr-defined]
            handler.answer(302, b"", {"Location": f"{store.url}/blob"})
            return True

        hub.before = redirects
        with pytest.raises(CkptoolError, match="redirects"):  # as any that leads into this machine
            open_checkpoint(at(hub, "hf://org/net"))
        assert not sent
    assert "Bearer hf_secret" in hub.tokens  # type: ignore[attr-defined]


def test_nobody_signs_in_who_shall_not(hub: Server) -> None:
    open_checkpoint(Remote("hf://org/net", endpoint=hub.url, anonymous=True)).close()
    assert set(hub.tokens) == {None}  # type: ignore[attr-defined]
