"""Messages that people paste: provoked where the installed libraries still give them, quoted where they do not."""

from __future__ import annotations

import gzip
import io
import json
import pathlib
import pickle
import shlex
import threading
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from time import process_time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from ckptool.checking.explain import entries, explain
from tests.device.tags import OfADevice
from tests.each import each
from tests.program import INVALID, VALID, invoke, run
from tests.scale import in_turn, times

LENET = (VALID / "lenet-state-dict-cpu-zip.pth").read_bytes()
STREAM = (VALID / "lstm-one-storage-cpu-legacy.pth").read_bytes()
SAFETENSORS = (VALID / "safetensors-float32-cpu.safetensors").read_bytes()


def message_of(action: Callable[[], object]) -> str:
    """Return what a person would paste: the last lines of a traceback."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception) as caught:
            action()
    return f"{type(caught.value).__name__}: {caught.value}"


def load(data: bytes, folder: Path, **options: object) -> object:
    path = folder / "x.pth"
    path.write_bytes(data)
    return torch.load(path, **options)  # type: ignore[arg-type]


def zipped(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def of_version(version: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(LENET)) as source, zipfile.ZipFile(buffer, "w") as archive:
        for entry in source.infolist():
            archive.writestr(entry.filename, version if entry.filename.endswith("/version") else source.read(entry))
    return buffer.getvalue()


def cut_safetensors(folder: Path, data: bytes) -> object:
    path = folder / "x.safetensors"
    path.write_bytes(data)
    return load_file(path)


ONES = torch.ones(3, 4)
LINEAR = nn.Linear(2, 3)
HTML = (INVALID / "html.pth").read_bytes()
POINTER = (INVALID / "lfs-pointer.pth").read_bytes()
UNSAFE = {"weights_only": False}

CONV = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2))
SGD = torch.optim.SGD(CONV.parameters(), lr=0.1, momentum=0.9)
CHECKPOINT = {"epoch": 3, "state_dict": CONV.state_dict(), "optimizer": SGD.state_dict()}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def two_groups() -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": CONV[0].parameters()}, {"params": CONV[1].parameters()}], lr=0.1)


def without(module: nn.Module, attribute: str) -> nn.Module:
    """Return a module as an older torch would have pickled it."""
    delattr(module, attribute)
    return module


def tensor_of(folder: Path, name: str) -> object:
    save_file({"a": ONES}, folder / "x.safetensors")
    with safe_open(folder / "x.safetensors", "pt") as opened:
        return opened.get_tensor(name)


PROVOKED: dict[str, tuple[str, Callable[[Path], object]]] = {
    "xpu": ("device-missing", lambda _: torch.load(VALID / "device-forged-xpu0-zip.pth")),
    "npu": ("device-unknown", lambda _: torch.load(VALID / "device-forged-npu0-zip.pth")),
    "warp": ("device-unknown", lambda _: torch.load(VALID / "device-forged-warp7-zip.pth")),
    "misspelt": ("device-unknown", lambda d: load(LENET, d, map_location="gpu")),
    "hpu": ("device-module", lambda _: torch.load(VALID / "device-forged-hpu-zip.pth")),
    "meta": ("meta", lambda _: torch.ones(2, device="meta").cpu()),
    "namespace": ("unsafe-global", lambda _: torch.load(VALID / "checkpoint-plain-cpu-zip.pth")),
    "os": ("blocked-module", lambda d: load(STREAM[:2] + b"cos\nsystem\n0" + STREAM[2:], d)),
    "torchscript": ("torchscript", lambda _: torch.load(VALID / "torchscript-script-cpu.pt")),
    "lfs": ("lfs-pointer", lambda d: load(POINTER, d)),
    "lfs, unsafe": ("lfs-pointer", lambda d: load(POINTER, d, **UNSAFE)),
    "html": ("html", lambda d: load(HTML, d)),
    "html, unsafe": ("html", lambda d: load(HTML, d, **UNSAFE)),
    "html after a line break": ("html", lambda d: load(b"\n" + HTML, d)),
    "html after a line break, unsafe": ("html", lambda d: load(b"\n" + HTML, d, **UNSAFE)),
    "json": ("json", lambda d: load(b'{"error": 404}', d)),
    "json, unsafe": ("json", lambda d: load(b'{"error": 404}', d, **UNSAFE)),
    "gzip": ("gzip", lambda d: load(gzip.compress(LENET), d)),
    "gzip, unsafe": ("gzip", lambda d: load(gzip.compress(LENET), d, **UNSAFE)),
    "7z": ("7z", lambda d: load(b"7z\xbc\xaf'\x1c" + bytes(50), d)),
    "7z, unsafe": ("7z", lambda d: load(b"7z\xbc\xaf'\x1c" + bytes(50), d, **UNSAFE)),
    "jpeg": ("image", lambda d: load(b"\xff\xd8\xff\xe0" + bytes(50), d)),
    "jpeg, unsafe": ("image", lambda d: load(b"\xff\xd8\xff\xe0" + bytes(50), d, **UNSAFE)),
    "png": ("image", lambda d: load(b"\x89PNG\r\n\x1a\n" + bytes(50), d)),
    "pickle": ("plain-pickle", lambda d: load(pickle.dumps({"a": 1}), d)),
    "pickle, unsafe": ("plain-pickle", lambda d: load(pickle.dumps({"a": 1}), d, **UNSAFE)),
    "zip of files": ("foreign-zip", lambda d: load(zipped(a=b"x", b=b"y"), d)),
    "exported program": ("foreign-zip", lambda _: torch.load(VALID / "export-cpu.pt2")),
    "cut zip": ("truncated-zip", lambda d: load(LENET[:100], d)),
    "longer cut zip": ("truncated-zip", lambda d: load(LENET[:20000], d)),
    "cut stream": ("truncated-legacy", lambda d: load(STREAM[:-500], d)),
    "empty": ("empty", lambda d: load(b"", d)),
    "empty, unsafe": ("empty", lambda d: load(b"", d, **UNSAFE)),
    "cut pickle": ("empty", lambda d: load(STREAM[:60], d, **UNSAFE)),
    "version": ("future-version", lambda d: load(of_version(b"11\n"), d)),
    "jit": ("not-torchscript", lambda d: torch.jit.load(VALID / "state-dict-plain-cpu-zip.pth")),
    "mmap": ("mmap-legacy", lambda d: load(STREAM, d, mmap=True)),
    "untyped": ("untyped-legacy", lambda _: torch.load(VALID / "every-dtype-cpu-legacy.pth")),
    "python 2": ("python-2", lambda _: pickle.loads(b"U\x04caf\xe9.")),
    "numpy": ("numpy", lambda _: pickle.loads(b"cnumpy._core.no_such_module\nscalar\n.")),
    "protocol": ("pickle-protocol", lambda d: load(b"\x80\x68" + bytes(90), d, **UNSAFE)),
    "pickle.load": ("persistent-id", lambda _: pickle.loads(b"\x80\x02X\x01\x00\x00\x00aQ.")),
    "no class": ("not-a-class", lambda _: pickle.loads(b"\x80\x02cos\ngetcwd\n)\x81.")),
    "no folder": ("no-folder", lambda d: torch.save({}, d / "absent" / "x.pth")),
    "type of tomorrow": ("element-type", lambda d: cut_safetensors(d, SAFETENSORS.replace(b'"F32"', b'"F33"'))),
    "no header": ("safetensors-header", lambda d: cut_safetensors(d, SAFETENSORS.replace(b'{"', b"{'", 1))),
    "path": ("path", lambda _: pathlib.WindowsPath("x")),
    "class": ("missing-class", lambda _: pickle.loads(b"c__main__\nNoSuchNet\n.")),
    "module": ("missing-module", lambda _: pickle.loads(b"cno_such_models.yolo\nModel\n.")),
    "eval": ("not-a-model", lambda _: OrderedDict(a=1).eval()),  # type: ignore[attr-defined]
    "a path": ("not-a-state-dict", lambda _: LINEAR.load_state_dict("x.pth")),  # type: ignore[arg-type]
    "parentheses": ("not-a-state-dict", lambda _: LINEAR.load_state_dict(LINEAR.state_dict)),  # type: ignore[arg-type]
    "data parallel": ("data-parallel", lambda _: nn.DataParallel(LINEAR).no_such_thing),
    "no safetensors": ("not-safetensors", lambda d: cut_safetensors(d, b"")),
    "html as safetensors": ("not-safetensors", lambda d: cut_safetensors(d, HTML)),
    "cut safetensors": ("truncated-safetensors", lambda d: cut_safetensors(d, SAFETENSORS[:-10])),
    "cut header": ("truncated-safetensors", lambda d: cut_safetensors(d, SAFETENSORS[:30])),
    "longer safetensors": ("truncated-safetensors", lambda d: cut_safetensors(d, SAFETENSORS + b"x")),
    "shared": ("shared-tensors", lambda d: save_file({"a": ONES, "b": ONES}, d / "x")),
    "strided": ("non-contiguous", lambda d: save_file({"a": ONES.t()}, d / "x")),
    "sparse": ("sparse", lambda d: save_file({"a": ONES.to_sparse()}, d / "x")),
    "nested": ("nested", lambda d: save_file({"a": {"b": ONES}}, d / "x")),  # type: ignore[dict-item]
    "shape": ("shape", lambda _: LINEAR.load_state_dict(nn.Linear(2, 4).state_dict())),
    "wrapped": ("keys-renamed", lambda _: LINEAR.load_state_dict(nn.DataParallel(LINEAR).state_dict())),
    "checkpoint": ("keys-nested", lambda _: nn.Sequential(LINEAR, LINEAR).load_state_dict({"model": {}, "epoch": 3})),
    "others": ("keys", lambda _: LINEAR.load_state_dict({"w": ONES, "b": ONES, "c.d": ONES})),
    "the whole checkpoint": ("keys-nested", lambda _: CONV.load_state_dict(CHECKPOINT)),
    "the whole checkpoint, one tensor": (
        "keys-nested",
        lambda _: nn.Conv2d(3, 2, 1, bias=False).load_state_dict(CHECKPOINT),
    ),
    "a key": ("no-such-entry", lambda _: CONV.load_state_dict(CHECKPOINT["model"])),
    "a tensor": ("no-such-entry", lambda _: CONV.state_dict()["0.weights"]),
    "groups": ("optimizer-groups", lambda _: SGD.load_state_dict(two_groups().state_dict())),
    "parameters": ("optimizer-parameters", lambda _: SGD.load_state_dict(optimizer_of(CONV[:1]).state_dict())),
    "old convolution": ("old-model", lambda _: without(nn.Conv2d(1, 1, 1), "padding_mode")(torch.ones(1, 1, 1, 1))),
    "old activation": ("old-model", lambda _: without(nn.GELU(), "approximate")(ONES)),
    "half and float": ("mixed-dtypes", lambda _: nn.Conv2d(3, 2, 1).half()(torch.ones(1, 3, 2, 2))),
    "half linear": ("mixed-dtypes", lambda _: nn.Linear(4, 2).half()(ONES)),
    "bfloat16 product": ("mixed-dtypes", lambda _: ONES.bfloat16() @ ONES.t()),
    "no file": ("no-file", lambda d: torch.load(d / "absent.pth")),
    "no file to map": ("no-file", lambda d: load_file(d / "absent.safetensors")),
    "a folder": ("folder", lambda d: torch.load(d)),
    "channels": ("channels", lambda _: nn.Conv2d(3, 64, 7)(torch.ones(1, 1, 9, 9))),
    "another size of image": ("input-size", lambda _: nn.Linear(400, 120)(torch.ones(1, 9216))),
    "no memory": ("some-memory", lambda _: torch.empty(1 << 60)),
    "no memory for Python": ("some-memory", lambda _: [0] * (1 << 60)),
    "no CUDA": ("no-cuda", lambda _: torch.ones(1, device="cuda")),
    "a model as a dict": ("whole-model", lambda _: LINEAR["state_dict"]),  # type: ignore[index]
    "a model's items": ("whole-model", lambda _: LINEAR.items()),
    "a dict that is called": ("not-a-model", lambda _: OrderedDict(a=1)(ONES)),  # type: ignore[operator]
    "a lambda": ("cannot-pickle", lambda d: torch.save({"f": lambda: 1}, d / "x")),
    "a lock": ("cannot-pickle", lambda d: torch.save({"f": threading.Lock()}, d / "x")),
    "read as text": ("opened-as-text", lambda _: (VALID / "lstm-one-storage-cpu-legacy.pth").read_text("utf-8")),
    "opened as a zip": ("not-a-zip", lambda _: zipfile.ZipFile(io.BytesIO(STREAM))),
    "a tensor of safetensors": ("no-such-tensor", lambda d: tensor_of(d, "lm_head.weight")),
    "another torch": ("newer-torch", lambda _: pickle.loads(b"ctorch._utils\n_rebuild_tensor_v9\n.")),
    "an attribute of another torch": ("newer-torch", lambda _: torch.float3),  # type: ignore[attr-defined]
}

QUOTED = {
    "RuntimeError: \"addmm_impl_cpu_\" not implemented for 'Half'": "half-on-cpu",
    "RuntimeError: \"addmm_impl_cpu_\" not implemented for 'Float8_e4m3fn'": "half-on-cpu",
    "Using `bitsandbytes` 4-bit quantization requires bitsandbytes: `pip install`": "quantized",
    "OSError: It looks like the config file at 'm.safetensors' is not a valid JSON file.": "file-as-folder",
    "HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/a'": "no-folder-here",
    "OSError: out is not a local folder and is not a valid model identifier listed on": "no-folder-here",
    "OSError: We couldn't connect to 'https://huggingface.co' to load the files": "no-folder-here",
    "OSError: You are trying to access a gated repo.": "no-folder-here",
    "The checkpoint you are trying to load has model type `x9` but Transformers does not recognize this architecture": (
        "new-architecture"
    ),
    "ValueError: Model architectures ['XForCausalLM'] are not supported for now.": "new-architecture",
    "ERROR:hf-to-gguf:Model XForCausalLM is not supported": "new-architecture",
    "error loading model architecture: unknown model architecture: 'x9'": "new-architecture",
    "ImportError: Loading an AWQ quantized model requires gptqmodel.": "quantized",
    "ModuleNotFoundError: No module named 'auto_gptq'": "quantized",
    "RuntimeError: No GPU found. A GPU is needed for quantization.": "quantized",
    "Unknown quantization type, got x - supported types are: ['awq']. Hence, we will skip": "quantized",
    "Quantization method specified in the model config (gptq) does not match the quantization method": "quantized",
    "ValueError: No valid checkpoint found in output directory (/out)": "no-weights-file",
    "AttributeError: 'Net' object has no attribute 'module'": "no-wrapper",
    "Cannot load X because a.w expected shape torch.Size([2]), but got torch.Size([3]).": "some-shape",
    "AssertionError: Attempted to load weight (torch.Size([2])) into parameter (torch.Size([3]))": "some-shape",
    "gguf_init_from_file: invalid magic characters 'PK'": "no-gguf",
    "modules.devices.NansException: A tensor with all NaNs was produced in Unet.": "values-nan",
    "IndexError: index out of range in self": "index",
    "explain CK206": "CK206",
    "ckptool.errors.AmbiguousWeights: gan.pth: several state dicts could be the weights": "which-weights",
    "WARNING:ckptool:not reloaded: model.pth: shapes differ: fc.weight [7, 16], the model has": "not-reloaded",
    "RuntimeError: Unknown builtin op: torch_scatter::segment_sum_csr.": "unknown-operator",
    "Could not run 'aten::empty_strided' with arguments from the 'XLA' backend.": "device-operator",
    "OSError: The paging file is too small for this operation to complete. (os error 1455)": "paging-file",
    'File "torch/optim/adam.py", line 9, in step\nThe size of tensor a (2048) must match the size of tensor b (7)': (
        "optimizer-order"
    ),
    "No such file or directory: '/c/iter_0000100/mp_rank_00/model_optim_rng.pt'": "megatron-ranks",
    "ValueError: Size mismatch between saved torch.Size([2]) and current: torch.Size([3]) for w": "dcp-size",
    "AssertionError: Loading a checkpoint for MP=2 but world size is 1": "model-parallel",
    "The checkpoint being loaded used a DP world size of 4 but the current world size is 2.": "zero-world-size",
    "ValueError: Unable to find 'latest' file at /c/latest": "zero-latest",
    "FileNotFoundError: can't find *_optim_states.pt files in directory '/c'": "zero-files",
    "ValueError: Expected 1 of '*_optim_states.pt' under './global_step5' but found 4 files.": "zero-files",
    "No such file or directory: '/c/zero_pp_rank_4_mp_rank_00_optim_states.pt'": "zero-rank",
    "KeyError: 'Trying to restore optimizer state but checkpoint contains only the model. This is": "weights-alone",
    "Cannot load model parameters from checkpoint x.pt; please ensure that the architectures match.": (
        "fairseq-architecture"
    ),
    "Restored from /c/last.ckpt with 125 missing and 686 unexpected keys": "restored-partly",
    "Could not deserialize object lr_schedule. Consider using `custom_objects` argument": "sb3-object",
    "X LOAD REPORT from: /m\nKey | Status |\nscore.weight | MISSING |\nlm_head.weight | UNEXPECTED |": "load-report",
    "Some weights of X were not initialized from the model checkpoint at /m and are newly initialized: ['score.w']": (
        "load-report"
    ),
    "Some weights of the model checkpoint at /m were not used when initializing X: ['lm_head.weight']": "load-report",
    "Error no file named model.safetensors, or pytorch_model.bin, found in directory /m.": "no-weights-file",
    "/m does not appear to have a file named pytorch_model.bin, model.safetensors": "no-weights-file",
    "ValueError: Can't find a valid checkpoint at /c/checkpoint-5": "no-weights-file",
    "OSError: Unable to load weights from pytorch checkpoint file for '/m' at '/m/pytorch_model.bin'.": (
        "unreadable-weights"
    ),
    "The state dictionary of the model you are trying to load is corrupted. Are you sure": "mixed-prefixes",
    "ValueError: weight is on the meta device, we need a `value` to put in on cpu.": "no-value",
    "Found missing adapter keys while loading the checkpoint: ['a.lora_A.default.weight']": "adapter-keys",
    "Target modules {'query'} not found in the base model. Please check the target modules": "adapter-modules",
    "ValueError: Can't find 'adapter_config.json' at '/c'": "adapter-settings",
    "TypeError: LoraConfig.__init__() got an unexpected keyword argument 'corda_config'": "adapter-argument",
    "Unexpected keyword arguments ['corda_config'] for class LoraConfig, these are ignored.": "adapter-argument",
    "ERROR:lora-to-gguf:Unexpected name 'a.lm_head.weight': Not a lora_A or lora_B tensor": "adapter-tensors",
    "lora key not loaded: base_model.model.x.lora_A.weight": "lora-layers",
    "Loading adapter weights from state_dict led to unexpected keys not found in the model: ['x.y']": "lora-layers",
    "No LoRA keys associated to CLIPTextModel found with the prefix='text_encoder'.": "lora-component",
    "RuntimeError: ERROR: Could not detect model type of: /m/x.safetensors": "model-type",
    "RuntimeError: ERROR: clip input is invalid: None": "no-component",
    "done_getting_tensors: wrong number of tensors; expected 403, got 363": "gguf-tensors",
    "llama.cpp error: 'create_tensor: tensor 'output.weight' not found'": "gguf-tensors",
    "AssertionError: You do not have CLIP state dict!": "no-component",
    "Object shard /m/a._extra_state/shard_0_80.pt not found": "extra-state",
    "missing {'a.logit_scale'}\nleft over keys: dict_keys(['a.position_ids'])": "left-over",
    "Cannot load <class 'X'> from /m because the following keys are missing: \n a.b, c.d. \n Please": "missing-tensors",
    "There is no module or parameter named 'lm_head' in Gemma2ForCausalLM": "no-such-module",
    "RuntimeError: Cannot find any model weights with `/models/x`": "no-weights-file",
    "ValueError: Can not map tensor 'model.layers.0.mlp.down_proj.qweight'": "gguf-names",
    "Supplied state dict for a.weight does not contain `bitsandbytes__*` and possibly other": "quantized",
    "Error: File does not contain root module or state dictionary.": "no-state-dict",
    "KeyError: 'F8_E8M0'": "element-type",
    "TypeError: Net.__init__() missing 2 required positional arguments: 'a' and 'b'": "no-arguments",
    "Model has been downloaded but the SHA256 checksum does not match.": "hash",
    "Detected pickle protocol 104 in the checkpoint": "pickle-protocol",
    "Attempting to deserialize object on a CUDA device": "some-device",
    "Can't get attribute 'Net'": "some-class",
    "AttributeError: module '__main__' has no attribute 'Net'": "missing-class",
    "AttributeError: module 'models.yolo' has no attribute 'Model'": "missing-class",
    "Missing key(s) in state_dict": "some-keys",
    "Missing key(s) in state_dict: conv1.weight. Unexpected key(s): module.conv1.weight": "keys-renamed",
    "size mismatch for fc.weight": "some-shape",
    "PytorchStreamReader failed": "some-damage",
    "Killed": "some-memory",
    "RuntimeError: out of memory": "some-memory",
    "RuntimeError: CUDA error: invalid device ordinal": "device-ordinal",
    "FileNotFoundError: [Errno 2] No such file or directory: '/c/pytorch_model_fsdp_0/.metadata'": "dcp-index",
    "line 250, in local_step\n    assert metadata is not None\nAssertionError": "dcp-index",
    "Value not in list: ckpt_name: 'v1-5-pruned.safetensors' not in []": "not-in-list",
    "ValueError: Unrecognized model in /m. Should have a `model_type` key in its config.json": "no-config",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total": "memory-device",
    "RuntimeError: CUDA error: out of memory": "memory-device",
    'File "train.py", line 9\n    loss.backward()\ntorch.OutOfMemoryError: CUDA out of memory.': "memory-training",
    'File "a.py"\n    m = torch.load("x.pth")\ntorch.cuda.OutOfMemoryError: CUDA out of memory.': "memory-loading",
    "SourceChangeWarning: source code of class 'torch.nn.modules.conv.Conv2d' has changed.": "source-changed",
    "FutureWarning: You are using `torch.load` with `weights_only=False` (the current default": "weights-only-warning",
    "TypeError: 'weights_only' is an invalid keyword argument for Unpickler()": "weights-only-unknown",
    "TypeError: load() got an unexpected keyword argument 'weights_only'": "weights-only-unknown",
    "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same": "mixed-devices",
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!": "mixed-devices",
    "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same": "mixed-devices",
    "Input type (torch.cuda.FloatTensor) and weight type (torch.cuda.HalfTensor) should be the same": "mixed-dtypes",
    "Input type (float) and bias type (c10::Half) should be the same": "mixed-dtypes",
    "RuntimeError: expected scalar type Half but found Float": "mixed-dtypes",
    "ModuleAttributeError: 'BatchNorm2d' object has no attribute 'num_batches_tracked'": "old-model",
    "_IncompatibleKeys(missing_keys=['fc.weight'], unexpected_keys=['module.fc.weight'])": "keys-renamed",
    "KeyError: 'unexpected key \"module.encoder.weight\" in state_dict'": "keys-renamed",
    "[enforce fail at inline_container.cc:603] . PytorchStreamWriter failed writing file data/3": "disk-full",
    "OSError: [Errno 28] No space left on device": "disk-full",
    "size mismatch for a.w: copying a param with shape torch.Size([0]) from checkpoint, the shape in current model is "
    "torch.Size([8]).": "stub",
    "size mismatch for a.w: copying a param with shape torch.Size([8]) from checkpoint, the shape in current model is "
    "torch.Size([0]).": "model-stub",
    "AttributeError: 'NoneType' object has no attribute 'get'": "no-framework",
    "PermissionError: [Errno 13] Permission denied: 'x.pth'": "not-permitted",
    "ModuleNotFoundError: No module named 'torch'": "no-torch",
    "RuntimeError: storage has wrong size: expected 0 got 64": "some-damage",
    "Attempting to deserialize object on CUDA device 3 but torch.cuda.device_count() is 1. Please use": "device-number",
    "RuntimeError: torch.UntypedStorage(): Storage device not recognized: mps": "device-unknown",
    "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False.": "device-missing",
    "Cannot use ``weights_only=True`` with files saved in the legacy .tar format.": "old-tar",
    "we now require users to upgrade torch to at least v2.6 in order to use the function": "torch-too-old",
    'RuntimeError: invalid hash value (expected "19c8e357", got "0c16…")': "hash",
    "worker died with exit code: 135": "mapped",
    "OSError: … (os error code: 1224)": "mapped",
    "Only one file(not dir) is allowed in the zipfile": "zip-in-old-torch",
    "x.pth is a zip archive (did you mean to use torch.jit.load()?)": "zip-in-old-torch",
    "ModuleNotFoundError: No module named 'numpy._core'": "numpy",
    "SafetensorError: Error while deserializing header: MetadataIncompleteBuffer": "truncated-safetensors",
    "SafetensorError: Error while deserializing header: HeaderTooLarge": "not-safetensors",
    "OSError: The safetensors archive passed at x does not contain the valid metadata.": "safetensors-metadata",
    "AssertionError: _CURRENT_DESERIALIZER is already set": "threads",
    "_pickle.UnpicklingError: invalid load key, '\\xe8'.": "not-a-pickle",
    "PytorchStreamReader failed reading file data/7: file read failed": "zip-reader",
    "Weights only load failed. Something new": "weights-only",
}


@each("case", PROVOKED)
def test_a_message_of_the_libraries_is_explained(case: str, tmp_path: Path) -> None:
    kind, action = PROVOKED[case]
    message = message_of(lambda: action(tmp_path))

    assert [one.kind for one in explain(message)] == [kind], message


@each("text", QUOTED)
def test_a_message_that_is_only_quoted_is_explained(text: str) -> None:
    assert [one.kind for one in explain(text)] == [QUOTED[text]]


def in_lines(text: str, width: int = 80) -> str:
    """Return what a terminal shows of a text, and what is copied from it."""
    return "\n".join(line[at : at + width] for line in text.splitlines() for at in range(0, len(line) or 1, width))


TRACEBACK = """Traceback (most recent call last):
  File "/home/me/train.py", line 12, in <module>
    main(sys.argv)
