"""Optimizers that people install, where they are installed: their states as objects and as state dicts."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from tests.against_torch.optimizers import Make, differences, groups, of_object, stepped
from tests.fixture_set.expected import named_tensors


def made(package: str, name: str, **options: Any) -> Make:
    """Return what makes an optimizer for two groups of parameters."""
    return lambda model: getattr(import_module(package), name)(groups(model), **options)


def flat_made(package: str, name: str, **options: Any) -> Make:
    """Return what makes an optimizer for all parameters in one group, as some want them."""
    return lambda model: getattr(import_module(package), name)(model.parameters(), **options)


def around(package: str, name: str) -> Make:
    """Return what makes an optimizer around one of torch."""
    return lambda model: getattr(import_module(package), name)(torch.optim.SGD(groups(model), lr=0.1, momentum=0.9))


def matrices(package: str, name: str) -> Make:
    """Return what makes an optimizer for matrices alone."""
    return lambda model: getattr(import_module(package), name)([model[0].weight, model[1].weight])


INSTALLED: dict[str, Make] = {
    "schedulefree.AdamWScheduleFree": made("schedulefree", "AdamWScheduleFree"),
    "schedulefree.RAdamScheduleFree": made("schedulefree", "RAdamScheduleFree"),
    "schedulefree.SGDScheduleFree": made("schedulefree", "SGDScheduleFree"),
    "schedulefree.ScheduleFreeWrapper": around("schedulefree", "ScheduleFreeWrapper"),
    "lion_pytorch.Lion": made("lion_pytorch", "Lion"),
    "prodigyopt.Prodigy": flat_made("prodigyopt", "Prodigy"),
    "adabelief_pytorch.AdaBelief": made("adabelief_pytorch", "AdaBelief", print_change_log=False),
    "transformers.Adafactor": made("transformers.optimization", "Adafactor", relative_step=False, lr=1e-3),
    "dadaptation.DAdaptAdam": flat_made("dadaptation", "DAdaptAdam"),
    "dadaptation.DAdaptLion": flat_made("dadaptation", "DAdaptLion"),
    "bitsandbytes.Adam8bit": made("bitsandbytes.optim", "Adam8bit"),
    "bitsandbytes.AdamW": made("bitsandbytes.optim", "AdamW"),
    "bitsandbytes.Lion": made("bitsandbytes.optim", "Lion"),
    "bitsandbytes.PagedAdamW32bit": made("bitsandbytes.optim", "PagedAdamW32bit"),
    "pytorch_optimizer.Lamb": made("pytorch_optimizer", "Lamb"),
    "pytorch_optimizer.Ranger21": made("pytorch_optimizer", "Ranger21", num_iterations=9),
    "pytorch_optimizer.Prodigy": made("pytorch_optimizer", "Prodigy"),
    "pytorch_optimizer.SOAP": made("pytorch_optimizer", "SOAP"),
    "pytorch_optimizer.Shampoo": made("pytorch_optimizer", "Shampoo"),
    "pytorch_optimizer.ScalableShampoo": made("pytorch_optimizer", "ScalableShampoo"),
    "pytorch_optimizer.AdEMAMix": made("pytorch_optimizer", "AdEMAMix"),
    "pytorch_optimizer.CAME": made("pytorch_optimizer", "CAME"),
    "pytorch_optimizer.Kron": made("pytorch_optimizer", "Kron"),
    "pytorch_optimizer.Lookahead": around("pytorch_optimizer", "Lookahead"),
    "torch_optimizer.AdaBound": made("torch_optimizer", "AdaBound"),
    "torch_optimizer.DiffGrad": made("torch_optimizer", "DiffGrad"),
    "torch_optimizer.Lamb": made("torch_optimizer", "Lamb"),
    "torch_optimizer.Ranger": made("torch_optimizer", "Ranger"),
    "torch_optimizer.Shampoo": made("torch_optimizer", "Shampoo"),
    "torch_optimizer.Yogi": made("torch_optimizer", "Yogi"),
    "muon.SingleDeviceMuon": matrices("muon", "SingleDeviceMuon"),
}


@pytest.mark.filterwarnings("ignore")  # of old code
@pytest.mark.parametrize("name", INSTALLED)
def test_every_value_is_found_under_the_number_of_its_parameter(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name.partition(".")[0])
    model, optimizer = stepped(INSTALLED[name], steps=3)
    kept = of_object(optimizer, "optimizer")
    state = optimizer.state_dict()

    assert kept
    for is_zip in (True, False):
        assert differences({"model": model, "optimizer": optimizer}, kept, is_zip=is_zip) == []
        saved = {"model": model.state_dict(), "optimizer": state}
        assert differences(saved, dict(named_tensors(state, "optimizer.")), is_zip=is_zip) == []

    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "a.pth")
    ckptool.migrate(tmp_path / "a.pth", tmp_path / "b.pth", form="same")
    try:
        torch.load(tmp_path / "a.pth", weights_only=False)
    except AttributeError as error:
        pytest.skip(f"torch does not load its own file: {error}")
    again = torch.load(tmp_path / "b.pth", weights_only=False)["optimizer"]
    found = of_object(again, "optimizer")
    assert type(again) is type(optimizer)
    assert found.keys() == kept.keys()
    assert all(torch.equal(found[one], value) for one, value in kept.items())
