"""
Messages of what uses a checkpoint, as data: models, optimizers, devices, memory; and those that say too little.

The texts are those of torch and Python; tests provoke the ones that the installed releases still give.
"""

from __future__ import annotations

from ckptool.checking.explain.keys import CHECK, DEVICES, FIT, INSPECT, TO_CPU, WEIGHTS, Entry
from ckptool.checkpoints.completeness import MERGE_PARTITIONS

_TRAINING = r"\.backward\(|\.step\(|autograd|criterion|loss"
_LOADING = r"torch\.load\(|load_state_dict|serialization\.py|from_pretrained|load_file\(|_rebuild_|map_location"
_GPU_FULL = r"OutOfMemoryError|(?:CUDA|HIP|XPU|MPS|NPU)(?: backend)?(?: error:)? out of memory"
_HOST_FULL = r"(?i:^\W*killed\W*$|cannot allocate memory|can't allocate memory)|\bMemoryError\b"
_OLD_ATTRIBUTES = (
    "padding_mode|num_batches_tracked|track_running_stats|approximate|recompute_scale_factor|proj_size|batch_first|"
    "_reversed_padding_repeated_twice|_padding_repeated_twice|_non_persistent_buffers_set|_is_full_backward_hook|"
    "_flat_weights|_flat_weights_names|_state_dict_pre_hooks|_load_state_dict_post_hooks|_backward_pre_hooks|"
    r"_forward_hooks_with_kwargs|_forward_pre_hooks_with_kwargs|divisor_override|output_padding|_qkv_same_embed_dim"
)
_DICT = r"'(?:collections\.OrderedDict|OrderedDict|dict)' object"