"""
LONG = (
    (
        "RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False. If "
        "you are running on a CPU-only machine, please use torch.load with map_location=torch.device('cpu')."
    ),
    "RuntimeError: don't know how to restore data location of torch.storage.UntypedStorage (tagged with npu:0)",
    "RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "
    + ", ".join(f'"layers.{number}.weight"' for number in range(9))
    + ". \n\tUnexpected key(s) in state_dict: "
    + ", ".join(f'"module.layers.{number}.weight"' for number in range(9))
    + ". ",
)
UNLIKE = ("Missing key(s) in state_dict", "Killed")
"""Names without quotes, whose list is its line; and what stands alone."""
AROUND: dict[str, Callable[[str], str]] = {
    "a traceback": lambda text: f"{TRACEBACK}{text}\n",
    "a log": lambda text: f"2026-11-27 18:50:33,123 - trainer - ERROR - it failed\n{TRACEBACK}{text}\n",
    "timestamps": lambda text: "\n".join(f"2026-11-27T18:50:33.12Z stderr F {line}" for line in text.splitlines()),
    "ranks": lambda text: "\n".join(f"[rank3]: {line}" for line in f"{TRACEBACK}{text}".splitlines()),
    "a terminal": lambda text: in_lines(TRACEBACK + text),
    "JSON": lambda text: json.dumps({"level": "error", "message": f"{TRACEBACK}{text}\n", "rank": 0}),
    "quotes": lambda text: repr(f"{TRACEBACK}{text}\n"),
    "Windows": lambda text: f"{TRACEBACK}{text}\n".replace("\n", "\r\n"),
}


@pytest.mark.parametrize("around", AROUND)
def test_a_message_is_found_in_what_is_printed_around_it(around: str) -> None:
    for text in (*QUOTED, *LONG):
        if text.startswith(UNLIKE):
            continue
        kinds = [one.kind for one in explain(text)]
        found = [one.kind for one in explain(AROUND[around](text))]
        assert kinds
        assert kinds[0] in found, text


def test_every_entry_has_a_message() -> None:
    tested = {kind for kind, _ in PROVOKED.values()} | set(QUOTED.values())

    assert {entry.kind for entry in entries()} <= tested


def test_the_numbers_of_a_message_are_in_its_explanation() -> None:
    (one,) = explain(message_of(lambda: LINEAR.load_state_dict(nn.Linear(2, 4).state_dict())))

    assert one.meaning.startswith("weight is torch.Size([4, 2]) in the file and torch.Size([3, 2]) in the model")


def test_the_hint_for_keys_names_the_options() -> None:
    (one,) = explain(message_of(lambda: LINEAR.load_state_dict(nn.DataParallel(LINEAR).state_dict())))

    assert one.command == "ckptool migrate FILE --form state_dict --strip-module"


def test_what_torch_says_of_a_device_that_is_not_here_is_explained(of_a_device: OfADevice) -> None:
    for path in (of_a_device.file(), of_a_device.file(container="legacy")):
        (one,) = explain(message_of(lambda path=path: torch.load(path)), path)  # type: ignore[misc]
        assert one.kind.startswith("device-")
        words = shlex.split(str(one.command))
        assert words[:3] == ["ckptool", "migrate", str(path)]
        assert words[words.index("--to") + 1] == "cpu"


@pytest.mark.parametrize("text", ["", "hello", "x" * 200_000, "a killed process"])
def test_what_is_no_known_message_is_said_to_be_none(text: str) -> None:
    assert explain(text) == ()


def test_the_command_explains_and_says_by_its_exit_code_whether_it_could() -> None:
    text = message_of(lambda: torch.load(VALID / "device-forged-npu0-zip.pth"))
    result = run("check", "--explain", text)
    assert result.stdout.startswith("device-unknown: torch knows no device called 'npu:0'")
    piped = invoke(["check", "--explain", "-", "--json"], input=text)
    assert json.loads(piped.stdout)["explanations"][0]["kind"] == "device-unknown"
    assert invoke(["check", "--explain", "hello"]).exit_code == 1


def test_a_heading_without_end_is_no_trouble() -> None:
    assert [one.kind for one in explain('Missing key(s) in state_dict: "' * 10_000)] == ["some-keys"]


FILLERS = [*"a1./'\"([", "a.", "a_", "a ", "a,", '"a', "\\n", "a:", "a.b", "w, ", "_ ", "a" * 999 + "!"]


@each("filler", FILLERS)
def test_a_long_text_takes_little_time_whatever_is_in_it(filler: str) -> None:
    nbytes = times(1 << 16, 1 << 20)
    text = f"Missing key(s) in state_dict: : {filler * nbytes}"[:nbytes]
    started = process_time()
    invoke(["explain", "-"], input=text)
    assert process_time() - started < 1 + 8 * nbytes / (1 << 20)  # for each name a walk through all: minutes


NO_ENTRY = "KeyError: 'state_dict'"
KINDS = VALID / "checkpoint-plain-cpu-zip.pth", VALID / "state-dict-plain-cpu-zip.pth", INVALID / "html.pth"


@each(("text", "path"), in_turn(PROVOKED, KINDS))
def test_every_message_can_be_asked_about_a_file_and_each_kind_of_file(text: str, path: Path, tmp_path: Path) -> None:
    kind, action = PROVOKED[text]
    for one in explain(message_of(lambda: action(tmp_path)), path):
        assert one.in_file
        assert " FILE" not in (one.command or "")
        assert one.kind == kind


def test_a_file_that_cannot_be_opened_is_the_cause() -> None:
    (one,) = explain("EOFError: Ran out of input", INVALID / "html.pth")

    assert one.in_file is not None
    assert one.in_file.startswith("not a checkpoint: ")


def test_the_command_looks_into_one_file() -> None:
    path = str(VALID / "checkpoint-plain-cpu-zip.pth")
    found = json.loads(invoke(["check", "--json", "--explain", NO_ENTRY, path]).stdout)
    assert found["path"] == path
    assert "the weights are under " in found["explanations"][0]["in_file"]
    shown = invoke(["check", "--explain", NO_ENTRY, path]).stdout.splitlines()
    assert shown[1] == f"{path}: {found['explanations'][0]['in_file']}"
    assert shown[-1] == f"Run: {found['explanations'][0]['command']}"
    assert invoke(["check", "--explain", NO_ENTRY, path, path]).exit_code == 2
    assert isinstance(invoke(["check", "--explain", NO_ENTRY, "absent.pth"]).exception, SystemExit)


def test_a_message_that_lists_no_unexpected_names_takes_none_from_the_model(tmp_path: Path) -> None:
    # The model has conv1, too: what is called head in it is not there.
    weights = {"conv1.weight": torch.ones(4, 3), "conv1.bias": torch.ones(4), "layers.0.w": torch.ones(1)}
    torch.save(weights, tmp_path / "a.pth")
    done = invoke(["explain", 'Missing key(s) in state_dict: "head.weight", "head.bias".', str(tmp_path / "a.pth")])

    assert "migrate" not in done.output


def test_a_folder_and_an_index_are_said_to_be_loaded_whole(tmp_path: Path) -> None:
    save_file({"a.weight": ONES}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b.weight": ONES}, tmp_path / "model-00002-of-00002.safetensors")
    places = {name: f"model-0000{number}-of-00002.safetensors" for name, number in (("a.weight", 1), ("b.weight", 2))}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))

    texts = ("IsADirectoryError: [Errno 21] Is a directory: 'x'", "_pickle.UnpicklingError: invalid load key, '{'.")
    for text, path in zip(texts, (tmp_path, index), strict=True):
        (found,) = explain(text, path)
        assert "in more than one file" in str(found.in_file)
        assert "ckptool.load_into(" in str(found.hint)
        assert "ckptool migrate " in str(found.command)


def test_a_code_of_a_finding_is_explained_with_what_a_file_has_of_it(tmp_path: Path) -> None:
    torch.save({f"module.{name}": one for name, one in CONV.state_dict().items()}, tmp_path / "a.pth")
    (found,) = explain("CK301", tmp_path / "a.pth")
    assert "put a prefix in front of every name" in found.meaning
    assert "module." in str(found.in_file)
    assert "docs/check.md" in str(found.hint)
    assert found.command == f"ckptool check {tmp_path / 'a.pth'}"

    (found,) = explain("ckptool.errors.KeyMismatch: a.pth: 2 of 9 names are missing", tmp_path / "a.pth")
    assert "nothing in it explains this" not in str(found.in_file)
