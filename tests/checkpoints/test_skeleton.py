"""``inspect --skeleton``: the program runs, and its model has the names and shapes of the file."""

from __future__ import annotations

import ast
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from tests.program import invoke


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.activation = torch.nn.functional.relu
        self.mean = torch.zeros(3)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3), nn.MaxPool2d(3, 2, 1))
        self.layer1 = nn.Sequential(Block(8, 8, 1), Block(8, 8, 1), Block(8, 8, 1), Block(8, 8, 1))
        self.layer2 = nn.Sequential(Block(8, 16, 2), Block(16, 16, 1))
        self.pool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(16, 10)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16, padding_idx=0)
        self.place = nn.Parameter(torch.zeros(1, 20, 16))
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool))
        self.register_buffer("again", torch.ones(2), persistent=False)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 3)
        self.decoder = nn.TransformerDecoderLayer(16, 2, 24, dropout=0.0, activation="gelu", norm_first=True)
        self.attend = nn.MultiheadAttention(16, 2, add_bias_kv=True)
        self.attend_others = nn.MultiheadAttention(16, 2, kdim=8, vdim=6)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.more = nn.ModuleDict(
            {"a": nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2), "b": nn.GRU(3, 4, bias=False)}
        )
        self.cells = nn.ModuleList([nn.LSTMCell(3, 4), nn.RNNCell(3, 4, nonlinearity="relu")])
        self.lists = nn.ParameterList([torch.zeros(2), torch.ones(3)])


def odd() -> nn.Module:
    made = nn.Sequential()
    made.add_module("gewöhnlich", nn.Linear(2, 3))
    made.add_module("class", nn.Linear(3, 4, dtype=torch.float16))
    made.add_module("0", nn.utils.weight_norm(nn.Linear(4, 5)))
    pruned = nn.Linear(6, 7)
    pruned.weight = nn.Parameter(torch.zeros(7, 2))  # its attributes say another shape
    made.add_module("pruned", pruned)
    made.add_module("named", nn.Sequential(*[nn.Dropout(0.1)] * 2, nn.PixelShuffle(2)))
    return made


LAYERS: list[nn.Module] = [
    nn.Conv1d(4, 6, 3, padding="same", groups=2),
    nn.ConvTranspose2d(4, 6, (3, 2), 2, output_padding=1, bias=False),
    nn.Conv3d(2, 3, 2, padding_mode="circular", dilation=2),
    nn.BatchNorm1d(3, affine=False),
    nn.BatchNorm3d(3, eps=1e-3, momentum=None, track_running_stats=False),
    nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
    nn.GroupNorm(2, 4),
    nn.LayerNorm((3, 4), bias=False),
    nn.LayerNorm(3, elementwise_affine=False),
    nn.Bilinear(2, 3, 4),
    nn.EmbeddingBag(5, 3, mode="sum"),
    nn.PReLU(3),
    nn.Upsample(scale_factor=2, mode="bilinear"),
    nn.ZeroPad2d((1, 2, 3, 4)),
    nn.ConstantPad1d(2, float("inf")),
    nn.MaxPool2d(2),
    nn.AvgPool1d(3, count_include_pad=False),
    nn.Unflatten(1, (2, 3)),
    nn.Hardtanh(-2, 2),
    nn.ReLU6(),
    nn.Softmax(1),
    nn.CrossEntropyLoss(label_smoothing=0.1),
    nn.MSELoss(),
]


def run(code: str) -> nn.Module:
    made: dict[str, Any] = {}
    exec(compile(code, "skeleton", "exec"), made)
    model: nn.Module = made["model"]
    return model


def skeleton_of(path: Path) -> str:
    done = invoke(["inspect", path, "--skeleton"])
    assert (done.exit_code, done.stderr) == (0, "")
    return done.stdout


