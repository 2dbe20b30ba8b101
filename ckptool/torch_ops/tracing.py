"""Traces how torch code moves tensors, on the device ``meta``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor, cat, empty
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")
View = tuple[T, tuple[int, ...], tuple[int, ...], int]
"""The source of a view; its shape, its strides and its offset, in elements."""


class Tracing(TorchDispatchMode, Generic[T]):  # type: ignore[no-untyped-call]
    """
    Records the source of each tensor.

    ``copied`` returns the source of a copy, given the operation's name, the views that it copies (several for ``cat``
    and ``stack``) and the dimension. Results of other operations have no source.
    """

    def __init__(self, copied: Callable[[str, Sequence[View[T]], int], T]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copied = copied
        self._known: dict[int, tuple[Tensor, T]] = {}

    def run(self, function: Callable[[], Any]) -> Any:
        """Call a function, and record what it does."""
        with self, _Rows():
            return function()

    def tensor(self, what: T, shape: Sequence[int]) -> Tensor:
        """Return a tensor without memory whose source is ``what``."""
        made = empty(tuple(shape), device="meta")
        self._known[_storage(made)] = made, what
        return made

    def view(self, tensor: Tensor) -> View[T] | None:
        """Return a tensor as a view of its source; None if an operation has computed it."""
        found = self._known.get(_storage(tensor))
        shape, stride, begin = map(int, tensor.shape), map(int, tensor.stride()), int(tensor.storage_offset())
        return None if found is None else (found[1], tuple(shape), tuple(stride), begin)

    def __torch_dispatch__(
        self, operation: Any, _types: Any, given: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        made = operation(*given, **(named or {}))
        name, dim = operation._schema.name.removeprefix("aten::"), 0
        if name in ("cat", "stack"):
            parts = [one for one in given[0] if one.numel()]
            dim = int(given[1]) if len(given) > 1 else 0
        elif name in ("clone", "_to_copy"):
            parts = [given[0]]
        else:
            return made  # a view, or something that is computed
        views = [self.view(one) for one in parts]
        known = [one for one in views if one is not None]
        if known and len(known) == len(views) and made.is_contiguous():
            self._known[_storage(made)] = made, self._copied(name, known, dim)
        return made


class _Rows(TorchFunctionMode):
    """Replaces an index that is a list by slices of one row: the dispatched operation does not show which rows."""

    def __torch_function__(
        self, function: Any, _types: Any, given: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        if function is Tensor.__getitem__ and isinstance(given[1], list | tuple):
            whole, index = given[0], given[1] if isinstance(given[1], tuple) else (given[1],)
            dim = next((at for at, one in enumerate(index) if isinstance(one, list)), len(index))
            if dim < len(index) and all(isinstance(one, slice) for one in index[:dim]):
                return cat([whole[(*index[:dim], slice(row, row + 1))] for row in index[dim]], dim)
        return function(*given, **(named or {}))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
