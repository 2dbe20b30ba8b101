import hashlib

import torch

WRAPPERS = ("module", "_module", "ema_model")
MARKED = ("_orig_mod", "_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module", "_forward_module")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digest(weights: dict[str, torch.Tensor]) -> str:
    named = {".".join(part for part in name.split(".") if part not in MARKED): one for name, one in weights.items()}
    while any(all(name.startswith(f"{head}.") for name in named) for head in WRAPPERS):
        named = {name.partition(".")[2]: one for name, one in named.items()}
    lines = []
    for name, tensor in named.items():
        elements = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        shape = ",".join(map(str, tensor.shape))
        line = f"{str(tensor.dtype).removeprefix('torch.')} [{shape}] {sha256(elements)} {name}"
        lines.append(sha256(line.encode()))
    return "sha256:" + sha256("\n".join(sorted(lines)).encode())
