"""Quantised weights of no known layout: types, shapes, values and places tell them, and no cast breaks them."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ckptool
from ckptool import MigrationRefused, UnsupportedFeature
from tests.each import each
from tests.program import invoke
from tests.quantized.layouts import State, bits, codes, fp8, said, shards, whole
from tests.scale import in_turn, scaled, step

BIAS = {"fc.bias": torch.linspace(-1, 1, 64)}
FOUR = bits(64, 32, dtype=torch.uint8) % 16
BOOK = torch.linspace(-1, 1, 16)
FITS = {"tensor": (1,), "row": (8,), "rows": (8, 1), "column": (1, 16), "block": (4, 4)}
WEIGHTS: dict[str, Callable[[], Tensor]] = {
    "int8": lambda: codes(8, 16),
    "int32": lambda: codes(8, 16, dtype=torch.int32),
    "fp8": lambda: fp8(8, 16),
}


def refuses(source: Path, scale: str, says: str, folder: Path) -> None:
    """Assert that no cast breaks a file, and that its scale does not go without its weight."""
    target = folder / f"out{source.suffix}"
    for option in (["--dtype", "float64"], ["--exclude", scale]):
        args = ["migrate", str(source), str(target), *option]
        result = invoke(args)

        assert result.exit_code == 1, (option, result.output)
        assert says in result.output
        assert not target.exists()
        assert invoke([*args, "--break-quantized"]).exit_code == 0
        target.unlink()
    with pytest.raises(UnsupportedFeature, match="a cast breaks"):
        ckptool.load(source, dtype=torch.float64)
    assert invoke(["check", str(source)]).exit_code == 0
    assert [one for one in said(source) if says in one]


def is_plain(path: Path) -> None:
    """Assert that a file is not called quantised, and is cast."""
    assert said(path) == []
    ckptool.migrate(path, path.with_name("out.pth"), dtype="bfloat16", force=True)
    ckptool.load(path, dtype="bfloat16")


NAMED = (
    *("m.weights_scaling_factor", "m.weight_quantizer._scale", "m.weight_dequant_scale", "scales.m", "m.weight_amax"),
    *("m.descale", "m.wscales", "m.quantizer.amax", "all_scales", "net.scales.of.the.m"),
)


@each(("scale", "shape"), in_turn(NAMED, [(), (8, 1), (3, 5)]))
def test_8_bits_and_scales_of_any_name(scale: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    state = {"m.weight": fp8(8, 8), scale: torch.full(shape, 0.1), "norm.weight": torch.ones(8)}
    save_file(state, tmp_path / "m.safetensors")

    refuses(tmp_path / "m.safetensors", scale, "FP8 (e4m3), with scales under other names", tmp_path)


@each(
    ("shape", "scale", "weight"),
    in_turn(FITS, ["inv", "s", "multiplier", "weight_inv_s"], ["weight", "w1", "in_proj_weight"]),
)
def test_8_bits_and_a_float_that_fits(shape: str, scale: str, weight: str, tmp_path: Path) -> None:
    state = {f"fc.{weight}": fp8(8, 16), f"fc.{scale}": torch.full(FITS[shape], 0.1), "fc.bias": torch.ones(8)}
    torch.save(state, tmp_path / "m.pth")

    refuses(tmp_path / "m.pth", f"fc.{scale}", "with scales under other names", tmp_path)


@each(
    ("shape", "scale", "dtype", "values"),
    in_turn(
        [*FITS.values(), (5, 3)],
        ["scales", "scales_and_zeros", "gain", "q_scale", "delta"],
        [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64],
        ["weight", "qweight", "kernel", "x"],
    ),
)
def test_integers_and_a_float_in_one_module(
    shape: tuple[int, ...], scale: str, dtype: torch.dtype, values: str, tmp_path: Path
) -> None:
    state = {f"m.{values}": bits(8, 16, dtype=dtype), f"m.{scale}": torch.full(shape, 0.1), "m.bias": torch.ones(8)}
    torch.save(state, tmp_path / "m.pth")

    refuses(tmp_path / "m.pth", f"m.{scale}", "integers with scales" if values != "qweight" else "", tmp_path)


@each(
    ("dtype", "values", "beside"),
    in_turn(
        [torch.uint8, torch.int32, torch.int64, torch.int8],
        ["qweight", "weight", "kernel", "weight"],
        [("scales",), ("weight_scale",), ("scaling", "zero_point"), ("q_scale",)],
    ),
)
def test_small_numbers_count_beside_what_is_called_a_scale(
    dtype: torch.dtype, values: str, beside: tuple[str, ...], tmp_path: Path
) -> None:
    four = (bits(8, 16, dtype=torch.uint8) % 16).to(dtype)
    torch.save({f"m.{values}": four} | {f"m.{one}": torch.full((8,), 0.1) for one in beside}, tmp_path / "m.pth")

    refuses(tmp_path / "m.pth", f"m.{beside[0]}", "integers", tmp_path)


@each(
    ("dtype", "names", "shape"),
    in_turn(
        [torch.uint8, torch.int32, torch.int64],
        [("labels", "centroids"), ("codes", "codebook"), ("weight_idx", "centers")],
        [(4,), (4, 2)],
    ),
)
def test_places_in_a_code_book(
    dtype: torch.dtype, names: tuple[str, str], shape: tuple[int, ...], tmp_path: Path
) -> None:
    places = (bits(8, 16, dtype=torch.uint8) % 4).to(dtype)
    torch.save({f"m.{names[0]}": places, f"m.{names[1]}": torch.rand(shape)}, tmp_path / "m.pth")

    refuses(tmp_path / "m.pth", f"m.{names[1]}", "", tmp_path)


FILES: dict[str, Any] = {
    "one code book for all": {"a": FOUR, "b": FOUR, "codebook": BOOK},
    "one code book for all weights": {"fc.weight": FOUR, "codebook": BOOK} | BIAS,
    "codes of 64 bits": {"fc.weight": FOUR.long(), "codebook": BOOK} | BIAS,
    "two codes in a byte": {"a.codes": bits(8, 16, dtype=torch.uint8), "a.codebooks": torch.rand(8, 16)},
    "a float around": {"net.fc.weight": codes(64, 32), "step": torch.ones(64)} | BIAS,
    "packed words": {"fc.w": bits(64, 32, dtype=torch.int32)} | BIAS,
    "no scale at all": {"fc.weight": codes(64, 32)} | BIAS,
    "a float in a module of its own": {"enc.codes.w": FOUR, "enc.aux.t": torch.ones(64)} | BIAS,
    "a number for 8 bits under their own name": {"model": {"m.weight": fp8(8, 16)}, "m.weight": 0.013},
    "dicts that are parts of names": {"weights.a.w": codes(8, 16), "zeros.a.w": torch.full((8,), 0.1)},
    "one scale for all 8 bits": {"model": {"a.weight": fp8(8, 16), "b.weight": fp8(8, 16)}, "scale": torch.ones(2)},
    "a name beside that of the module": {"fc.weight": fp8(64, 32), "fc_s": torch.ones(64)} | BIAS,
    "flat codes": {"fc.q": codes(2048), "fc.scale": torch.ones(1)} | BIAS,
    "flat 8 bits": {"fc.q": fp8(2048), "fc.scale": torch.ones(1)} | BIAS,
    "one layer beside a bias, without a scale": {"a.weight": torch.ones(64, 64), "fc.weight": codes(64, 32)} | BIAS,
    "one layer of 8 bits": {"emb.weight": codes(64, 32), "fc.weight": torch.ones(64, 64)} | BIAS,
    "signs beside a bias": {"fc.weight": codes(64, 32).sign()} | BIAS,
    "small numbers beside a bias": {"fc.weight": (codes(64, 32) // 2).short()} | BIAS,
    "8 bits that were divided by a scale": {"a.weight": fp8(8, 16, divisor=0.02), "fc.weight": fp8(64, 32)} | BIAS,
    "8 bits of the other kind": {"a.weight": fp8(8, 16, dtype=torch.float8_e5m2, divisor=2e-4)},
    "kernels without a scale": {"conv.weight": bits(8, 4, 3, 3, dtype=torch.uint8), "conv.bias": torch.ones(8)},
    "what Transformer Engine has in _extra_state": {
        "m.weight": fp8(32, 32),
        "m._extra_state": torch.zeros(100, dtype=torch.uint8),
    },
}


@scaled
@each("name", list(FILES)[:: step(2)])
def test_a_cast_is_refused(name: str, tmp_path: Path) -> None:
    torch.save(FILES[name], tmp_path / "m.pth")

    assert said(tmp_path / "m.pth")[0].startswith("quantised: ")
    with pytest.raises(MigrationRefused, match="quantised weight"):
        ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", dtype="bfloat16")
    with pytest.raises(UnsupportedFeature, match="quantised weight"):
        ckptool.load(tmp_path / "m.pth", dtype="bfloat16")
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", form="same")
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", dtype="bfloat16", break_quantized=True, force=True)


def test_no_values_are_read_but_those_of_what_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers without scales are told from tables of indices by their first values."""
    path, read = tmp_path / "m.safetensors", dict[int, int]()
    save_file(
        {f"codes.{one}": codes(512, 512) for one in "ab"}
        | {"net.weight": torch.ones(512, 512), "net.bias": torch.ones(512)},
        path,
    )
    data, pread = path.read_bytes(), os.pread
    start = data.index(codes(512, 512).numpy().tobytes())  # of the first of both
    monkeypatch.setattr("os.pread", lambda fd, size, at: read.update({at: size}) or pread(fd, size, at))
    net: Any = nn.ModuleDict({"net": nn.Linear(512, 512)})

    ckptool.load_into(net, path, strict=False, mmap=False)
    ckptool.migrate(path, tmp_path / "o.pth", include=["net.*"], dtype="bfloat16")
    assert read
    assert not any(start <= at < start + (512 << 9) for at in read)
    with pytest.raises(MigrationRefused, match="integers without scales"):
        ckptool.migrate(path, tmp_path / "all.pth", dtype="bfloat16")
    assert [size for at, size in read.items() if start <= at < start + (512 << 9)] == [1 << 12]


