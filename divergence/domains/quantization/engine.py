"""A quantised variant of a model of transformers, simulated: ``--engine quantize``.

The matrices are those of the checkpoint, and so are their digests; what multiplies with them
follows a scheme (see ``scheme``). Where scales come from calibration the model runs on the run's
own tokens first, in floating point; what was found is recorded, and a capture ``like`` that run
takes it from there. So another machine runs the very same quantised model.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import torch
from torch import nn

from divergence.domains.quantization.coding import Quantizer
from divergence.domains.quantization.model import CalibrationWatch as Watch
from divergence.domains.quantization.model import (
    QuantizationTarget,
    QuantizedCache,
    QuantizedWeight,
    calibration_of,
    chosen,
    install,
    quantized_weight,
    targets_of,
    uninstall,
    use_plain_experts,
    watching,
)
from divergence.domains.quantization.scheme import Scheme, scheme_named
from divergence.domains.quantization.watching import CACHE
from divergence.errors import UsageError
from divergence.recording.engines.engine import EngineOptions, run_group
from divergence.recording.engines.load import LoadedModel, Loading, load_model
from divergence.recording.engines.sessions import TorchSession
from divergence.recording.forwards import patched
from divergence.run.manifest import (
    Calibration,
    EngineNote,
    EngineValue,
    Manifest,
    ModelIdentity,
    QuantizationNote,
    QuantizedNumbers,
    QuantizedScheme,
    SampleTokens,
)
from divergence.run.site import starred


class QuantizeOptions(EngineOptions, frozen=True, kw_only=True):
    """Says which scheme, and what is left out of it."""

    opens_files: ClassVar[bool] = False
    scheme: str = "w8a8"
    smooth: float | None = None
    """α of SmoothQuant's migration of outliers."""
    asymmetric: str = ""
    """What gets a zero point: ``weights``, ``activations``, ``both``."""
    weights_per: str = ""
    """``tensor``, ``channel``, ``group:N``."""
    activations_per: str = ""
    """``tensor``, ``token``, ``group:N``."""
    keep: str = ""
    """What stays in floating point beside the head and routers, by commas: names of matrices,
    ``re:`` and a regular expression, or classes. ``!NAME`` quantises what is kept otherwise."""


class QuantizeEngine:
    """Models of transformers under a scheme."""

    name: ClassVar[str] = "quantize"
    Options: ClassVar[type[EngineOptions]] = QuantizeOptions

    def load(self, loading: Loading, options: QuantizeOptions) -> QuantizeSession:
        given = msgspec.structs.asdict(options)
        how = {name: value for name, value in given.items() if name not in ("scheme", "keep")}
        scheme = scheme_named(options.scheme, **how)
        if loading.ranks is not None or loading.device_map is not None:
            raise UsageError(
                "--engine quantize runs on one device", hint="leave out --mesh and --device-map"
            )
        loaded = load_model(loading)
        use_plain_experts(loaded.module)
        return QuantizeSession(loaded, given, scheme=scheme)


def keep_of(text: str) -> list[str]:
    """Patterns, by commas; a regular expression goes up to the next one, or to the end."""
    before, *expressions = re.split(r"(?:^|,)\s*(?=!?re:)", text)
    return [pattern.strip() for pattern in (*before.split(","), *expressions) if pattern.strip()]


