"""The copies of divergence.recording.keeper with one of their three cares left out."""

import torch
import torch_npu
from commands import captured, divergence

from divergence.recording.keeper import DeviceCopies, SideStream

_copy, _start = SideStream.copy, DeviceCopies.start


def _without_order(self, target, source):
    """The copy is not behind the clone that it reads."""
    with self._module.stream(self._stream):
        target.copy_(source, non_blocking=True)
        event = self._module.Event()
        event.record(self._stream)
    return event


def _without_waiting(self, clone, slot):
    """Who reads the slot waits for nothing."""
    _start(self, clone, slot)
    slot.ready = None


def _without_clone(self, clone, slot):
    """The clone's memory goes to another operator while its copy is under way."""
    _start(self, clone, slot)
    event, _ = self._under_way.pop()
    self._under_way.append((event, torch.empty(0)))


MUTANTS = {
    "none": (SideStream, "copy", _copy),
    "no wait_stream": (SideStream, "copy", _without_order),
    "no event": (DeviceCopies, "start", _without_waiting),
    "no clone": (DeviceCopies, "start", _without_clone),
}


def answers(work, model) -> dict:
    captured(model, "c", "cpu", "--sites", "modules")
    found = {}
    for name, (owner, attribute, changed) in MUTANTS.items():
        before = getattr(owner, attribute)
        setattr(owner, attribute, changed)
        for schedule in torch_npu.SCHEDULES:
            captured(model, "n", "npu", "--sites", "modules", schedule=schedule)
            found[f"{name}, {schedule}"] = divergence("compare", "c", "n").verdict
        setattr(owner, attribute, before)
    return found
