"""
The messages that ``explain`` knows, as data: how to recognise each, what it means, and what to do.

The texts are those of torch, safetensors and Python; tests provoke the ones that the installed releases still give.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Explanation(NamedTuple):
    """What a message means. ``kind`` is stable, for programs."""

    kind: str
    meaning: str
    hint: str


class Entry(NamedTuple):
    """A message: how to recognise it, and its explanation, in which {0}, {1}… are the groups of the pattern."""

    kind: str
    pattern: str
    meaning: str
    hint: str

    def apply(self, text: str) -> Explanation | None:
        """Return the explanation, if the text holds this message."""
        found = re.search(self.pattern, text)
        if found is None:
            return None
        groups = [(group or "")[:200] for group in found.groups()]
        return Explanation(self.kind, self.meaning.format(*groups), self.hint.format(*groups))


_LOOK = "Look at the file: ckptool check FILE"
_AGAIN = "Download or copy it again; 'ckptool check FILE' says how many bytes are missing and what is still whole."
TO_CPU = "Pass map_location='cpu', or rewrite the tags once: ckptool migrate FILE --to cpu"
_NOT_ONE = "Not a checkpoint: the first byte is "

ENTRIES: tuple[Entry, ...] = (
    # Devices
    Entry(
        "device-missing",
        r"Attempting to deserialize object on a (\w+) device but torch\.\w+\.is_available\(\) is False",
        "The tensors were saved on {0}, and torch finds no such device: there is none, its driver is missing, or "
        "this build of torch does not support it.",
        f"{TO_CPU}; why there is none: ckptool devices",
    ),
    Entry(
        "device-number",
        r"Attempting to deserialize object on (\w+) device (\d+) but torch\.\w+\.device_count\(\) is (\d+)",
        "The tensors were saved on {0} device number {1}, counted from 0, and there are {2} here.",
        TO_CPU,
    ),
    Entry(
        "device-unknown",
        r"don't know how to restore data location of \S+ \(tagged with ([^)]*)\)",
        "torch knows no device called {0!r}: the file has that tag and the package that brings the device is not "
        "imported, or map_location says so and is misspelt.",
        "Spell map_location as 'cpu' or 'cuda:0'; if it is the file's own tag: ckptool migrate FILE --to cpu",
    ),
    Entry(
        "device-module",
        r"The (\w+) device module is not registered",
        "The tensors were saved on a device of kind {0}, which needs a package of its own.",
        TO_CPU,
    ),
    Entry(
        "device-unknown",
        r"Storage device not recognized: (\w+)",
        "The tensors were saved on {0}, and this machine has no such device.",
        TO_CPU,
    ),
    Entry(
        "meta",
        r"Cannot copy out of meta tensor",
        "A tensor has a shape and no values: the model was built on the meta device, or was saved before its weights "
        "were loaded.",
        "Load weights into it with assign=True, or after model.to_empty(device=…); see which have none: "
        "ckptool inspect FILE",
    ),
    # What weights_only=True refuses
    Entry(
        "unsafe-global",
        r"(?:Unsupported global: )?GLOBAL (\S+) was not an allowed global by default",
        "The file holds {0} beside its tensors, or is a whole model, and torch.load() takes neither since 2.6 unless "
        "told to trust the file.",
        "Take the weights out without running anything: ckptool migrate FILE --form state_dict",
    ),
    Entry(
        "blocked-module",
        r"GLOBAL (\S+) whose module (\S+) is blocked",
        "The file asks for {0}, which can do anything to this machine; torch refuses all of {1}, whatever it is told.",
        "Do not load it with weights_only=False; see what it asks for: ckptool check FILE --globals",
    ),
    Entry(
        "torchscript",
        r"Cannot use ``weights_only=True`` with TorchScript archives",
        "The file is TorchScript, a program with its weights.",
        "Open it with torch.jit.load(), or take its weights: ckptool migrate FILE OUT.safetensors",
    ),
    Entry(
        "old-tar",
        r"``weights_only=True`` with files saved in the legacy \.tar format",
        "The file was written by PyTorch 0.1, as a tar.",
        "Rewrite it: ckptool migrate FILE --form state_dict",
    ),
    Entry(
        "torch-too-old",
        r"require users to upgrade torch to at least v2\.6",
        "A library refuses torch.load() before 2.6, for security; files in safetensors are not concerned.",
        "Rewrite the file: ckptool migrate FILE OUT.safetensors",
    ),
    # What is no checkpoint
    Entry(
        "lfs-pointer",
        r"Unsupported operand 118\b|invalid load key, 'v'",
        f"{_NOT_ONE}'v', as in 'version https://git-lfs…': a Git LFS pointer stands in place of the file.",
        "Run 'git lfs pull' in the repository, or download the file itself.",
    ),
    Entry(
        "html",
        r"Unsupported operand (?:60|10)\b|invalid load key, '(?:<|\\n|\\x0a)'",
        f"{_NOT_ONE}'<' or a line break: a web page was downloaded in place of the file (login, quota, not found).",
        "Open it in an editor to see what the server said, then download again.",
    ),
    Entry(
        "json",
        r"Unsupported operand 123\b|invalid load key, '\{'",
        f"{_NOT_ONE}'{{{{': JSON, such as a server's error, or the index of a model in several files.",
        "Name one of the files that an index lists.",
    ),
    Entry(
        "gzip",
        r"Unsupported operand 31\b|invalid load key, '\\x1f'",
        "The file is packed with gzip.",
        "Unpack it with 'gunzip' or 'tar xzf', or read it as it is: ckptool inspect FILE",
    ),
    Entry(
        "7z",
        r"Unsupported operand 55\b|invalid load key, '7'",
        f"{_NOT_ONE}'7', as of a 7z archive.",
        "Unpack it only if you trust where it comes from: checkpoints are not published like that.",
    ),
    Entry(
        "image",
        r"Unsupported operand (?:80|255)\b|invalid load key, '(?:\\xff|\\x89)'",
        f"{_NOT_ONE}that of a JPEG or PNG image.",
        _LOOK,
    ),
    Entry(
        "plain-pickle",
        r"Unsupported operand 149\b|Invalid magic number; corrupt file",
        "The file is a pickle that torch.save() did not write: pickle.dump() did, with a protocol of its own.",
        "If it holds tensors, rewrite it: ckptool migrate FILE --form state_dict",
    ),
    Entry(
        "foreign-zip",
        r"file in archive is not in a subdirectory: (\S+)|failed locating file data\.pkl",
        "The file is a zip, and not one that torch.save() wrote: an archive of files, or an exported program (.pt2), "
        "which torch.export.load() opens.",
        "See what is in it: ckptool inspect FILE",
    ),
    # What is cut short
    Entry(
        "truncated-zip",
        r"failed finding central directory",
        "The file is a zip without its end: a download, a copy or a save was cut short.",
        _AGAIN,
    ),
    Entry(
        "truncated-legacy",
        r"unexpected EOF, expected (\d+) more bytes",
        "The file ends {0} bytes too early: a download, a copy or a save was cut short.",
        _AGAIN,
    ),
    Entry(
        "truncated-zip",
        r"\[Errno 22\] Invalid argument",
        "From torch.load() this means a zip without its end, cut short in its first part.",
        _AGAIN,
    ),
    Entry(
        "empty",
        r"EOFError|Ran out of input|pickle data was truncated",
        "The file is empty or ends in its first part: the disk was full, or a save or download was cut short.",
        _AGAIN,
    ),
    Entry(
        "hash",
        r"invalid hash value \(expected",
        "What torch.hub downloaded is not what its name promises: it was cut short, or replaced on the server.",
        "Delete it from the cache (~/.cache/torch/hub/checkpoints) and load again.",
    ),
    Entry(
        "mapped",
        r"exit code:? (?:135|-7)\b|SIGBUS|Bus error",
        "A file was cut or overwritten while it was mapped into memory, or its network went away.",
        "Replace files by writing beside them and renaming, as ckptool migrate does; load with mmap=False.",
    ),
    Entry(
        "mapped",
        r"code: 1224|user-mapped section open",
        "Windows does not let a file be replaced while a process has it mapped.",
        "Let go of what was loaded from it first, or write under another name.",
    ),
    # Versions
    Entry(
        "future-version",
        r"PyTorch file with version (\d+), but the maximum supported version for reading is (\d+)",
        "The file has format version {0}; this torch reads up to {1}.",
        "Update torch, or save it again with an older one.",
    ),
    Entry(
        "zip-in-old-torch",
        r"is a zip archive \(did you mean to use torch\.jit\.load|Only one file\(not dir\) is allowed in the zipfile",
        "A torch before 1.6 does not know the zips that torch.save() writes since then; or the file is TorchScript.",
        "Update torch; for TorchScript use torch.jit.load(). Which it is: ckptool inspect FILE",
    ),
    Entry(
        "not-torchscript",
        r"failed locating file constants\.pkl",
        "torch.jit.load(), or a server that uses it, was given a checkpoint: weights without a program.",
        "Build the model in Python, load the weights, and export it with torch.export or torch.jit.trace.",
    ),
    Entry(
        "mmap-legacy",
        r"mmap can only be used with files saved with",
        "The file is a stream from before PyTorch 1.6, which torch cannot map.",
        "Rewrite it as a zip: ckptool migrate FILE",
    ),
    Entry(
        "untyped-legacy",
        r"'torch\.storage\.UntypedStorage' has no attribute 'dtype'",
        "The file is a stream with untyped storages, which torch.load() cannot read with weights_only=True.",
        "Rewrite it as a zip: ckptool migrate FILE",
    ),
    Entry(
        "numpy",
        r"No module named 'numpy\._core|numpy\.core\.\w+",
        "The file holds numpy values from another major release of numpy: 2.0 moved numpy.core to numpy._core.",
        "Take the weights without them: ckptool migrate FILE --form state_dict",
    ),
    Entry(
        "python-2",
        r"'ascii' codec can't decode byte",
        "The file was pickled by Python 2, whose strings are bytes.",
        "Pass encoding='latin1' to torch.load(), or rewrite it: ckptool migrate FILE --form state_dict",
    ),
    Entry(
        "path",
        r"cannot instantiate '(PosixPath|WindowsPath)'",
        "The file holds a {0}, a path of another operating system.",
        "Take the weights without it: ckptool migrate FILE --form state_dict",
    ),
    # Classes
    Entry(
        "missing-class",
        r"Can't get attribute '(\w+)' on <module '([^']+)'",
        "The file is a whole model, or holds one: it needs the class {0} in {1}, and that has none of the name.",
        "Take the weights without the class: ckptool migrate FILE --form state_dict",
    ),
    Entry(
        "missing-module",
        r"No module named '(?!numpy\.)([^']+)'",
        "The file holds objects of the package {0}, which is not installed or not on the path.",
        "Take the weights without it: ckptool migrate FILE --form state_dict",
    ),
    Entry(
        "not-a-model",
        r"'(?:collections\.OrderedDict|OrderedDict|dict)' object has no attribute '(?:eval|cuda|to|parameters)'",
        "What was loaded is a state_dict, weights by name, and is used as if it were the model.",
        "Build the model and call model.load_state_dict() with it.",
    ),
    Entry(
        "not-a-state-dict",
        r"Expected state_dict to be dict-like, got <class '([^']+)'>",
        "load_state_dict() wants a dict of tensors and got {0}: a path, a whole model, or state_dict without its "
        "parentheses.",
        "Load the file first; what is in it: ckptool inspect FILE",
    ),
    Entry(
        "data-parallel",
        r"'(?:DataParallel|DistributedDataParallel)' object has no attribute '(\w+)'",
        "The model is wrapped for several GPUs; {0} belongs to the model inside.",
        "Use model.module; a file without the wrapper: ckptool migrate FILE --strip-module",
    ),
    # safetensors
    Entry(
        "not-safetensors",
        r"header too (?:large|small)|HeaderTooLarge|HeaderTooSmall|InvalidHeaderDeserialization|invalid JSON in header",
        "The file is no safetensors file: it is empty, a web page, or a .pth under that name.",
        _LOOK,
    ),
    Entry(
        "truncated-safetensors",
        r"incomplete metadata, file not|MetadataIncompleteBuffer|invalid header length|InvalidHeaderLength",
        "The safetensors file is cut short, or has bytes behind its last tensor.",
        _AGAIN,
    ),
    Entry(
        "safetensors-metadata",
        r"does not contain the valid metadata",
        "The safetensors file does not say which framework its tensors are for.",
        "Write it again, which says so: ckptool migrate FILE OUT.safetensors",
    ),
    Entry(
        "shared-tensors",
        r"Some tensors share memory",
        "Two names have one tensor, and safetensors holds each tensor once.",
        "Write the file with the ties recorded: ckptool migrate FILE OUT.safetensors",
    ),
    Entry(
        "non-contiguous",
        r"You are trying to save a non contiguous tensor",
        "A tensor is a view with gaps, and safetensors holds packed ones.",
        "Write the file with it packed: ckptool migrate FILE OUT.safetensors",
    ),
    Entry(
        "sparse",
        r"You are trying to save a sparse tensor",
        "safetensors has no sparse tensors.",
        "Make it dense with .to_dense(), or leave it out: ckptool migrate FILE OUT.safetensors --drop-unsupported",
    ),
    Entry(
        "nested",
        r"Key `?(\S+?)`? is invalid, expected torch\.Tensor but received",
        "{0} is no tensor: a whole checkpoint, with more than the weights, was given to safetensors.",
        "Write the weights alone: ckptool migrate FILE OUT.safetensors",
    ),
    # Models
    Entry(
        "shape",
        r"size mismatch for (\S+): copying a param with shape (.+?) from checkpoint, the shape in .*? is ([^\n]*\))",
        "{0} is {1} in the file and {2} in the model: it was built with other sizes, often another number of classes.",
        "Build it with the sizes of the file, or leave these out: ckptool check FILE --model package.module:Class",
    ),
    Entry(
        "threads",
        r"_CURRENT_DESERIALIZER is already set",
        "torch.export.load() ran in two threads at once.",
        "Load in one thread, or behind a lock.",
    ),
)

GENERAL: tuple[Entry, ...] = (
    Entry(
        "not-a-pickle",
        r"Unsupported operand (\d+)|invalid load key, '(.+?)'",
        "The file is none that torch.save() wrote: its first bytes are no pickle and no zip; a safetensors file under "
        "another name looks like this.",
        _LOOK,
    ),
    Entry(
        "zip-reader",
        r"PytorchStreamReader failed (\w[\w ]+)",
        "The zip cannot be read: it is damaged, or is not a checkpoint.",
        "See which: ckptool check FILE --deep",
    ),
    Entry(
        "weights-only",
        r"Weights only load failed",
        "The file holds more than tensors and plain values, or is no checkpoint at all.",
        _LOOK,
    ),
)
"""Messages that only say that something failed, for want of a specific one."""

FRAGMENTS: tuple[Entry, ...] = (
    Entry(
        "some-device",
        r"(?i)deserialize object on|cuda\.is_available\(\) is False",
        "The tensors were saved on a device that is not here.",
        f"{TO_CPU}; why there is none: ckptool devices",
    ),
    Entry(
        "some-class",
        r"Can't get attribute|No module named",
        "The file holds a whole model, and its class cannot be imported here.",
        "Take the weights without it: ckptool migrate FILE --form state_dict",
    ),
    Entry(
        "some-keys",
        r"(?i)(?:missing|unexpected) keys?\b",
        "The names in the file are not those of the model.",
        "Hold the file against the class: ckptool check FILE --model package.module:Class",
    ),
    Entry(
        "some-shape",
        r"size mismatch for ([\w.]+)",
        "{0} has another shape in the file than in the model: the model was built with other sizes.",
        "See both: ckptool check FILE --model package.module:Class --model-arg NAME=VALUE",
    ),
    Entry(
        "some-damage",
        r"PytorchStreamReader|central directory|unexpected EOF|archive is corrupted",
        "The file is damaged, cut short, or no checkpoint.",
        "See which: ckptool check FILE --deep",
    ),
    Entry(
        "some-memory",
        r"(?i)out of memory|^\W*killed\W*$|cannot allocate memory",
        "Loading needed more memory than there was: torch.load() needs the file's size, and the model's again.",
        "Load with ckptool.load_into(model, FILE), which never has two copies, or halve it: "
        "ckptool migrate FILE --dtype bfloat16",
    ),
)
"""Asked last, and in this order."""
