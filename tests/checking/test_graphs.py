"""Graphs of torch.fx are made again by running text of the file: what only reckons is code, the rest of the third."""

from __future__ import annotations

import functools
import os
import pickle
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn
from torch.fx.graph_module import reduce_graph_module

import ckptool
from ckptool.fleet import row
from ckptool.formats.runnable.surveys import reached
from ckptool.pickles import graph_text, graphs
from ckptool.reference.nets import LeNet
from tests import build

IMPORTS = "NoneType = type(None)\nfrom math import inf\nfrom torch import device\nimport torch\n"
FORWARD = "def forward(self, x):\n    "
MARK = "MARK"
"""In the text, it stands for a path that is there afterwards if the text did what it should not."""
RUN = '__import__("os").system("touch MARK")'
INJECTED = (
    'y")(x)\n    return a\nfrom os import system\nsystem("touch MARK")\ndef g(self, x):\n    a = getattr(self, "y'
)


class Made:
    """Pickled as torch pickles a graph."""

    def __init__(self, body: Any, imports: Any) -> None:
        self.given = (body, imports)

    def __reduce__(self) -> tuple[Any, ...]:
        return (reduce_graph_module, self.given)


class Residual(nn.Module):
    """What graphs do: modules, functions, methods, attributes, operators, settings."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Sequential(nn.BatchNorm2d(2), nn.ReLU()))
        self.scale = nn.Parameter(torch.ones(2, 1, 1))

    def forward(self, x, mask=None, times=2):  # type: ignore[no-untyped-def]  # torch writes types into the text
        y = self.blocks(x) * self.scale + x
        size = y.shape[0] * times
        y = torch.nn.functional.dropout(y, 0.1, self.training)[..., 1:, None].flatten(1).to(torch.float64)
        return {"out": y.softmax(dim=-1), "rest": [torch.cat((y, -y), dim=1), size]}


def body_of(text: str, **more: Any) -> dict[str, Any]:
    """Return what torch pickles of a graph, with another text and other attributes."""
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    body = {key: value for key, value in vars(graph).items() if key != "_graph"}
    return {**body, "_code": text, **more}


def grade(path: Path) -> str:
    return str(row(str(path))["grade"])


@pytest.mark.parametrize("made", [Residual, LeNet])
def test_graphs_that_torch_has_traced_are_code_of_torch(made: Callable[[], nn.Module], tmp_path: Path) -> None:
    graph = torch.fx.symbolic_trace(made())
    torch.save(graph, tmp_path / "graph.pt")
    torch.save({"model": graph, "epoch": 1}, tmp_path / "among_others.pt")
    (tmp_path / "inside.pkl").write_bytes(pickle.dumps({"bytes": (tmp_path / "graph.pt").read_bytes()}))

    assert [grade(tmp_path / name) for name in ("graph.pt", "among_others.pt")] == ["code", "code"]
    assert reached(ckptool.check(tmp_path / "inside.pkl").acts) == "code"
    torch.load(tmp_path / "graph.pt", weights_only=False)


def test_functions_of_packages_are_named(tmp_path: Path) -> None:
    text = 'torch.fx._symbolic_trace.wrap("roi")\n\ndef forward(self, x):\n    return roi(x, 3)\n'
    write(tmp_path / "x.pkl", body_of(text), IMPORTS + "from mypkg.ops import roi_align as roi\n")

    acts = ckptool.check(tmp_path / "x.pkl").acts

    assert ("mypkg.ops.roi_align", "code") in [(one.name, one.grade) for one in acts]
    assert grade(tmp_path / "x.pkl") == "code"


def test_a_quantised_graph_and_one_of_operators_are_code(tmp_path: Path) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    torch.save(make_fx(lambda x: torch.sin(x) + torch.arange(3))(torch.randn(3)), tmp_path / "operators.pt")
    exported = torch.export.export(nn.Linear(2, 2), (torch.randn(1, 2),))
    torch.save(exported.graph_module, tmp_path / "exported.pt")

    assert [grade(tmp_path / name) for name in ("operators.pt", "exported.pt")] == ["code", "code"]


def modules(**held: Any) -> dict[str, Any]:
    return {"_modules": held}


LINEAR = nn.Linear(2, 2)
TEXTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "exec": (f"{FORWARD}exec('{RUN}')\n    return x\n".replace("exec('", 'exec("""').replace("')\n", '""")\n'), "", {}),
    "eval of a wrapped name": (f'torch.fx.wrap("eval")\n{FORWARD}return eval("""{RUN}""")\n', "", {}),
    "a default": (f"def forward(self, x = {RUN}):\n    return x\n", "", {}),
    "a type": (f"def forward(self, x : {RUN}):\n    return x\n", "", {}),
    "a type given back": (f"def forward(self, x) -> {RUN}:\n    return x\n", "", {}),
    "a decorator": (f"@(lambda f: {RUN} or f)\n{FORWARD}return x\n", "", {}),
    "before the function": (f"{RUN}\n{FORWARD}return x\n", "", {}),
    "after the function": (f"{FORWARD}return x\n{RUN}\n", "", {}),
    "an import": (f"{FORWARD}return x\n", 'import os\nos.system("touch MARK")\n', {}),
    "a name of an import": (f'{FORWARD}system("touch MARK")\n    return x\n', "from os import system\n", {}),
    "a module of an import": (f'{FORWARD}hub.os.system("touch MARK")\n    return x\n', "import torch.hub as hub\n", {}),
    "a function of torch": (f'{FORWARD}torch.save(1, "MARK")\n    return x\n', "", {}),
    "a name of torch": (f'{FORWARD}save(1, "MARK")\n    return x\n', "from torch import save\n", {}),
    "a module of torch": (f'{FORWARD}torch.os.system("touch MARK")\n    return x\n', "", {}),
    "through a function": (f'{FORWARD}torch.nn.functional.torch.save(1, "MARK")\n    return x\n', "", {}),
    "a file of torch": (f'{FORWARD}torch.from_file("MARK", shared = True, size = 4)\n    return x\n', "", {}),
    "an operator": (f'{FORWARD}torch.ops.aten.from_file("MARK", True, 4)\n    return x\n', "", {}),
    "getattr": (f'{FORWARD}getattr(torch, "save")(1, "MARK")\n    return x\n', "", {}),
    "a method": (f'{FORWARD}torch.ones(3).numpy().tofile("MARK")\n    return x\n', "", {}),
    "a method of a buffer": (f'{FORWARD}self.t.numpy().tofile("MARK")\n    return x\n', "", {"t": torch.ones(3)}),
    "a walrus": (f"{FORWARD}y = (z := {RUN})\n    return x\n", "", {}),
    "a lambda": (f"{FORWARD}y = (lambda: {RUN})()\n    return x\n", "", {}),
    "a comprehension": (f"{FORWARD}y = [{RUN} for _ in (1,)]\n    return x\n", "", {}),
    "a with": (f'{FORWARD}with open("MARK", "w"): pass\n    return x\n', "", {}),
    "the old name": ("", "", {"code": f"{FORWARD}{RUN}\n    return x\n"}),
    "an attribute": (f'{FORWARD}self.f("touch MARK")\n    return x\n', "", {"f": os.system}),
    "an attribute before a module": (
        f'{FORWARD}self.f("touch MARK")\n    return x\n',
        "",
        {"f": os.system, **modules(f=LINEAR)},
    ),
    "a key of sort": (f'{FORWARD}["touch MARK"].sort(key=self.f)\n    return x\n', "", {"f": os.system}),
    "a key of max": (f'{FORWARD}max(["touch MARK"], key=self.f)\n    return x\n', "", {"f": os.system}),
    "a partial": (
        f'{FORWARD}self.f("MARK")\n    return x\n',
        "",
        {"f": functools.partial(torch.save, 1)},
    ),
    "a method of a graph": (
        f'{FORWARD}self.g.to_folder("MARK")\n    return x\n',
        "",
        modules(g=torch.fx.symbolic_trace(nn.Sequential(LINEAR))),
    ),
}
"""Name: text, more imports and more attributes of a graph, which really leaves the mark when it is loaded."""


