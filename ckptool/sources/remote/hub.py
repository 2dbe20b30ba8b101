"""
Files of repositories on the Hugging Face hub: ``hf://ORG/NAME[@REVISION][/FILE]``.

A revision is resolved to its commit once: what is read afterwards cannot change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

from ckptool.errors import CkptoolError, FileUnavailable, MissingPackage
from ckptool.sources.paths import is_likely
from ckptool.sources.remote.address import Remote

_COMMAND: Final = "pip install 'ckptool[hub]'"
_WHOLE: Final = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.safetensors",
    "adapter_model.safetensors",
)
"""What the file of the weights is called, in the order in which transformers and others look for it."""


def resolve(remote: Remote) -> tuple[Remote, Mapping[str, str]]:
    """
    Return the address of a file on the web, and the headers that say who asks.

    Raises:
        FileUnavailable: There is no such repository, revision or file, or it is not open to everybody.
        MissingPackage: huggingface_hub is not installed.
    """
    parts = remote.partition("://")[2].split("/", 2)
    if len(parts) < 2 or not all(parts[:2]):
        raise FileUnavailable("an address without a repository", kind="address", hint="Give hf://ORG/NAME/FILE.")
    name, _, revision = parts[1].partition("@")
    repository = f"{parts[0]}/{name}"
    hub = _package()
    token = False if remote.anonymous else None
    api = hub.HfApi(endpoint=remote.endpoint, token=token)
    try:
        info = api.repo_info(repository, revision=unquote(revision) or None)
    except Exception as error:
        raise _explained(error, repository) from error
    names = [one.rfilename for one in info.siblings or ()]
    file = unquote(parts[2]) if len(parts) > 2 and parts[2] else _chosen(names, remote)
    if file not in names:
        raise FileUnavailable("no such file in the repository", kind="missing", hint=_pick(names, remote))
    url = hub.hf_hub_url(repository, file, revision=info.sha, endpoint=remote.endpoint)
    return remote.elsewhere(url), hub.utils.build_hf_headers(token=token)


def _chosen(names: Sequence[str], remote: Remote) -> str:
    found = [name for name in _WHOLE if name in names] or [name for name in names if is_likely(name)]
    if not found or (found[0] not in _WHOLE and len(found) > 1):
        what = "several files that may be checkpoints" if found else "no file that may be a checkpoint"
        raise FileUnavailable(f"a repository with {what}", kind="which-file", hint=_pick(found or names, remote))
    return found[0]


def _pick(names: Sequence[str], remote: Remote) -> str:
    likely = [name for name in names if is_likely(name)] or list(names)
    shown = ", ".join(likely[:8])
    return f"Name one of its files: {shown}" if likely else f"Look at what {remote.shown} has."


def _explained(error: Exception, repository: str) -> CkptoolError:
    """Return the error for one of huggingface_hub's, by the name of its class: where that is defined has changed."""
    kinds = {cls.__name__ for cls in type(error).__mro__}
    if "GatedRepoError" in kinds:
        hint = "Ask for access on its page, then sign in: hf auth login"
        return FileUnavailable(f"{repository} is open only to those who asked for access", kind="permission", hint=hint)
    if kinds & {"RepositoryNotFoundError", "HFValidationError"}:
        hint = "Check the name. If it is private, sign in: hf auth login"
        return FileUnavailable(f"no repository {repository}", kind="missing", hint=hint)
    if "RevisionNotFoundError" in kinds:
        return FileUnavailable(f"no such revision of {repository}", kind="missing", hint="Check what follows '@'.")
    return FileUnavailable("the hub cannot be reached", kind="network", hint="Check the network.")


def _package() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.utils
    except ImportError as error:
        raise MissingPackage.named("huggingface_hub", _COMMAND) from error
    return huggingface_hub
