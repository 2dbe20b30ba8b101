"""
Files of repositories on the Hugging Face hub: ``hf://ORG/NAME[@REVISION][/FILE]``.

A revision is resolved to its commit once, so what is read afterwards cannot change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote, unquote

from ckptool.errors import CkptoolError, FileUnavailable, MissingPackage
from ckptool.sources.address import Remote
from ckptool.sources.paths import is_likely

_COMMAND: Final = 'pip install "ckptool[hub]"'
_WHOLE: Final = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.safetensors",
    "adapter_model.safetensors",
)
"""Names of the file with the weights, in the order in which transformers and others look for them."""


def resolve(remote: Remote) -> tuple[Remote, Mapping[str, str]]:
    """
    Return the web address of a file, and the headers that identify the user.

    Raises:
        FileUnavailable: There is no such repository, revision or file, or it is not open to everybody.
        MissingPackage: huggingface_hub is not installed.
    """
    repository, commit, file = _parts(remote)
    hub = _package()
    if remote.listed is None:
        info = _info(remote, repository, commit)
        names = [one.rfilename for one in info.siblings or ()]
        file, commit = file or _chosen(names, remote), info.sha
        if file not in names:
            raise FileUnavailable("no such file in the repository", kind="missing", hint=_pick(names, remote))
    url = hub.hf_hub_url(repository, file, revision=commit, endpoint=remote.endpoint)
    found = remote.elsewhere(url)
    found.listed = remote.listed
    return found, hub.utils.build_hf_headers(token=_token(remote))


def listed(remote: Remote) -> list[Remote]:
    """
    Return the addresses of all files of a repository, at the current commit of its revision.

    Raises:
        FileUnavailable: There is no such repository or revision, or it is not open to everybody.
        MissingPackage: huggingface_hub is not installed.
    """
    repository, revision, _ = _parts(remote)
    info = _info(remote, repository, revision, files_metadata=True)
    place = f"hf://{repository}@{info.sha}"
    found = []
    for one in info.siblings or ():
        address = remote.elsewhere(f"{place}/{quote(one.rfilename)}")
        tag = (one.lfs and getattr(one.lfs, "sha256", None)) or one.blob_id
        found.append(address if one.size is None else address.as_listed(tag, one.size))
    return found


def _parts(remote: Remote) -> tuple[str, str, str]:
    """Return the repository, the revision and the file that an address names; the last two may be empty."""
    owner, name, file = [*remote.partition("://")[2].split("/", 2), "", ""][:3]
    name, _, revision = name.partition("@")
    if not owner or not name:
        raise FileUnavailable("an address without a repository", kind="address", hint="Give hf://ORG/NAME/FILE.")
    return f"{owner}/{name}", unquote(revision), unquote(file)


def _info(remote: Remote, repository: str, revision: str, *, files_metadata: bool = False) -> Any:
    api = _package().HfApi(endpoint=remote.endpoint, token=_token(remote))
    try:
        return api.repo_info(repository, revision=revision or None, files_metadata=files_metadata)
    except Exception as error:
        raise _explained(error, repository) from error


def _token(remote: Remote) -> bool | None:
    return False if remote.anonymous else None


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
    """Return our error for one of huggingface_hub, by the name of its class, whose module differs between versions."""
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
