"""``Box``: the folder into which a library saves, and what its own loader gives for each file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Expected(NamedTuple):
    """The weights that a file or folder holds, as the library itself gives them."""

    path: Path
    entries: dict[str, Any]
    key: str | None = None
    choice: str = "auto"
    model: torch.nn.Module | None = None
    """A model of the right architecture, to load into; its own values are replaced by zeros first."""
    member: str = ""
    """Which of the files inside it."""
    wrapped: bool = True
    """Whether a name that wrappers have, as ``module``, is that of a wrapper; if not, names are kept as they are."""

    @property
    def origin(self) -> str:
        """What ckptool is asked to open."""
        return f"{self.path}::{self.member}" if self.member else str(self.path)


class Box:
    """Where one library saves. Every file that is there afterwards is compared with what torch reads in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.expected: list[Expected] = []
        self.failed: list[str] = []
        """What could not be written, and why: the library's own trouble."""

    def path(self, name: str) -> Path:
        """Return a path in the folder; the folders above it are made."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def weights(
        self,
        path: str | Path,
        entries: Mapping[str, Any] | torch.nn.Module,
        *,
        key: str | None = None,
        choice: str = "auto",
        fill: bool = True,
        member: str = "",
        wrapped: bool = True,
        names: Collection[str] | None = None,
    ) -> None:
        """
        Say which weights must be found in a file; those of a module are also loaded into a copy of it.

        ``names`` are those that the file has, where the library leaves out what is tied.
        """
        model = entries if isinstance(entries, torch.nn.Module) else None
        state = entries.state_dict() if model is not None else entries
        there = {name: value for name, value in state.items() if names is None or name in names}
        kept = {name: value.detach().clone() if _is_plain(value) else value for name, value in there.items()}
        where = self.folder / path if isinstance(path, str) else path
        filled = model if fill else None
        self.expected.append(Expected(where, kept, key, choice, filled, member, wrapped))

    def save(
        self, name: str, content: Any, model: torch.nn.Module | None = None, *, wrapped: bool = True, **options: Any
    ) -> Path:
        """Write with ``torch.save``; ``model`` is the one whose weights must be found."""
        path = self.path(name)
        torch.save(content, path, **options)
        if model is not None:
            self.weights(path, model, wrapped=wrapped)
        return path

    def attempt(self, what: str, write: Callable[[], Any]) -> Any:
        """Let a library save in one way; if it cannot, that is noted, and the others go on."""
        try:
            return write()
        except Exception as error:  # noqa: BLE001 - whatever a library raises
            self.failed.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
            return None


def _is_plain(value: object) -> bool:
    kinds = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return isinstance(value, torch.Tensor) and type(value) in kinds and not value.is_quantized


def library(name: str, *modules: str) -> Callable[[Callable[[Box], None]], Callable[[Box], None]]:
    """Mark a function that saves with a library; ``name`` is the package's, as pip knows it."""

    def mark(write: Callable[[Box], None]) -> Callable[[Box], None]:
        write.library = name  # type: ignore[attr-defined]
        return write

    return mark


class Net(torch.nn.Module):
    """Two layers with everything that a state dict can hold: parameters, and buffers of two types."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.ReLU())
        self.head = torch.nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(x))
        return found


def trained(model: torch.nn.Module | None = None, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a net after one step of an optimizer, and the optimizer with its state."""
    model = Net() if model is None else model
    kind = options.pop("optimizer", torch.optim.AdamW)
    optimizer = kind(model.parameters(), **({"lr": 0.01} | options))
    step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, times: int = 2) -> None:
    """Train a net of this module a little."""
    for _ in range(times):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.randn(5, 3)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