@each("make", [tuple, list])
def test_a_weight_and_its_scale_in_one_entry_are_not_cast(make: Callable[[Any], Any], tmp_path: Path) -> None:
    pair = make((codes(8, 16), torch.full((8,), 0.1)))
    torch.save({"a.weight": pair, "a.bias": torch.ones(8)}, tmp_path / "m.pth")
    assert ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", form="state_dict").dropped == ()

    torch.save({"model": {"a.weight": pair, "a.bias": torch.ones(8)}, "epoch": 1}, tmp_path / "m.pth")
    with pytest.raises(UnsupportedFeature, match="a cast breaks"):
        ckptool.load(tmp_path / "m.pth", dtype="bfloat16")


@each("values", [codes(64, 32), fp8(64, 32)])
def test_codes_with_their_scale_are_one_entry_of_the_model(values: Tensor, tmp_path: Path) -> None:
    torch.save({"fc.weight": {"q": values, "scale": torch.ones(64)}} | BIAS, tmp_path / "m.pth")
    found = ckptool.load(tmp_path / "m.pth")
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", dtype="bfloat16")
    cast = torch.load(tmp_path / "o.pth")

    assert said(tmp_path / "m.pth")[0].startswith("quantised: ")
    assert found.keys() == {"fc.weight", "fc.bias"}
    assert (found["fc.weight"]["q"].dtype, cast["fc.bias"].dtype) == (values.dtype, torch.bfloat16)
    assert [one.dtype for one in cast["fc.weight"].values()] == [values.dtype, torch.float32]
    with pytest.raises(UnsupportedFeature, match="a cast breaks"):
        ckptool.load(tmp_path / "m.pth", dtype="bfloat16")