USING: tuple[Entry, ...] = (
    # What was loaded is something else
    Entry(
        "not-a-model",
        rf"{_DICT} (?:has no attribute '(?:eval|train|cuda|cpu|to|half|float|parameters|named_parameters|"
        r"load_state_dict|state_dict|module|modules|forward|fuse)'|is not callable)",
        "What was loaded is a state_dict or a checkpoint, weights by name, and is used as if it were the model.",
        "Build the model and call model.load_state_dict() with its weights.",
        INSPECT,
    ),
    Entry(
        "not-a-state-dict",
        r"Expected state_dict to be dict-like, got <class '([^']+)'>",
        "load_state_dict() wants a dict of tensors and got {0}: a path, a whole model, or state_dict without its "
        "parentheses.",
        "Load the file first; see what is in it.",
        INSPECT,
    ),
    Entry(
        "whole-model",
        r"'(?!NoneType')([A-Z]\w+)' object (?:is not subscriptable|has no attribute '(?:keys|items|copy|get|pop)')",
        "What was loaded is a whole model, a {0}, and is used as if it were a dict of weights.",
        "Call .state_dict() on it, or take its weights without the class.",
        WEIGHTS,
    ),
    Entry(
        "data-parallel",
        r"'(?:DataParallel|DistributedDataParallel)' object has no attribute '(\w+)'",
        "The model is wrapped for several GPUs; {0} belongs to the model inside.",
        "Use model.module, or write a file without the wrapper.",
        "ckptool migrate FILE --strip-module",
    ),
    Entry(
        "old-model",
        rf"'(\w+)' object has no attribute '({_OLD_ATTRIBUTES})'",
        "The file is a whole model that another release of torch saved: its {0} has no {1} because that release did "
        "not give it one.",
        "Build the model with this torch, and load the weights alone into it.",
        WEIGHTS,
    ),
    Entry(
        "source-changed",
        r"SourceChangeWarning|source code of class '[^']+' has changed",
        "A warning, no error: the file is a whole model that carries the source of its classes, and their source here "
        "is different.",
        "If the model behaves as it should, ignore it; else load the weights alone into a model of today's code.",
        WEIGHTS,
    ),
    Entry(
        "cannot-pickle",
        r"PicklingError|Can't (?:pickle|get local object)|cannot pickle '([^']+)' object",
        "torch.save() was given something that cannot be pickled, such as a model with a lambda, a class inside a "
        "function, a lock or an open file in it.",
        "Save the weights alone: torch.save(model.state_dict(), path).",
    ),
    Entry(
        "meta",
        r"Cannot copy out of meta tensor",
        "A tensor has a shape and no values: the model was built on the meta device, or was saved before its weights "
        "were loaded.",
        "Load weights into it with assign=True, or after model.to_empty(device=…); see which have none.",
        INSPECT,
    ),
    # Optimizers
    Entry(
        "optimizer-groups",
        r"loaded state dict has a different number of parameter groups",
        "The optimizer that was saved has more or fewer parameter groups than this one.",
        "Make the optimizer with the same groups as in training, or load the weights alone and begin with a new one.",
        f"{INSPECT} --all",
    ),
    Entry(
        "optimizer-parameters",
        r"loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
        "The optimizer that was saved has more or fewer parameters in a group than this one: layers were frozen, "
        "added or left out.",
        "Make the optimizer with the same parameters as in training, or load the weights alone and begin with a new "
        "one.",
        f"{INSPECT} --all",
    ),
    # Shapes
    Entry(
        "stub",
        r"[Ss]hape (?:of )?torch\.Size\(\[0\]\)",
        "A tensor of the file has no elements: training with DeepSpeed's ZeRO-3 leaves such stubs, and the values of "
        "these weights are in other files.",
        MERGE_PARTITIONS,
        CHECK,
    ),
    Entry(
        "model-stub",
        r"the shape in current model is torch\.Size\(\[0\]\)",
        "A tensor of the model has no elements: DeepSpeed's ZeRO-3 has partitioned the model before it was filled.",
        "Load the weights before the model is partitioned, or inside deepspeed.zero.GatheredParameters.",
    ),
    Entry(
        "shape",
        r"size mismatch for (\S{1,1000}): copying a param with shape (?!torch\.Size\(\[0\]\))(.{1,200}?) "
        r"from checkpoint, the shape in .{0,40}? is (?!torch\.Size\(\[0\]\))([^\n]{0,200}\))",
        "{0} is {1} in the file and {2} in the model: it was built with other sizes, often another number of classes.",
        "Build it with the sizes of the file, or leave these out.",
        FIT,
    ),
    Entry(
        "channels",
        r"weight of size (\[[^\]]*\]), expected input(\[[^\]]*\]) to have (\d+) channels, but got (\d+)",
        "A convolution with a weight of {0} takes {2} channels, and the input {1} has {3}: the data is in grey "
        "instead of colour or the other way round, its axes are in another order, or the file was trained on other "
        "data.",
        "Give it the kind of data that it was trained on: its first layer shows which.",
        INSPECT,
    ),
    Entry(
        "input-size",
        r"mat1 and mat2 shapes cannot be multiplied \((\d+x\d+) and (\d+x\d+)\)",
        "A linear layer takes other inputs than it got, {0} times {1}: images of another size, or a model built with "
        "other sizes than the file's.",
        "Give it inputs of the size that it was trained on.",
        INSPECT,
    ),
    # Types and devices while computing
    Entry(
        "mixed-devices",
        r"Input type \(torch\.(?:cuda\.\w+\) and \w+ type \(torch\.(?!cuda)|(?!cuda)\w+\) and \w+ type \(torch\.cuda)"
        r"|Expected all tensors to be on the same device|Expected object of (?:device type|backend) \w+ but got"
        r"|module must have its parameters and buffers on device",
        "The model and its input are on two devices: loading weights does not move a model, nor its input.",
        "Move both: model.to(device) and input.to(device).",
    ),
    Entry(
        "mixed-dtypes",
        r"Input type \((?:torch\.cuda\.(\w+)\) and \w+ type \(torch\.cuda\.(\w+)"
        r"|(?!torch\.cuda)(\S+)\) and \w+ type \((?!torch\.cuda)(\S+))\) should be the same"
        r"|expected scalar type (\w+) but found (\w+)|must have the same dtype, but got (\w+) and (\w+)"
        r"|expected m1 and m2 to have the same dtype, but got: (\S+) != (\S+)",
        "{0}{2}{4}{6}{8} and {1}{3}{5}{7}{9} meet: the model has one type, perhaps from a file in half "
        "precision, and its input another.",
        "Cast one of them (model.float(), or input.to(model.dtype)), or the file.",
        f"{WEIGHTS} --dtype float32",
    ),
    Entry(
        "no-cuda",
        r"Torch not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs are available|CUDA driver version is",
        "torch was asked for a CUDA device, and sees none.",
        "See why.",
        DEVICES,
    ),
    # Memory
    Entry(
        "memory-training",
        _GPU_FULL,
        "The memory of the GPU was full while training: activations, gradients and the optimizer's state take several "
        "times what the weights take.",
        "Take smaller batches, gradient checkpointing or mixed precision; the file is not the cause.",
        beside=_TRAINING,
    ),
    Entry(
        "memory-loading",
        _GPU_FULL,
        "The memory of the GPU was full while loading: torch.load() puts every tensor back on the device that it was "
        "saved on, the optimizer's too, beside the model that is there.",
        "Pass map_location='cpu', or rewrite the device tags in the file; ckptool.load_into(model, FILE) never has two "
        "copies.",
        f"{WEIGHTS} --to cpu",
        beside=_LOADING,
    ),
    Entry(
        "memory-device",
        _GPU_FULL,
        "The memory of the GPU was full. In training, activations, gradients and the optimizer's state fill it. "
        "In loading, torch.load() puts every tensor back on the device that it was saved on.",
        "In training, take smaller batches. In loading, pass map_location='cpu', or rewrite the device tags in the "
        "file.",
        f"{WEIGHTS} --to cpu",
    ),
    Entry(
        "some-memory",
        _HOST_FULL,
        "The process needed more memory than there was. In loading, torch.load() needs the file's size, and the "
        "model's again; in training, it may be the data.",
        "Load with ckptool.load_into(model, FILE), which never has two copies, or halve the file.",
        f"{WEIGHTS} --dtype bfloat16",
    ),
)

