"""Follow a pickle as joblib loads it: past the elements of arrays, and into the pickles that arrays of objects are."""

from __future__ import annotations

from ckptool.pickles.effects import Listener, Tracer
from ckptool.pickles.joblib_arrays import take_elements
from ckptool.pickles.machine import Machine
from ckptool.pickles.nodes import Call, Inert
from ckptool.pickles.numpy_values import is_wrapper
from ckptool.pickles.tracer import Trace, trace
from ckptool.sources.source import Source


def trace_with_arrays(source: Source, start: int, listener: Listener) -> Trace:
    """Follow a pickle as ``trace`` does, with the arrays of joblib that may lie in it."""

    def on_build(machine: Machine, built: Call) -> Inert:
        if isinstance(machine, Tracer) and is_wrapper(built):
            machine.check_outside_frame()
        return take_elements(machine, built, objects)

    def objects(machine: Machine) -> Inert:
        """Tell of what the pickle of an array of objects does, and return the array."""
        inner = trace(machine.source, machine.position, listener)
        if inner.broken is not None:
            raise machine.malformed(inner.broken)
        machine.skip(inner.end - machine.position, opcodes=True)
        return inner.root

    return trace(source, start, listener, on_build=on_build)