LOST: dict[str, tuple[Any, str]] = {
    "a number under the own name": ({"model": {"m.weight": codes(8, 16)}, "m.weight": 0.013}, "m.weight"),
    "one dict and another": ({"model": {"m.weight": codes(8, 16)}, "alpha": {"m.weight": torch.ones(8)}}, "alpha.m"),
    "8 bits": ({"weights": {"m.weight": fp8(8, 8)}, "scales": {"m.weight": torch.ones(1)}}, "scales.m"),
    "one for all": ({"ckpt": {"model": {"m.weight": codes(8, 16)}, "scales": torch.ones(2)}}, "ckpt.scales"),
    "a code book": ({"model": {"m.weight": FOUR, "m.bias": torch.ones(64)}, "nf4_table": BOOK}, "nf4_table"),
    "any float elsewhere": ({"model": {"m.weight": FOUR}, "meta": {"delta": BOOK}}, "meta.delta"),
}


@each("name", LOST)
def test_weights_are_not_taken_without_what_is_elsewhere(name: str, tmp_path: Path) -> None:
    content, scale = LOST[name]
    torch.save(content, tmp_path / "m.pth")

    with pytest.raises(MigrationRefused, match=rf"m\.weight without {scale}"):
        ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", form="state_dict")
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", form="same")