def write(path: Path, body: Any, imports: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path.write_bytes(pickle.dumps(Made(body, imports), protocol=4))


@pytest.mark.parametrize("name", TEXTS)
def test_text_that_does_more_is_of_the_third_grade(name: str, tmp_path: Path) -> None:
    text, imports, more = TEXTS[name]
    mark = tmp_path / "mark"
    body = {
        key: value.replace(MARK, str(mark)) if key == "code" else value for key, value in body_of("", **more).items()
    }
    body["_code"] = text.replace(MARK, str(mark))
    write(tmp_path / "x.pkl", body, IMPORTS + imports.replace(MARK, str(mark)))

    assert grade(tmp_path / "x.pkl") == "system"
    assert not mark.exists()
    pickle.loads((tmp_path / "x.pkl").read_bytes())
    assert mark.exists()


@pytest.mark.parametrize(
    ("text", "more"),
    [
        (f"{FORWARD}return self.good(x)\n", {"_modules": {INJECTED: LINEAR, "good": LINEAR}}),
        (f"{FORWARD}return self.good(x)\n", {"_modules": OrderedDict([(INJECTED, LINEAR), ("good", LINEAR)])}),
        (f"{FORWARD}return x + self.good\n", {INJECTED: (one := torch.ones(2)), "good": one}),
        (f"{FORWARD}return torch.relu(x, **{{'a': 1}})\n", {}),
        (f"{FORWARD}return self(x)\n", {}),
        (f"{FORWARD}return self.f(x)\n", modules(f=torch.save)),
        (f"{FORWARD}return self.f(x)\n", modules(f=functools.partial(torch.save, 1))),
        (f"{FORWARD}return self.f.g(x)\n", modules(f=torch.fx.symbolic_trace(nn.Sequential(LINEAR)))),
        (f"{FORWARD}return self.share_memory(x)\n", modules(share_memory=LINEAR)),
        (f"{FORWARD}return x\n", {"_tracer_cls": os.PathLike}),
        (f"{FORWARD}return x\n", {"_tracer_extras": {"concrete_args": {}}}),
        (f"{FORWARD}return x\n", {"_graphmodule_cls_name": 'a"'}),
        (f"{FORWARD}return x\n", {"_graphmodule_graph_node_meta_stack_trace": {"x": "\n"}}),
        (f"{FORWARD}return x\n", {"code": b"x"}),
        (f"{FORWARD}return x.__class__\n", {}),
        (f"{FORWARD}return torch.relu.__self__\n", {}),
        (f"{FORWARD}return y\n", {}),
        (f"{FORWARD}torch = self.a\n    return torch.relu(x)\n", {}),
        (f"{FORWARD}x[0] = 1\n    return x\n", {}),
        (f"{FORWARD}return torch.cat(*self.items)\n", {"items": [1]}),
        (f"{FORWARD}return list(self.items)\n", {"items": [1]}),
        (f"{FORWARD}return x\n", {"items": torch.utils.data.TensorDataset(torch.ones(1))}),
        (f"from torch.hub import *\n{FORWARD}return x\n", {}),
        (f"from torch.hub import load as type\nNoneType = type(None)\n{FORWARD}return x\n", {}),
        (f"from torch.hub import load as len\n{FORWARD}return len(x)\n", {}),
        (f"{FORWARD}return f'{{x}}'\n", {}),
        (f"{FORWARD}return {'-' * 30_000}1\n", {}),
        (f"{FORWARD}return {'(' * 300}x\n", {}),
        (f"{FORWARD}return {'x, ' * 40_000}\n", {}),
        ("", {}),
        ("return", {}),
        ("import torch\n", {}),
    ],
)
def test_what_torch_does_not_write_is_of_the_third_grade(text: str, more: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path / "x.pkl", body_of(text, **more), IMPORTS)

    assert grade(tmp_path / "x.pkl") == "system"


def test_a_text_that_is_changed_after_it_ran_still_counts(tmp_path: Path) -> None:
    graph = build.named("torch.fx.graph_module", "reduce_graph_module")
    evil, plain = f"{FORWARD}{RUN}\n    return x\n", f"{FORWARD}return x\n"

    def put(text: str) -> bytes:
        return build.ops("_code") + build.ops(text) + b"s"

    body = b"}q\x01" + put(evil)
    data = b"\x80\x02" + graph + body + build.ops(IMPORTS) + b"\x86R" + b"h\x01" + put(plain) + b"\x86."
    (tmp_path / "x.pkl").write_bytes(data)

    assert grade(tmp_path / "x.pkl") == "system"


def test_every_name_that_modules_have_from_their_classes_is_known() -> None:
    classes = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    names = {name for one in classes for name in dir(one)} | set(vars(nn.Module()))

    assert {name for name in names if not name.startswith("__")} <= graphs._OF_MODULES


def test_every_function_that_reckons_is_one_of_torch() -> None:
    places = (torch.Tensor, torch, nn.functional, torch._C._nn, torch.ops.aten)

    unknown = [
        one for one in graph_text._RECKONING if not any(hasattr(p, one) or hasattr(p, f"{one}_") for p in places)
    ]

    assert unknown == []


def test_many_graphs_of_one_text_take_no_longer_than_the_file_is_long(tmp_path: Path) -> None:
    graph = build.named("torch.fx.graph_module", "reduce_graph_module")
    text = FORWARD + "".join(f"y{number} = x + {number}\n    " for number in range(3000)) + "return x\n"
    begin = (
        b"\x80\x02"
        + graph
        + b"q\x02}q\x01"
        + build.ops("_code")
        + build.ops(text)
        + b"s"
        + build.ops(IMPORTS)
        + b"q\x030"
    )

    def data(count: int) -> bytes:
        return begin + b"0" + b"h\x02h\x01h\x03\x86R0" * count + b"N."

    for count in (100, 1000):
        (tmp_path / f"{count}.pkl").write_bytes(data(count))
    few, many = (seconds(tmp_path / f"{count}.pkl") for count in (100, 1000))

    assert many < 20 * few + 1


def seconds(path: Path) -> float:
    begun = time.process_time()
    grade(path)
    return time.process_time() - begun