def facts(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(one.shape) for name, one in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize(
    "make", [ResNet, Words, odd, lambda: nn.DataParallel(ResNet()), lambda: nn.Sequential(*LAYERS)]
)
def test_the_model_has_the_names_and_shapes_of_the_file(make: Any, tmp_path: Path) -> None:
    model = make()
    inner = model.module if isinstance(model, nn.DataParallel) else model
    torch.save(model, tmp_path / "model.pth")
    made = run(skeleton_of(tmp_path / "model.pth"))

    assert list(facts(made).items()) == list(facts(inner).items())
    ckptool.load_into(made, tmp_path / "model.pth")
    assert all(torch.equal(one, inner.state_dict()[name].to(one.dtype)) for name, one in made.state_dict().items())


def test_what_torch_has_is_made_by_torch(tmp_path: Path) -> None:
    torch.save(nn.Sequential(*LAYERS), tmp_path / "layers.pth")
    made = run(skeleton_of(tmp_path / "layers.pth"))
    assert list(map(repr, made)) == list(map(repr, LAYERS))
    torch.save(Words(), tmp_path / "words.pth")
    words = run(skeleton_of(tmp_path / "words.pth"))
    assert words.head.weight is words.embed.weight
    assert repr(words.encoder) == repr(Words().encoder)
    assert words.decoder.norm_first
    assert words.decoder.activation is torch.nn.functional.gelu


def test_modules_of_one_class_share_it(tmp_path: Path) -> None:
    torch.save(ResNet(), tmp_path / "model.pth")
    code = skeleton_of(tmp_path / "model.pth")
    tree = ast.parse(code)
    assert [one.name for one in tree.body if isinstance(one, ast.ClassDef)] == ["Block", "Block2", "ResNet"]
    assert "Block(conv1_in_channels=8) for _ in range(4)" in code
    assert "# self.activation = torch.nn.functional.relu" in code


CODE = "x = 1\nopen('ran', 'w')  # "


def hostile() -> nn.Module:
    """Return a model in which every name and every text that a file can choose is code."""
    module = sys.modules[__name__]
    setattr(module, CODE, type(CODE, (nn.Sequential,), {"__module__": __name__}))
    model: nn.Module = getattr(module, CODE)()
    for name in (CODE, "x)", "a, b", "class", "__class__", "\N{LATIN SMALL LIGATURE FI}", "nn", "x\u2028y", "'", "\\"):
        model.__dict__[f"{name}s"] = f'\'"""{CODE}'
        model.__dict__[f"o{name}"] = [object, {CODE: CODE}]
        model._parameters[f"p{name}"] = nn.Parameter(torch.ones(1))
        model._buffers[f"b{name}"] = torch.ones(1)
        model._modules[name] = nn.ModuleDict()
        model._modules[name]._modules[name] = nn.Linear(1, 1)
        for layer in (nn.ReLU(), nn.Conv2d(1, 1, 1), nn.LSTM(1, 1)):
            layer.__dict__.update({name: 1, "inplace": CODE, "padding_mode": CODE})
            model._modules[f"{type(layer).__name__}{name}"] = layer
    return model


def test_nothing_of_a_file_becomes_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(hostile(), "model.pth", pickle_protocol=4)  # where names of classes may have lines
    code = skeleton_of(Path("model.pth"))
    tree = list(ast.walk(ast.parse(code)))
    called = {ast.unparse(one.func) for one in tree if isinstance(one, ast.Call)}
    classes = {one.name for one in tree if isinstance(one, ast.ClassDef)}

    assert code.isascii()
    assert all(re.fullmatch(r"(Model|ModuleDict)\d*", name) for name in classes)
    assert {one for one in called - classes if not re.fullmatch(r"nn\.[A-Z]\w+|self\.register_[a-z]+", one)} == {
        *("dict", "super", "super().__init__", "torch.zeros")
    }
    kinds = {type(one).__name__ for one in tree if isinstance(one, ast.stmt)}
    assert kinds == {"Import", "ImportFrom", "ClassDef", "FunctionDef", "Assign", "Expr", "Raise"}
    with suppress(ValueError):  # torch has no such padding
        run(code)
    assert [one.name for one in tmp_path.iterdir()] == ["model.pth"]


def test_a_state_dict_has_no_classes(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 3).state_dict(), tmp_path / "model.pth")
    done = invoke(["inspect", tmp_path / "model.pth", "--skeleton"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"Error: {tmp_path / 'model.pth'}: no skeleton: it holds no whole model")


def test_names_that_a_module_has_itself_are_comments(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    model.extra = nn.Sequential()  # its file says another class, which has no arguments
    model.__class__ = Words
    for name in ("register_buffer", "type"):
        model._parameters[name] = nn.Parameter(torch.ones(2))
    model._modules["_parameters"] = nn.Linear(2, 2)
    torch.save(model, tmp_path / "model.pth")
    code = skeleton_of(tmp_path / "model.pth")
    assert code.count("that is not written here") == 3
    assert list(facts(run(code))) == ["weight", "bias"]