NUMBERS: dict[str, Any] = {
    "a number": 0.02,
    "a scalar of numpy": np.float32(0.02),
    "an array of numpy": np.full(8, 0.02, dtype=np.float32),
    "a list": [0.02] * 8,
    "a scale and a zero point": (0.02, 3),
    "a dict": {"scale": 0.02, "zero_point": 3},
}


@each(("number", "weight", "name"), in_turn(NUMBERS, WEIGHTS, ["fc.weight", "fc", "fc.weight_scale"]))
def test_numbers_in_another_dict(number: str, weight: str, name: str, tmp_path: Path) -> None:
    model = {"fc.weight": WEIGHTS[weight](), "fc.bias": torch.ones(8)}
    inner = {"model": model, "scales": {name: NUMBERS[number]}}
    for content in (inner, {"ckpt": inner}):
        torch.save(content, tmp_path / "m.pth")
        for options in (
            {"form": "safetensors"},
            {"form": "same", "drop": ["scales" if content is inner else "ckpt.scales"]},
        ):
            with pytest.raises(MigrationRefused, match=rf"scales\.{name}"):
                ckptool.migrate(tmp_path / "m.pth", tmp_path / "o", **options)
        assert said(tmp_path / "m.pth")[0].startswith("quantised: ")
        ckptool.migrate(tmp_path / "m.pth", tmp_path / "o", force=True)
    with pytest.raises(MigrationRefused, match="what scales"):
        ckptool.migrate(tmp_path / "m.pth", tmp_path / "o", rename=[("^fc", "net")], force=True)


