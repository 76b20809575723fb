"""record(): a run of any torch module, whatever feeds it.

    with divergence.record(module, out="a") as recording:
        recording.step(x)

Each step is one forward, and one sample of the run: its inputs and outputs are recorded at the
module's own sites. Two such runs are compared like any other; there are no tokens, and no anchored
pass, so places are seen in free runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from divergence.errors import UsageError
from divergence.numerics.formats import format_of
from divergence.options.commands import CaptureOptions
from divergence.recording.engines.derived import derived_state
from divergence.recording.engines.identity import usual_dtype
from divergence.recording.modules import Recorder
from divergence.recording.new_run import check_output, provenance
from divergence.recording.selection import SiteSelection
from divergence.recording.structure import describe_modules
from divergence.run.location import location_of
from divergence.run.manifest import (
    Manifest,
    ModelIdentity,
    Plan,
    SampleTokens,
    Settings,
    Tokens,
    digest_many,
    digest_tensor,
)
from divergence.run.reader import Run
from divergence.run.writer import RunWriter

Inputs = torch.Tensor | tuple[torch.Tensor, ...] | Mapping[str, torch.Tensor]
"""What one forward is given: its only argument, all of them, or named ones."""
_APPLY = ("sites", "label")


class Recording:
    """What ``record`` hands out."""

    def __init__(self, module: torch.nn.Module, recorder: Recorder, manifest: Manifest) -> None:
        self._module, self._recorder, self._manifest = module, recorder, manifest

    @property
    def num_steps(self) -> int:
        return len(self._manifest.tokens.samples)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """One forward of the module, without gradients; returns what the module does."""
        number, tokens = self.num_steps, self._manifest.tokens
        tokens.samples.append(SampleTokens(prompt_ids=[]))
        tokens.groups.append([number])
        self._recorder.begin(sample=number, batch=1, num_tokens=0)
        with self._recorder.installed(), torch.no_grad():
            return self._module(*args, **kwargs)


@contextlib.contextmanager
def record(
    module: torch.nn.Module,
    *,
    out: str | Path,
    sites: str | Sequence[str] = ("modules",),
    label: str | None = None,
    force: bool = False,
) -> Iterator[Recording]:
    """Record every ``step`` of ``module`` into the run ``out``, complete when the block ends.

    ``sites``: as in ``capture``. ``label``: what to call this machine. The module runs as it is: in
    the mode (train or eval), dtype and device that it is in. A block that raises leaves an
    incomplete run, which can be read.

    Raises UsageError for what is no module, for sites that it has not, and where no step was made;
    RunExistsError where ``out`` holds something and ``force`` is false.
    """
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"{type(module).__name__} is no torch.nn.Module", hint="record(module, …)")
    place = location_of(out)
    check_output(place, force=force, like=None)
    notes = describe_modules(module)
    selection = SiteSelection([sites] if isinstance(sites, str) else list(sites), notes)
    # class and weights: equal weights have equal digests, as in a capture
    state = {name: t for name, t in module.state_dict().items() if isinstance(t, torch.Tensor)}
    digests = {name: digest_tensor(tensor) for name, tensor in state.items()}
    sizes = [
        (format_of(tensor.dtype).name, tensor.numel())
        for tensor in state.values()
        if tensor.is_floating_point()
    ]
    identity = ModelIdentity(
        source=type(module).__qualname__,
        model_class=type(module).__name__,
        task="encoder",
        config_digest="",
        dtype=usual_dtype(sizes) or "float32",
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        digest=digest_many(digests),
        digests=digests,
        derived=derived_state(module),
    )
    device = next((str(parameter.device) for parameter in module.parameters()), "cpu")
    manifest = Manifest(
        **provenance(device, label=label, command=None),
        model=identity,
        tokens=Tokens(samples=[], groups=[]),
        settings=Settings(
            deterministic=torch.are_deterministic_algorithms_enabled(), seed=0, device=device,
            max_new_tokens=1, batch=False,
        ),
        plan=Plan(
            passes=["free"], sites=selection.sites,
            modules={path: note for path, note in notes.items() if path in selection.hooked},
        ),
    )  # fmt: skip
    with RunWriter(place, manifest, force=force) as writer:
        recorder = Recorder(
            module, notes, wanted=selection.wanted, hooked=selection.hooked, sink=writer
        )
        recording = Recording(module, recorder, manifest)
        yield recording
        if not recorder.num_emitted:
            raise UsageError("no step was made, or no tensor passed the sites", where=str(out),
                             hint="with record(module, out=...) as r: r.step(x)")  # fmt: skip
    Run.open(place)


def capture_inputs(
    module: object, inputs: Sequence[Inputs] | None, *, out: str | Path,
    sites: str | Sequence[str], label: str | None, force: bool,
) -> Run:  # fmt: skip
    """The run of ``module``, one step for each of ``inputs``. Raises what ``record`` raises, and
    UsageError for inputs that are none."""
    if not isinstance(module, torch.nn.Module):
        raise UsageError(
            f"inputs are for a torch.nn.Module, and the model is {type(module).__name__}",
            hint="capture(module, inputs=[x], out=...), or a path with prompts=...",
        )
    if isinstance(inputs, torch.Tensor | Mapping | str) or not inputs:
        raise UsageError(
            "a module needs inputs: a list with one entry for each forward",
            hint="capture(module, inputs=[x], out=...); a tuple holds several arguments, a dict "
            "named ones",
        )
    with record(module, out=out, sites=sites, label=label, force=force) as recording:
        for given in inputs:
            if isinstance(given, Mapping):
                recording.step(**given)
            else:
                recording.step(*(given if isinstance(given, tuple) else (given,)))
    return Run.open(out)


def refuse_beside_inputs(options: CaptureOptions, like: object) -> None:
    """Raise UsageError where an option was given that a module alone cannot follow."""
    given = ["like"] if like is not None else []
    given += [
        name for name, value in vars(options).items()
        if value != getattr(CaptureOptions(), name) and name not in _APPLY
    ]  # fmt: skip
    if given:
        raise UsageError(
            f"{', '.join(given)}: a module is run as it is, on its inputs",
            hint="inputs, out, sites, label and force apply; capture(PATH, ...) takes all others",
        )
