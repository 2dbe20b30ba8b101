"""
Messages of what reads and writes files, as data: torch.load, torch.jit.load, safetensors, pickle.

The texts are those of torch, safetensors and Python; tests provoke the ones that the installed releases still give.
"""

from __future__ import annotations

from ckptool.checking.explain.keys import CHECK, INSPECT, SAFETENSORS, TO_CPU, WEIGHTS, Entry

_AGAIN = "Download or copy it again; 'check' says how many bytes are missing, and what is still whole."
_MAP = "Pass map_location='cpu', or rewrite the device tags in the file."
_WITHOUT = "Take the weights without it."
_FIRST_BYTE = "Not a checkpoint: the first byte is "

READING: tuple[Entry, ...] = (
    # Devices
    Entry(
        "device-missing",
        r"Attempting to deserialize object on a (\w+) device but torch\.\w+\.is_available\(\) is False",
        "The tensors were saved on {0}, and torch finds no such device: there is none, its driver is missing, or "
        "this build of torch does not support it.",
        f"{_MAP} 'ckptool devices' says why there is none.",
        TO_CPU,
    ),
    Entry(
        "device-number",
        r"Attempting to deserialize object on (\w+) device (\d+) but torch\.\w+\.device_count\(\) is (\d+)",
        "The tensors were saved on {0} device number {1}, counted from 0, and there are {2} here.",
        _MAP,
        TO_CPU,
    ),
    Entry(
        "device-unknown",
        r"don't know how to restore data location of \S+ \(tagged with ([^)]*)\)",
        "torch knows no device called {0!r}: the file has that tag and the package that brings the device is not "
        "imported, or map_location says so and is misspelt.",
        "Spell map_location as 'cpu' or 'cuda:0'; if it is the file's own tag, rewrite it.",
        TO_CPU,
    ),
    Entry(
        "device-module",
        r"The (\w+) device module is not registered",
        "The tensors were saved on a device of kind {0}, which needs a package of its own.",
        _MAP,
        TO_CPU,
    ),
    Entry(
        "device-unknown",
        r"Storage device not recognized: (\w+)",
        "The tensors were saved on {0}, and this machine has no such device.",
        _MAP,
        TO_CPU,
    ),
    # What weights_only=True refuses
    Entry(
        "unsafe-global",
        r"(?:Unsupported global: )?GLOBAL (\S+) was not an allowed global by default",
        "The file holds {0} beside its tensors, or is a whole model. Since 2.6, torch.load() refuses both unless told "
        "to trust the file.",
        "Take the weights out without running anything.",
        WEIGHTS,
    ),
    Entry(
        "blocked-module",
        r"GLOBAL (\S+) whose module (\S+) is blocked",
        "The file asks for {0}, which can do anything to this machine; torch refuses all of {1}, whatever it is told.",
        "Do not load it with weights_only=False; see what it asks for.",
        "ckptool check FILE --globals",
    ),
    Entry(
        "torchscript",
        r"Cannot use ``weights_only=True`` with TorchScript archives",
        "The file is TorchScript, a program with its weights.",
        "Open it with torch.jit.load(), or take its weights.",
        SAFETENSORS,
    ),
    Entry(
        "old-tar",
        r"``weights_only=True`` with files saved in the legacy \.tar format",
        "The file was written by PyTorch 0.1, as a tar.",
        "Rewrite it.",
        WEIGHTS,
    ),
    Entry(
        "torch-too-old",
        r"require users to upgrade torch to at least v2\.6",
        "A library refuses torch.load() before 2.6, for security; files in safetensors are not concerned.",
        "Rewrite the file.",
        SAFETENSORS,
    ),
    Entry(
        "weights-only-warning",
        r"FutureWarning: You are using .?torch\.load.? with .?weights_only=False",
        "A warning of torch 2.4 and 2.5, no error: weights_only=False runs whatever code the file asks for, and since "
        "2.6 weights_only=True is the default.",
        "Pass weights_only=True; if the file is refused then, take the weights out without running anything.",
        WEIGHTS,
    ),
    Entry(
        "weights-only-unknown",
        r"unexpected keyword argument 'weights_only'|'weights_only' is an invalid keyword",
        "torch.load() has weights_only since PyTorch 1.13, and this torch is older.",
        "Update torch, or leave weights_only out for files that you trust.",
        CHECK,
    ),
    # What is no checkpoint
    Entry(
        "lfs-pointer",
        r"Unsupported operand 118\b|invalid load key, 'v'",
        f"{_FIRST_BYTE}'v', as in 'version https://git-lfs…': a Git LFS pointer is in the file's place.",
        "Run 'git lfs pull' in the repository, or download the file itself.",
    ),
    Entry(
        "html",
        r"Unsupported operand (?:60|10)\b|invalid load key, '(?:<|\\n|\\x0a)'",
        f"{_FIRST_BYTE}'<' or a line break: a web page was downloaded in place of the file (login, quota, not found).",
        "Open it in an editor to see what the server said, then download again.",
    ),
    Entry(
        "json",
        r"Unsupported operand 123\b|invalid load key, '\{'",
        f"{_FIRST_BYTE}'{{{{': JSON, such as a server's error, or the index of a model in several files.",
        "Name one of the files that an index lists.",
        CHECK,
    ),
    Entry(
        "gzip",
        r"Unsupported operand 31\b|invalid load key, '\\x1f'",
        "The file is packed with gzip.",
        "Unpack it with 'gunzip' or 'tar xzf', or read it as it is.",
        INSPECT,
    ),
    Entry(
        "7z",
        r"Unsupported operand 55\b|invalid load key, '7'",
        f"{_FIRST_BYTE}'7', as of a 7z archive.",
        "Unpack it only if you trust where it comes from: checkpoints are not published like that.",
    ),
    Entry(
        "image",
        r"Unsupported operand (?:80|255)\b|invalid load key, '(?:\\xff|\\x89)'",
        f"{_FIRST_BYTE}that of a JPEG or PNG image.",
        "Look at the file.",
        CHECK,
    ),
    Entry(
        "plain-pickle",
        r"Unsupported operand 149\b|Invalid magic number; corrupt file",
        "The file is a pickle that torch.save() did not write: pickle.dump() did, with a protocol of its own.",
        "If it holds tensors, rewrite it.",
        WEIGHTS,
    ),
    Entry(
        "foreign-zip",
        r"file in archive is not in a subdirectory: (\S+)|failed locating file data\.pkl",
        "The file is a zip, and not one that torch.save() wrote: an archive of files, or an exported program (.pt2), "
        "which torch.export.load() opens.",
        "See what is in it.",
        INSPECT,
    ),
    Entry(
        "not-a-zip",
        r"BadZipFile|File is not a zip file",
        "The file was opened as a zip and is none: torch.save() wrote streams before 1.6, or it is something else.",
        "See what it is.",
        INSPECT,
    ),
    Entry(
        "opened-as-text",
        r"'utf-?8' codec can't decode byte 0x[89a-f]\w in position [0-9]\b",
        "A binary file was read as text.",
        "Give torch.load() the path, or open the file with open(path, 'rb').",
        INSPECT,
    ),
    # What is cut short
    Entry(
        "truncated-zip",
        r"failed finding central directory",
        "The file is a zip without its end: a download, a copy or a save was cut short.",
        _AGAIN,
        CHECK,
    ),
    Entry(
        "truncated-legacy",
        r"unexpected EOF, expected (\d+) more bytes",
        "The file ends {0} bytes too early: a download, a copy or a save was cut short.",
        _AGAIN,
        CHECK,
    ),
    Entry(
        "truncated-zip",
        r"\[Errno 22\] Invalid argument",
        "From torch.load() this means a zip without its end, cut short in its first part.",
        _AGAIN,
        CHECK,
    ),
    Entry(
        "empty",
        r"EOFError|Ran out of input|pickle data was truncated",
        "The file is empty or ends in its first part: the disk was full, or a save or download was cut short.",
        _AGAIN,
        CHECK,
    ),
    Entry(
        "disk-full",
        r"PytorchStreamWriter failed|unexpected pos \d+ vs \d+|No space left on device|Disk quota exceeded",
        "The disk or its quota was full while a file was written: what is there now is cut short.",
        "Free some space and save again; 'check' says what of the file is whole.",
        CHECK,
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
        "Replace files by writing beside them and renaming, as 'ckptool migrate' does; load with mmap=False.",
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
        "Update torch, or save the file again with an older torch.",
    ),
    Entry(
        "newer-torch",
        r"Can't get attribute '(\w+)' on <module '(torch[\w.]*)'|module '(torch[\w.]*)' has no attribute '(\w+)'",
        "{0}{3} is not in {1}{2} of this torch: the file, or the code, was written for another release.",
        "Update torch, or rewrite the file in a form that every release reads.",
        WEIGHTS,
    ),
    Entry(
        "zip-in-old-torch",
        r"is a zip archive \(did you mean to use torch\.jit\.load|Only one file\(not dir\) is allowed in the zipfile",
        "A torch before 1.6 does not know the zips that torch.save() writes since then; or the file is TorchScript.",
        "Update torch; for TorchScript use torch.jit.load(). See which it is.",
        INSPECT,
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
        "Rewrite it as a zip.",
        "ckptool migrate FILE",
    ),
    Entry(
        "untyped-legacy",
        r"'torch\.storage\.UntypedStorage' has no attribute 'dtype'",
        "The file is a stream with untyped storages, which torch.load() cannot read with weights_only=True.",
        "Rewrite it as a zip.",
        "ckptool migrate FILE",
    ),
    Entry(
        "numpy",
        r"No module named 'numpy\._core|numpy\.core\.\w+",
        "The file holds numpy values from another major release of numpy: 2.0 moved numpy.core to numpy._core.",
        "Take the weights without them.",
        WEIGHTS,
    ),
    Entry(
        "python-2",
        r"'ascii' codec can't decode byte",
        "The file was pickled by Python 2, whose strings are bytes.",
        "Pass encoding='latin1' to torch.load(), or rewrite it.",
        WEIGHTS,
    ),
    Entry(
        "path",
        r"cannot instantiate '(PosixPath|WindowsPath)'",
        "The file holds a {0}, a path of another operating system.",
        _WITHOUT,
        WEIGHTS,
    ),
    # Classes
    Entry(
        "missing-class",
        r"Can't get attribute '(\w+)' on <module '(?!torch\b)([^']+)'|cannot import name '(\w+)' from '([^']+)'"
        # From Python 3.14 on:
        r"|module '(?!torch\b|numpy\b)(__main__|\w+\.[\w.]+)' has no attribute '([A-Z]\w+)'",
        "The file is a whole model, or holds one: it needs the class {0}{2}{5}, which {1}{3}{4} does not have.",
        "Take the weights without the class.",
        WEIGHTS,
    ),
    Entry(
        "no-torch",
        r"No module named '(torch|safetensors)'",
        "The package {0} is not installed in the Python that runs this.",
        "Install it there: python -m pip install {0}. To look at the file, ckptool does not need it.",
        INSPECT,
    ),
    Entry(
        "missing-module",
        r"No module named '(?!numpy\.|torch'|safetensors')([^']+)'",
        "The file holds objects of the package {0}, which is not installed or not on the path.",
        _WITHOUT,
        WEIGHTS,
    ),
    # safetensors
    Entry(
        "not-safetensors",
        r"header too (?:large|small)|HeaderTooLarge|HeaderTooSmall|InvalidHeaderDeserialization|invalid JSON in header",
        "The file is no safetensors file: it is empty, a web page, or a .pth under that name.",
        "Look at the file.",
        CHECK,
    ),
    Entry(
        "truncated-safetensors",
        r"incomplete metadata, file not|MetadataIncompleteBuffer|invalid header length|InvalidHeaderLength",
        "The safetensors file is cut short, or has bytes behind its last tensor.",
        _AGAIN,
        CHECK,
    ),
    Entry(
        "safetensors-metadata",
        r"does not contain the valid metadata",
        "The safetensors file does not say which framework its tensors are for.",
        "Write it again with ckptool, which adds that.",
        SAFETENSORS,
    ),
    Entry(
        "no-such-tensor",
        r"File does not contain tensor (\S+)",
        "The safetensors file has no tensor called {0}: it has another prefix, or the tensor is tied and under its "
        "other name.",
        "See which names it has.",
        INSPECT,
    ),
    Entry(
        "shared-tensors",
        r"Some tensors share memory",
        "Two names have one tensor, and safetensors holds each tensor once.",
        "Write the file with the ties recorded.",
        SAFETENSORS,
    ),
    Entry(
        "non-contiguous",
        r"You are trying to save a non contiguous tensor",
        "A tensor is a view with gaps, and safetensors holds packed ones.",
        "Write the file with it packed.",
        SAFETENSORS,
    ),
    Entry(
        "sparse",
        r"You are trying to save a sparse tensor",
        "safetensors has no sparse tensors.",
        "Make it dense with .to_dense(), or leave it out.",
        f"{SAFETENSORS} --drop-unsupported",
    ),
    Entry(
        "nested",
        r"Key `?(\S+?)`? is invalid, expected torch\.Tensor but received",
        "{0} is no tensor: a whole checkpoint, with more than the weights, was given to safetensors.",
        "Write the weights alone.",
        SAFETENSORS,
    ),
    Entry(
        "threads",
        r"_CURRENT_DESERIALIZER is already set",
        "torch.export.load() ran in two threads at once.",
        "Load in one thread, or behind a lock.",
    ),
)