GENERAL: tuple[Entry, ...] = (
    Entry(
        "no-such-entry",
        r"KeyError: ['\"]([^'\"\n]+)['\"]",
        "The code takes {0!r} out of a dict that has no such entry. If the dict was loaded from a file, the file has "
        "the weights under another name, is a plain state_dict itself, or has other names for its tensors.",
        "See what it holds, and take that.",
        INSPECT,
    ),
    Entry(
        "not-a-pickle",
        r"Unsupported operand (\d+)|invalid load key, '(.+?)'",
        "The file is none that torch.save() wrote: its first bytes are no pickle and no zip; a safetensors file under "
        "another name looks like this.",
        "Look at the file.",
        CHECK,
    ),
    Entry(
        "zip-reader",
        r"PytorchStreamReader failed (\w[\w ]+)",
        "The zip cannot be read: it is damaged, or is not a checkpoint.",
        "See which.",
        f"{CHECK} --deep",
    ),
    Entry(
        "weights-only",
        r"Weights only load failed",
        "The file holds more than tensors and plain values, or is no checkpoint at all.",
        "Look at the file.",
        CHECK,
    ),
    Entry(
        "no-file",
        r"FileNotFoundError|No such file or directory(?:: '?([^'\n]+))?",
        "There is no file of that path. A path that does not begin with / is looked for in the folder in which the "
        "process was started.",
        "Print os.getcwd() beside it, or give the whole path.",
    ),
    Entry(
        "folder",
        r"IsADirectoryError|\[Errno 21\]",
        "The path is a folder, and torch.load() reads one file.",
        "Name the file in it; 'check' names those that it can open.",
        CHECK,
    ),
    Entry(
        "no-framework",
        r"'NoneType' object has no attribute 'get'",
        "Something is None where a dict was expected: transformers says so of a safetensors file without metadata.",
        "See what metadata it has; writing it again adds what is missing.",
        "ckptool migrate FILE --form safetensors",
    ),
    Entry(
        "not-permitted",
        r"PermissionError|\[Errno 13\]",
        "This user may not read the file, or not write into the folder.",
        "Ask 'ls -l' whose it is; a file is made readable by chmod u+r.",
    ),
)
"""Messages that say too little, or that are part of others: used if no specific entry matches."""

FRAGMENTS: tuple[Entry, ...] = (
    Entry(
        "some-device",
        r"(?i)deserialize object on|cuda\.is_available\(\) is False",
        "The tensors were saved on a device that is not here.",
        "Pass map_location='cpu', or rewrite the device tags in the file. 'ckptool devices' says why there is none.",
        TO_CPU,
    ),
    Entry(
        "some-class",
        r"Can't get attribute|No module named",
        "The file holds a whole model, and its class cannot be imported here.",
        "Take the weights without it.",
        WEIGHTS,
    ),
    Entry(
        "some-keys",
        r"(?i)(?:missing|unexpected) keys?\b",
        "The names in the file are not those of the model.",
        "Compare the file with the class.",
        FIT,
    ),
    Entry(
        "some-shape",
        r"size mismatch for ([\w.]+)",
        "{0} has another shape in the file than in the model: the model was built with other sizes.",
        "See both.",
        FIT,
    ),
    Entry(
        "some-damage",
        r"PytorchStreamReader|central directory|unexpected EOF|archive is corrupted|storage has wrong (?:byte )?size",
        "The file is damaged, cut short, or no checkpoint.",
        "See which.",
        f"{CHECK} --deep",
    ),
    Entry(
        "some-memory",
        r"(?i)out of memory",
        "There was too little memory, on the device or on the host.",
        "Load with ckptool.load_into(model, FILE), which never has two copies; in training, take smaller batches.",
    ),
)
"""Asked last, and in this order."""