@each("weight", WEIGHTS)
def test_loading_says_that_numbers_are_left(weight: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    torch.save({"model": {"weight": WEIGHTS[weight]()}, "scales": {"weight": 0.02}}, tmp_path / "m.pth")
    with caplog.at_level(logging.WARNING, "ckptool"):
        loaded = ckptool.load(tmp_path / "m.pth")

    assert loaded["weight"].dtype == WEIGHTS[weight]().dtype
    assert "weight without scales.weight" in caplog.text
    with pytest.raises(UnsupportedFeature, match="quantised"):
        ckptool.load(tmp_path / "m.pth", dtype="bfloat16")
    with pytest.raises(UnsupportedFeature, match=r"quantised|integers"):
        ckptool.load_into(nn.Linear(16, 8, bias=False), tmp_path / "m.pth")


@each(("weight", "nested"), in_turn(WEIGHTS, [False, True]))
def test_numbers_among_the_weights_stay(weight: str, nested: bool, tmp_path: Path) -> None:
    state = {"fc.weight": WEIGHTS[weight](), "fc.weight_scale": 0.02, "fc.bias": torch.ones(8)}
    torch.save({"model": state, "epoch": 1} if nested else state, tmp_path / "m.pth")
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", form="state_dict", rename=[("^fc", "net")])

    assert torch.load(tmp_path / "o.pth")["net.weight_scale"] == 0.02
    assert ckptool.load(tmp_path / "m.pth")["fc.weight_scale"] == 0.02
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "same.pth", rename=[("^fc", "net")])
    assert "quantised" in said(tmp_path / "same.pth")[0]
    lossy: dict[str, Any] = {"drop_unsupported": True, "form": "safetensors"}
    for options in ({"exclude": ["fc.weight_scale"]}, {"rename": [("fc.weight_scale", "x.y")]}, lossy):
        with pytest.raises(MigrationRefused, match="what scales it: "):
            ckptool.migrate(tmp_path / "m.pth", tmp_path / "x", **options)  # type: ignore[arg-type]


TEXTS = ({"fc.weight_scale": "0.02"}, {"scales": json.dumps({"fc.weight": 0.02})}, {"quantization": '{"fc": [1.5]}'})


@each(("texts", "weight"), in_turn(TEXTS, WEIGHTS))
def test_texts_of_a_safetensors_file(texts: dict[str, str], weight: str, tmp_path: Path) -> None:
    save_file({"fc.weight": WEIGHTS[weight]()}, tmp_path / "m.safetensors", texts)
    with pytest.raises(MigrationRefused, match=r"fc\.weight without __metadata__\."):
        ckptool.migrate(tmp_path / "m.safetensors", tmp_path / "o.pth")
    ckptool.migrate(tmp_path / "m.safetensors", tmp_path / "o.safetensors", rename=[])

    assert load_file(tmp_path / "o.safetensors").keys() == {"fc.weight"}
    assert said(tmp_path / "o.safetensors")[0].startswith("quantised: ")


BESIDE: dict[str, Callable[[Path], object]] = {
    "scales.json": lambda path: path.write_text(json.dumps({"fc.weight": [0.1] * 64})),
    "extra.safetensors": lambda path: save_file({"fc.weight_scale": torch.ones(64)}, path),
    "scales.pth": lambda path: torch.save({"fc.weight": 0.02}, path),
}


@pytest.mark.parametrize(("file", "weight"), in_turn(BESIDE, [codes(64, 32), fp8(64, 32)]))
def test_scales_in_a_file_beside(weight: Tensor, file: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"fc.weight": weight} | BIAS, path)
    BESIDE[file](tmp_path / file)

    for source in (path, tmp_path):
        assert f", which {file} may have, 1 weight without" in said(source)[0]
        with pytest.raises(MigrationRefused, match=file):
            ckptool.migrate(source, tmp_path / "out" / "o.pth", dtype="bfloat16")
        with pytest.raises(UnsupportedFeature, match=file):
            ckptool.load(source, dtype="bfloat16")
    ckptool.migrate(path, tmp_path / "o.pth")


def test_what_is_beside_a_net_of_8_bits_without_scales_is_another_net(tmp_path: Path) -> None:
    save_file({"fc.weight": fp8(64, 32)} | BIAS, tmp_path / "model.safetensors")
    save_file({"fc.weight": torch.ones(64, 32)} | BIAS, tmp_path / "other.safetensors")
    (tmp_path / "config.json").write_text('{"fc": {"weight": "xavier"}, "scale": 1.5}')
    small = {"fc.weight": fp8(8, 8), "fc.weight_scale": torch.ones(8, 1)}
    save_file(small | {"fc2.weight": fp8(8, 8), "fc2.weight_scale": torch.ones(1)}, tmp_path / "fp8-scaled.safetensors")

    is_plain(tmp_path / "model.safetensors")
    assert said(tmp_path / "fp8-scaled.safetensors")[0].endswith("2 of 2 weights have a scale")


