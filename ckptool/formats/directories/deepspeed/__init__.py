"""
A folder that an engine of DeepSpeed saved into, whatever the stage of ZeRO: files of ranks, merged.

    latest                                          text: the tag, which is a folder beside it
    <tag>/mp_rank_00_model_states.pt                stages 0 to 2; of stage 3, one for each rank
    <tag>/zero_pp_rank_0_mp_rank_00_optim_states.pt stages 1 to 3: one for each data-parallel rank
    <tag>/layer_03-model_states.pt                  pipelines: one for each layer

Nothing but the files of states is read; scripts that lie beside them are not looked at. See runtime/engine.py.
"""

from __future__ import annotations

from ckptool.checkpoints.parsed import Parsed
from ckptool.errors import FileUnavailable, MalformedFile
from ckptool.formats.directories.deepspeed import states
from ckptool.formats.probe import Probe
from ckptool.sources.folder import FolderSource
from ckptool.sources.siblings import components

NAME = "deepspeed"
_LATEST = "latest"
_LONGEST = 4096


def sniff(folder: FolderSource) -> bool:
    """Say whether an engine saved into the folder, or into the one that its ``latest`` names."""
    if _has_states(folder, ""):
        return True
    if _LATEST not in folder.files:
        return False
    source = folder.open(_LATEST)  # the folder that it names may be gone
    return 0 < source.nbytes < _LONGEST and source.read(0, source.nbytes).strip().isascii()


def _has_states(folder: FolderSource, inside: str) -> bool:
    return any(_is_states(name) for name in folder.names(inside)[0])


def _is_states(name: str) -> bool:
    return any(
        kind.fullmatch(name) for kind in (states.MODEL_FILE, states.OPTIM_FILE, states.LAYER_FILE, states.EXPERT_FILE)
    )


def read(folder: FolderSource, probe: Probe) -> Parsed:
    """
    Read the states of all ranks, and put together what was partitioned; no tensor is read.

    Raises:
        FileUnavailable: ``latest`` names a folder that is not there, or files of ranks are missing.
        MalformedFile: The files are of different saves, or do not fit together.
    """
    from ckptool.formats.directories.deepspeed.tag import read_tag

    return read_tag(folder, probe, "" if _has_states(folder, "") else tag_of(folder, _LATEST))


def tag_of(folder: FolderSource, pointer: str) -> str:
    """
    Return the name of the folder that a file of one line names.

    Raises:
        MalformedFile: It is no name of a folder beside it.
        FileUnavailable: There is no such folder, or it is a link.
    """
    source = folder.open(pointer)
    try:
        text = source.read(0, min(source.nbytes, _LONGEST)).decode().strip()
    except UnicodeDecodeError as error:
        raise MalformedFile(f"{pointer!r} is no text", kind="malformed-pointer") from error
    if len(components(text)) > 1 or "\n" in text:
        raise MalformedFile(f"{pointer!r} has {text[:80]!r}, no name of a folder beside it", kind="malformed-pointer")
    if text not in folder.folders:
        there = [one for one in folder.folders if _has_states(folder, one)]
        raise FileUnavailable(
            f"{pointer!r} names {text!r}, and there is no such folder",
            kind="missing",
            hint=f"Name one that is there: {', '.join(there[:4])}"
            if there
            else "Saving was not finished, or it was moved.",
        )
    return text
