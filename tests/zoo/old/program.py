"""
What an old release of torch runs: it writes files and says what is in them, or reads files and says what is in them.

This runs under Python 3.6 with torch 1.0, and all that came later: nothing newer may be used here.

    python program.py write FOLDER      every file NAME.pt gets a NAME.pt.json beside it
    python program.py read FOLDER       prints what each .pt file in the folder holds, or why it cannot be opened
"""

import hashlib
import json
import os
import struct
import sys
import warnings
from collections import OrderedDict

import torch
from torch import nn

warnings.simplefilter("ignore")


def raw(tensor):
    """Return the bytes of a tensor's elements in row-major order."""
    tensor = tensor.detach().cpu()
    if getattr(tensor, "is_quantized", False):
        tensor = tensor.int_repr()
    tensor = tensor.contiguous()
    if str(tensor.dtype) == "torch.bfloat16":
        wide = tensor.float().numpy().tobytes()
        return b"".join(wide[place + 2 : place + 4] for place in range(0, len(wide), 4))
    return tensor.numpy().tobytes()


def said(tree, name="", found=None):
    """Return name -> [type, shape, digest] of all tensors of nested dicts, lists and modules."""
    found = OrderedDict() if found is None else found
    if isinstance(tree, torch.Tensor):
        if tree.is_sparse:
            said(tree._indices(), name + "[indices]", found)
            said(tree._values(), name + "[values]", found)
        else:
            kind = str(tree.dtype).replace("torch.", "")
            found[name] = [kind, list(tree.shape), hashlib.sha1(raw(tree)).hexdigest()]
    elif isinstance(tree, nn.Module) or isinstance(tree, torch.optim.Optimizer):
        said(tree.state_dict(), name, found)
    elif isinstance(tree, (dict, list, tuple)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            said(value, "%s.%s" % (name, key) if name else str(key), found)
    return found


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.lstm = nn.LSTM(3, 4, bidirectional=True)
        self.attention = nn.Linear(4, 4, bias=False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.attention.weight
        self.plain = torch.ones(3)


def modules():
    """Return modules by name."""
    made = OrderedDict()
    made["net"] = Net()
    made["sequential"] = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 2))
    made["parallel"] = nn.DataParallel(nn.Sequential(nn.Linear(3, 2)))
    made["embedding"] = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.EmbeddingBag(4, 3))
    made["lists"] = nn.ModuleDict(
        {"a": nn.ModuleList([nn.Linear(2, 2)]), "b": nn.ParameterList([nn.Parameter(torch.ones(2))])}
    )
    made["weight_norm"] = nn.utils.weight_norm(nn.Linear(3, 2))
    made["spectral_norm"] = nn.utils.spectral_norm(nn.Linear(3, 2))
    made["conv_transposed"] = nn.ConvTranspose1d(2, 3, 3)
    if hasattr(nn, "MultiheadAttention"):
        made["attention"] = nn.MultiheadAttention(4, 2)
    if hasattr(nn, "Transformer"):
        made["transformer"] = nn.Transformer(4, 2, 1, 1, 8)
    return made


def tensors():
    """Return every element type that this release has, and unusual layouts."""
    found = OrderedDict()
    for name, kind in sorted(vars(torch).items()):
        if isinstance(kind, torch.dtype) and "q" not in name and "complex32" not in name and "chalf" not in name:
            try:
                found[name] = torch.tensor([0, 1, 1, 0]).to(kind)
                raw(found[name])
            except Exception:
                found.pop(name, None)
    base = torch.arange(36.0).view(6, 6)
    views = {
        "whole": base,
        "turned": base.t(),
        "rows": base[2:4],
        "wide": base[0].expand(3, 6),
        "every": base[::2, 1::3],
    }
    found["views"] = views
    found["numbers"] = {"zero": torch.tensor(7.5), "none": torch.zeros(0, 3), "parameter": nn.Parameter(torch.ones(2))}
    return found


def oddities():
    """Return tensors that not every release can save."""
    found = OrderedDict()
    found["sparse"] = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 2]]), torch.tensor([3.0, 4.0]), (3, 3))
    if hasattr(torch, "quantize_per_tensor"):
        found["quantised"] = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.quint8)
    return found


def optimizers():
    """Return optimizers that took a step, with their models."""
    for name, kind in sorted(vars(torch.optim).items()):
        if isinstance(kind, type) and name not in ("Optimizer", "SparseAdam"):
            model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
            try:
                optimizer = kind(model.parameters(), lr=0.1)
            except TypeError:
                continue

            def closure(model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = model(torch.ones(2, 3)).pow(2).sum()
                loss.backward()
                return loss

            optimizer.step(closure)
            yield name, model, optimizer


def write(folder):
    """Write every file in every format that this release has."""
    contents = OrderedDict([("tensors", tensors()), ("list", [torch.ones(2), {"a": torch.zeros(1)}])])
    for name, tensor in oddities().items():
        contents[name] = {"w": tensor, "b": torch.ones(2)}
    for name, module in modules().items():
        contents["state_" + name] = module.state_dict()
        contents["whole_" + name] = module
    for name, model, optimizer in optimizers():
        contents["optimizer_" + name] = {
            "epoch": 1,
            "state_dict": model.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        contents["objects_" + name] = {"epoch": 1, "model": model, "optimizer": optimizer}
    for name, content in contents.items():
        for tail, options in forms():
            path = os.path.join(folder, name + tail + ".pt")
            try:
                torch.save(content, path, **options)
                found = said(torch.load(path))
            except Exception as error:
                sys.stderr.write("%s: %s\n" % (path, error))
                if os.path.exists(path):
                    os.remove(path)
                continue
            with open(path + ".json", "w") as file:
                file.write(json.dumps(found))
    script(folder)


def forms():
    """Yield the options of torch.save that choose a format, by a word for file names."""
    yield "", {}
    yield "_protocol4", {"pickle_protocol": 4}
    if hasattr(torch, "_utils_internal") and "_use_new_zipfile_serialization" in torch.save.__code__.co_varnames:
        yield "_legacy", {"_use_new_zipfile_serialization": False}
        yield "_zip", {"_use_new_zipfile_serialization": True}


def script(folder):
    """Write a program, if this release can."""
    path = os.path.join(folder, "program.pt")
    try:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        torch.jit.trace(model.eval(), torch.ones(2, 3)).save(path)
        found = said(torch.jit.load(path).state_dict())
    except Exception as error:
        sys.stderr.write("%s: %s\n" % (path, error))
        return
    with open(path + ".json", "w") as file:
        file.write(json.dumps(found))


def read(folder):
    """Say what is in each file."""
    found = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".pt"):
            try:
                found[name] = said(torch.load(os.path.join(folder, name)))
            except Exception as error:
                found[name] = "%s: %s" % (type(error).__name__, str(error)[:200])
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    assert struct.pack("=H", 1) == b"\1\0", "the digests are of little-endian machines"
    torch.manual_seed(0)
    {"write": write, "read": read}[sys.argv[1]](sys.argv[2])