@each(
    ("weight", "scale"),
    [
        ({"m.weight": fp8(8, 8)}, {"m.weight_scale_inv": torch.ones(1, 1)}),
        ({"m.up_proj": fp8(2, 8, 8)}, {"m.up_proj_scale": torch.ones(2, 1, 1)}),
        ({"a.weight": fp8(8, 8), "a.descale": torch.ones(1)}, {"m.weight_scale": torch.ones(8, 1)}),
        ({"m.qweight": bits(32, 64, dtype=torch.int32)}, {"m.scales": torch.ones(2, 64)}),
    ],
)
def test_one_shard_alone_is_not_cast_without_the_others(weight: State, scale: State, tmp_path: Path) -> None:
    for path in shards(tmp_path / "set", weight, scale):
        args = ["migrate", str(path), str(tmp_path / "o.safetensors"), "--dtype", "float64", "--allow-missing"]
        result = invoke(args)

        assert result.exit_code == 1, result.output
        assert "a cast breaks quantised weights" in result.output
        assert "may be in other files: give " in result.output
        assert not (tmp_path / "o.safetensors").exists()
        with pytest.raises(UnsupportedFeature, match="a cast breaks"):
            ckptool.load(path, dtype="float64", allow_missing=True)


def test_one_shard_of_a_plain_net_is_cast(tmp_path: Path) -> None:
    first = {"m.weight": torch.randn(8, 8), "m.weight_scale": torch.ones(1), "ls1.scale": torch.ones(1)}
    first |= {"act.alpha": torch.ones(8)}
    for path in shards(tmp_path / "set", first, {"logit_scale": torch.ones(1), "n.weight": torch.randn(8, 8)}):
        ckptool.migrate(path, tmp_path / path.name, dtype="bfloat16", allow_missing=True)


SCALED: State = {f"m.{one}.weight": fp8(8, 8) for one in "ab"} | {
    f"m.{one}.weight_scale": torch.ones(1) for one in "ab"
}


@each(
    ("rename", "form"),
    in_turn(
        [
            [(r"a\.weight_scale", "z.weight_scale")],
            [(r"a\.weight$", "z.weight")],
            [("a.weight_scale", "x.weight_scale"), ("b.weight_scale", "a.weight_scale"), (r"m\.x", "m.b")],
            [("_scale$", "_factor")],
            [("weight_scale", "weight_scale_inv")],
            [(r"^m\.(.*\.weight)$", r"net.\1")],
            [(r"^m\.(.*_scale)$", r"\1")],
        ],
        ["same", "state_dict", "safetensors"],
    ),
)
def test_a_new_name_does_not_part_a_weight_from_its_scale(
    rename: list[tuple[str, str]], form: Any, tmp_path: Path
) -> None:
    torch.save({"model": SCALED, "epoch": 1} if form == "same" else SCALED, tmp_path / "m.pth")
    with pytest.raises(MigrationRefused, match=r"new names part \d quantised weights? .* from what scales"):
        ckptool.migrate(tmp_path / "m.pth", tmp_path / "o", rename=rename, form=form)
    assert not (tmp_path / "o").exists()
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "o", rename=rename, form="state_dict", break_quantized=True)


@each(
    ("rename", "form"),
    in_turn([[("^", "net.")], [(r"m\.a", "c"), (r"m\.b", "a")], [(r"^m\.", "")]], ["same", "state_dict"]),
)
def test_new_names_for_both_are_no_loss(rename: list[tuple[str, str]], form: Any, tmp_path: Path) -> None:
    torch.save({"model": SCALED, "epoch": 1}, tmp_path / "m.pth")
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", rename=rename, form=form)

    assert "2 of 2 weights have a scale" in said(tmp_path / "o.pth")[0]