class QuantizeSession(TorchSession):
    """A model under a scheme, which is put in place once the tokens are known."""

    name: ClassVar[str] = "quantize"

    def __init__(
        self, loaded: LoadedModel, options: Mapping[str, EngineValue], *, scheme: Scheme
    ) -> None:
        super().__init__(loaded, options)
        self.scheme = scheme
        targets = targets_of(loaded.module)
        if not targets:
            raise UsageError(
                f"{loaded.source} has no matrix that a scheme could quantise",
                hint="nn.Linear, Conv1D and experts of transformers are known",
            )
        if scheme.kv is not None and loaded.task == "encoder":
            raise UsageError(
                f"{scheme.name}: an encoder keeps no keys and values", hint="leave out kv8"
            )
        if scheme.weights is None:  # there is nothing to choose from
            targets = {}
        self.targets = {tgt.name: tgt for tgt in chosen(targets, keep_of(str(options["keep"])))}
        self.kept = [name for name in targets if name not in self.targets]
        self.calibration: Calibration | None = None
        self._cache = contextlib.ExitStack()
        self.watches: Mapping[str, Watch] = {}

    def settle(
        self, samples: Sequence[SampleTokens], forced: list[list[int]] | None, like: Manifest | None
    ) -> None:
        self.calibrate(samples, None if like is None else like.engine)
        if self.scheme.weights is not None:
            install({name: (t, self.weight(t)) for name, t in self.targets.items()})
        self._cache.enter_context(quantised_cache(self.scheme.kv, self.loaded.module))

    def calibrate(self, samples: Sequence[SampleTokens], like: EngineNote | None = None) -> None:
        """Find the scales that must be known before, where there are any: those of the run that is
        repeated, if it is of the same scheme, else from running on the prompts."""
        if not self.scheme.static and self.scheme.smooth is None:
            return
        recorded = None if like is None else like.calibration
        own = self.options.items()
        if like is not None and recorded and all(like.options.get(key) == v for key, v in own):
            self.calibration = recorded
            return
        if any(sample.inputs for sample in samples):
            raise UsageError(
                f"{self.scheme.name} finds scales on the prompts' text, and they have pictures or "
                "sound",
                hint="a scheme without calibration, or prompts of text",
            )
        with watching(self.loaded.module, targets_of(self.loaded.module)) as self.watches:
            for sample in samples:
                run_group(
                    self.loaded, [SampleTokens(prompt_ids=sample.prompt_ids)], max_new_tokens=0
                )
        self.calibration = calibration_of(self.watches, self.targets, self.scheme)

    def weight(self, target: QuantizationTarget) -> list[QuantizedWeight]:
        """Its matrices under the scheme. One that is kept has the scales that it would have alone,
        and none migrated."""
        calibration = self.calibration
        if calibration is not None and target.name not in self.targets:
            alone = msgspec.structs.replace(self.scheme, smooth=None)
            calibration = calibration_of(self.watches, {target.name: target}, alone)
        return quantized_weight(target, self.scheme, calibration)

    def identity(self, on_parameter: Callable[[int, int, str], None]) -> ModelIdentity:
        identity = super().identity(on_parameter)
        scheme, places = self.scheme, sorted({starred(name) for name in self.targets})
        weights = _numbers(scheme.weights, dynamic=False)
        quantized_scheme = QuantizedScheme(
            weights=weights,
            activations=_numbers(scheme.activations, dynamic=not scheme.static),
            modules=places,
            num_modules=len(self.targets),
        )
        identity.quantization = QuantizationNote(
            method="simulated",
            schemes=[] if weights is None else [quantized_scheme],
            kv_cache=_numbers(scheme.kv, dynamic=True),
            kept=sorted({starred(name) for name in self.kept}),
        )
        return identity

    def note(self) -> EngineNote:
        note = super().note()
        note.facts = {"scheme": str(self.scheme), "quantised": f"{len(self.targets)} matrices"}
        note.facts["kept"] = ", ".join(self.kept[:8]) + (
            f" and {len(self.kept) - 8} more" if len(self.kept) > 8 else ""
        )
        note.calibration = self.calibration
        return note

    def close(self) -> None:
        self._cache.close()
        uninstall(self.loaded.module)


def _numbers(quantizer: Quantizer | None, *, dynamic: bool) -> QuantizedNumbers | None:
    if quantizer is None:
        return None
    return QuantizedNumbers(
        kind="float" if quantizer.is_float else "int",
        bits=4 if quantizer.format == "int4" else 8,
        per=quantizer.per,
        group_size=quantizer.group,
        symmetric=quantizer.symmetric,
        dynamic=dynamic,
    )


@contextlib.contextmanager
def quantised_cache(quantizer: Quantizer | None, model: nn.Module) -> Iterator[set[int]]:
    """Keys and values go through codes before a cache of transformers holds them; (B, heads, T, D),
    a scale for each token and head. The step that makes them reads them from there too. Gives the
    numbers of the layers that filled a cache."""
    if quantizer is None:
        yield set()
        return
    from transformers import cache_utils

    kind: Any = cache_utils.Cache
    original, between = kind.update, QuantizedCache(quantizer)

    def update(
        self: Any, key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **kw: Any
    ) -> Any:
        key, value = between.through(layer, "k", key), between.through(layer, "v", value)
        return original(self, key, value, layer, *args, **kw)

    with patched(kind, "update", update), patched(model, CACHE, between):
        yield between.filled