def test_a_layer_below_what_scales_several_can_get_another_name(tmp_path: Path) -> None:
    state = {f"net.{one}.fc.weight": fp8(8, 8) for one in "ab"} | {"net.a.fc.descale": torch.ones(1)}
    torch.save(state | {"net.input_scale": torch.ones(1)}, tmp_path / "m.pth")
    for rename in ([(r"\.a\.fc", ".x")], [("^net", "n")]):
        ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", rename=rename, force=True)
        assert said(tmp_path / "o.pth") == said(tmp_path / "m.pth")
    for rename in ([("^net.input", "m.input")], [(r"^net\.a", "a")], [("descale", "d")], [("input_scale", "scale")]):
        with pytest.raises(MigrationRefused, match="new names part"):
            ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", rename=rename, force=True)


def test_a_layer_goes_with_its_own_scale_and_one_of_several_is_that_of_each(tmp_path: Path) -> None:
    state = {f"{one}.weight": fp8(8, 8) for one in "abc"} | {f"{one}.descale": torch.ones(1) for one in "abc"}
    torch.save(state, tmp_path / "m.pth")
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", exclude=["a.*"])
    assert set(torch.load(tmp_path / "o.pth")) == {name for name in state if name[0] != "a"}

    torch.save({f"{one}_weight": codes(8, 8) for one in "qkv"} | {"step": torch.tensor(0.1)}, tmp_path / "m.pth")
    for one in "qkv":
        with pytest.raises(MigrationRefused, match=rf"{one}_weight without step"):
            ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", include=[f"{one}_weight"], form="state_dict")


class Static(nn.Sequential):
    """A net as torch quantises it."""

    def __init__(self) -> None:
        nnq = torch.ao.nn.quantized
        super().__init__(nnq.Quantize(0.1, 0, torch.quint8), nnq.Linear(8, 8), nnq.Conv2d(3, 3, 1))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("whole_model", [False, True])
def test_scales_of_outputs_of_quantised_nets_of_torch(whole_model: bool, tmp_path: Path) -> None:
    model = Static()
    torch.save(model if whole_model else model.state_dict(), tmp_path / "m.pth")

    for options in (
        {"dtype": "bfloat16"},
        {"exclude": ["0.scale"]},
        {"exclude": ["1.scale"]},
        {"exclude": ["2.scale"]},
    ):
        with pytest.raises(MigrationRefused, match=r"quantised weights?.*torch \(qint8\)"):
            ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", form="state_dict", **options)
    with pytest.raises(UnsupportedFeature, match="a cast breaks"):
        ckptool.load(tmp_path / "m.pth", dtype="bfloat16")
    with pytest.raises(MigrationRefused):
        ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", dtype="bfloat16")
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth")


def test_scales_of_activations_in_a_whole_model_of_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("optimum", "optimum.quanto", "optimum.quanto.nn"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    kind = type("QLinear", (nn.Module,), {"__module__": "optimum.quanto.nn"})
    sys.modules["optimum.quanto.nn"].QLinear = kind  # type: ignore[attr-defined]
    layer = kind()
    layer.weight = nn.Parameter(whole(8, 8, dtype=torch.int8), requires_grad=False)
    layer.register_buffer("input_scale", torch.ones(()))
    layer.register_buffer("output_scale", torch.ones(()))
    torch.save(nn.Sequential(layer, nn.Linear(8, 8)), tmp_path / "m.pth")

    with pytest.raises(UnsupportedFeature, match=r"a cast breaks quantised weights, .*quanto QLinear"):
        ckptool.load(tmp_path / "m.pth", dtype="bfloat16", allow_missing=True)
    options: dict[str, Any] = {"form": "state_dict", "exclude": ["0.output_scale"], "allow_missing": True}
    with pytest.raises(MigrationRefused, match=r"0\.weight without 0\.output_scale"):
        ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", **options)


class Tied(nn.Module):
    """A layer whose scale is not part of its ``state_dict()``."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", torch.full((8,), 0.1), persistent=False)


@each("weight", WEIGHTS)
def test_scales_that_no_state_dict_has(weight: str, tmp_path: Path) -> None:
    torch.save(Tied(WEIGHTS[weight]()), tmp_path / "m.pth")

    with pytest.raises(MigrationRefused, match=r"1 quantised weight .* weight without scale"):
        ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", form="state_dict")
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", keep_calls=True)


def test_a_model_does_not_take_8_bits_without_such_a_scale(tmp_path: Path) -> None:
    torch.save({"weight": fp8(8, 8), "descale": torch.ones(1)}, tmp_path / "m.pth")
    model = nn.Linear(8, 8, bias=False)

    with pytest.raises(UnsupportedFeature, match="quantised weight"):
        ckptool.load_into(model, tmp_path / "m.pth", strict=False)
    model.register_buffer("descale", torch.zeros(1))
    with pytest.raises(UnsupportedFeature, match="quantised weight"):
        ckptool.LiveModel(model).reload(tmp_path / "m.pth")
    assert not model.descale.any()


@each("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool])
def test_a_model_of_floats_takes_no_matrices_of_integers(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(8, 8, dtype=dtype), "bias": torch.ones(8)}, tmp_path / "m.pth")
    hooked, own = nn.Linear(8, 8), nn.Linear(8, 8)
    hooked.register_load_state_dict_post_hook(lambda module, keys: None)
    with torch.device("meta"):
        hollow = nn.Linear(8, 8)
    before = own.weight.clone()

    for model in (own, hooked, hollow):
        with pytest.raises(UnsupportedFeature, match=r"1 tensor of integers.*: weight"):
            ckptool.load_into(model, tmp_path / "m.pth")
    for model in (own, hollow):
        with pytest.raises(UnsupportedFeature, match="1 tensor of integers"):
            ckptool.LiveModel(model).reload(tmp_path / "m.pth")
    assert torch.equal(own.weight, before)
    ckptool.load_into(own, tmp_path / "m.pth", break_quantized=True)
    assert torch.equal(own.weight, torch.ones(8, 8))
    ckptool.load_into(hollow, tmp_path / "m.pth", break_quantized=True)
    assert hollow.weight.dtype == dtype


@each("name", ["logit_scale", "blocks.0.layer_scale", "blocks.0.norm.query_norm.scale"])
def test_parameters_that_are_called_scales_scale_no_8_bits(name: str, tmp_path: Path) -> None:
    save_file({"blocks.0.qkv.weight": fp8(8, 8), name: torch.ones(8)}, tmp_path / "m.safetensors")

    is_plain(tmp_path / "m.safetensors")
    ckptool.migrate(tmp_path / "m.safetensors", tmp_path / "left.safetensors", exclude=[name])
    assert ckptool.load(tmp_path / "left.safetensors").keys() == {"blocks.0.qkv.weight"}


@each(
    "beside",
    [
        {"lr": 0.1, "scaler": {"scale": 65536.0, "growth_factor": 2.0}},
        {"loss_scale": 1024.0, "history": {"fc.loss": [0.1, 0.2]}},
        {"config": {"scale_lr": True, "image_scale": 0.5}, "fc": "a name", "best": np.float64(0.5)},
    ],
)
def test_other_numbers_scale_nothing(beside: dict[str, Any], tmp_path: Path) -> None:
    for weight in (torch.arange(64).reshape(8, 8), fp8(8, 8)):
        torch.save({"model": {"fc.weight": weight, "fc.bias": torch.ones(8)}, **beside}, tmp_path / "m.pth")

        assert said(tmp_path / "m.pth") == []
        ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", form="state_dict", dtype="bfloat16", force=True)
