"""Training steps: healthy pairs of machines; faults in the backward, the reduction and the step.

    python benchmarks/training.py             # both tables; ten minutes on two cores
    python benchmarks/training.py --health    # healthy pairs alone
    python benchmarks/training.py --faults    # planted faults alone

Models of random weights of three architectures, four blocks, five prompts of 9 to 31 tokens.
Healthy pairs: one machine in two processes that run other CPU kernels (see _machines.py), another
attention kernel, batches, gradient checkpointing, autocast. Faults are wrong code (a backward of
the model's own, a loop that treats gradients wrongly) on the candidate's side and on the
reference's by turns; the healthy side runs another attention kernel. The truth is float64.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import divergence
from benchmarks._machines import Machine, planting
from divergence import Report, Run, TrainOptions
from divergence.domains.training.recording import optimizer
from divergence.domains.training.recording import step as session
from tests.models import tiny

ARCHITECTURES = ("llama", "gpt2", "qwen3-moe")
BLOCK = 1
"""The block of which a fault of the model's is planted."""
PROMPTS = [
    [(7 * place + 13 * number) % 90 + 5 for place in range(length)]
    for number, length in enumerate((17, 9, 31, 12, 24))
]
HEALTHY: dict[str, dict[str, Any]] = {
    "sdpa": {"attn_implementation": "sdpa"},
    "one batch": {"batch": True},
    "checkpointing": {"training": TrainOptions(gradient_checkpointing=True)},
    "autocast bfloat16": {"training": TrainOptions(autocast="bfloat16")},
    "two threads": {"threads": 2},
}

Prepare = Callable[[torch.nn.Module], None]


Models = dict[tuple[str, str], Path]
"""By architecture and dtype."""


def tables(
    doc: str | None,
    health: Callable[[Models, Path], None],
    faults: Callable[[Models, Path], None],
    *,
    num_blocks: int,
) -> None:
    """What the command line of a program with these two tables does."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--health", action="store_true", help="healthy pairs alone")
    parser.add_argument("--faults", action="store_true", help="faults alone")
    given = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="divergence-training-") as folder:
        models = {
            (name, dtype): tiny.build(
                name, Path(folder) / f"{name}-{dtype}", dtype=dtype, num_blocks=num_blocks
            )
            for name in ARCHITECTURES
            for dtype in ("float32", "bfloat16")
        }
        if not given.faults:
            health(models, Path(folder))
        if not given.health:
            faults(models, Path(folder))


@contextlib.contextmanager
def machines() -> Iterator[dict[str, Machine]]:
    """Processes that run other CPU kernels, by name."""
    started = {name: Machine(name) for name in ("old", "aten-avx2", "mkl-compatible")}
    yield started
    for machine in started.values():
        machine.close()


def captured_by(machine: Machine, a: Run, out: Path) -> Run:
    """``a`` again, on that machine."""
    machine.ask("capture", like=str(a.path), out=str(out), probe=False)
    machine.wait()
    return Run.open(out)


# --- healthy pairs ------------------------------------------------------------------------------


def health(models: Models, folder: Path) -> None:
    print("| pair | architecture | dtype | verdict | with a truth | largest share of a limit |")
    print("|---|---|---|---|---|---|")
    count = itertools.count()
    with machines() as others:
        for (architecture, dtype), model in models.items():
            a = step(model, folder / f"h{next(count)}")
            truth = divergence.truth(a, out=folder / f"h{next(count)}")
            for name, options in HEALTHY.items():
                if name.startswith("autocast") and dtype != "float32":
                    continue
                b = step(None, folder / f"h{next(count)}", like=a, **options)
                show(name, architecture, dtype, a, b, truth)
            for name, machine in others.items():
                b = captured_by(machine, a, folder / f"h{next(count)}")
                show(f"kernels: {name}", architecture, dtype, a, b, truth)


def show(name: str, architecture: str, dtype: str, a: Run, b: Run, truth: Run) -> None:
    plain, judged = divergence.compare(a, b), divergence.compare(a, b, truth=truth)
    usage = max(site.limit_usage or 0.0 for site in judged.sites)
    cells = (name, architecture, dtype, plain.verdict.kind, judged.verdict.kind, f"{usage:.0%}")
    print("|", " | ".join(cells), "|", flush=True)


def step(model: Path | None, out: Path, **options: Any) -> Run:
    fresh: dict[str, Any] = {}
    if model is not None:
        step = TrainOptions(train=True, optimizer="adamw", clip_grad_norm=0.1, loss_scale=256.0)
        fresh = {"prompts": PROMPTS, "training": step}
    return divergence.capture(
        None if model is None else str(model),
        out=out,
        machine=divergence.MachineOptions(probe=False),
        **fresh,
        **options,
    )


# --- faults of the model's own code ----------------------------------------------------------


def inside(model: torch.nn.Module, *names: str) -> torch.nn.Module:
    """A module of the block by the first of these names that it has."""
    blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    known = dict(blocks[BLOCK].named_modules())
    return next(known[name] for name in names if name in known)


def scaled(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 4.0


def attention_scale(model: torch.nn.Module) -> None:
    """The backward of attention leaves out the scale by which queries are multiplied."""
    part = inside(model, "self_attn.q_proj", "attn.c_attn")

    def hook(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(scaled)

    part.register_forward_hook(hook)


class _WrongNorm(torch.autograd.Function):
    """RMS or layer norm whose backward adds the projection that is to be taken off."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, centred: bool, eps: float) -> torch.Tensor:
        wide = x.float() if x.dtype != torch.float64 else x
        wide = wide - wide.mean(-1, keepdim=True) if centred else wide
        rate = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        context.save_for_backward(wide * rate, rate)
        return (wide * rate).to(x.dtype)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        normed, rate = context.saved_tensors
        wide = gradient.to(normed.dtype)
        along = (wide * normed).mean(-1, keepdim=True)
        return (rate * (wide + normed * along)).to(gradient.dtype), None, None


def norm_sign(model: torch.nn.Module) -> None:
    """One term of a norm's backward has the wrong sign."""
    norm: Any = inside(model, "post_attention_layernorm", "ln_2")
    centred = isinstance(norm, torch.nn.LayerNorm)
    eps = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", 1e-6)

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = norm.weight * _WrongNorm.apply(x, centred, eps)
        return out + norm.bias if centred else out

    norm.forward = forward


class _CoarseSum(torch.autograd.Function):
    """x w^T, the gradient of w being summed over tokens in bfloat16."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = context.saved_tensors
        total = torch.zeros_like(weight, dtype=torch.bfloat16)
        for row, out in zip(x.flatten(0, -2), gradient.flatten(0, -2), strict=True):
            total = (total.float() + torch.outer(out, row).float()).bfloat16()
        return gradient @ weight, total.to(weight.dtype)


def coarse_weights(model: torch.nn.Module) -> None:
    """A weight's gradient is accumulated in bfloat16."""
    part: Any = inside(model, "mlp.down_proj", "mlp.c_proj", "self_attn.o_proj")  # not of experts
    turned = type(part).__name__ == "Conv1D"

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight = part.weight.t() if turned else part.weight
        out = _CoarseSum.apply(x, weight)
        return out if part.bias is None else out + part.bias

    part.forward = forward


# --- faults of the loop -------------------------------------------------------------------------


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old)


def reducing(change: Callable[[list[Any]], None]) -> contextlib.AbstractContextManager[None]:
    reduce = optimizer.Stepping.reduce

    def wrong(self: Any, named: Any) -> Any:
        held = reduce(self, named)
        change([parameter for *_, parameter in held])
        return held

    return patched(optimizer.Stepping, "reduce", wrong)


def wrong_divisor() -> contextlib.AbstractContextManager[None]:
    """Averaged over two ranks where the loss was a mean over both already."""

    def halve(parameters: list[Any]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad / 2

    return reducing(halve)


def skipped_prompt() -> contextlib.AbstractContextManager[None]:
    """The third micro-batch's gradients are left out."""
    backward = session.TrainRecorder.backward

    def wrong(self: Any, loss: torch.Tensor, share: float = 1.0) -> None:
        backward(self, loss, 0.0 if self.sample == 2 else share)

    return patched(session.TrainRecorder, "backward", wrong)


def stale_bucket() -> contextlib.AbstractContextManager[None]:
    """Some parameters' gradients are sent before the last micro-batch has been added."""
    backward, kept = session.TrainRecorder.backward, {}

    def wrong(self: Any, loss: torch.Tensor, share: float = 1.0) -> None:
        if self.sample == len(PROMPTS) - 1:
            bucket = [p for n, p in self._model.named_parameters() if ".2." in n]
            kept.update({id(p): p.grad.clone() for p in bucket if p.grad is not None})
        backward(self, loss, share)

    def stale(parameters: list[Any]) -> None:
        for parameter in parameters:
            if id(parameter) in kept:
                parameter.grad = kept[id(parameter)] / 256.0
        kept.clear()

    stack = contextlib.ExitStack()
    stack.enter_context(patched(session.TrainRecorder, "backward", wrong))
    stack.enter_context(reducing(stale))
    return stack


def clipped_first() -> contextlib.AbstractContextManager[None]:
    """Gradients are clipped before the loss's factor is divided out of them."""
    step = optimizer.Stepping.step

    def wrong(self: Any, named: Any, held: Any) -> Any:
        parameters = [p for *_, p in held if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(parameters, 0.1 / 256.0)
        return step(self, named, held)

    return patched(optimizer.Stepping, "step", wrong)


def decayed_norms() -> contextlib.AbstractContextManager[None]:
    """Weight decay is applied to norms as well."""
    make = torch.optim.AdamW

    def wrong(groups: Any, **how: Any) -> Any:
        decay = max(group["weight_decay"] for group in groups)
        return make([{**group, "weight_decay": decay} for group in groups], **how)

    return patched(torch.optim, "AdamW", wrong)


MODEL_FAULTS: dict[str, tuple[Prepare, str]] = {
    "attention's scale left out of its backward": (attention_scale, "block"),
    "wrong sign of a term in a norm's backward": (norm_sign, "block"),
    "weight gradient summed in bfloat16": (coarse_weights, "weight"),
}
LOOP_FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "wrong divisor of the mean": (wrong_divisor, "parameters"),
    "a micro-batch left out": (skipped_prompt, "prompt"),
    "stale bucket": (stale_bucket, "bucket"),
    "clipped before unscaled": (clipped_first, "optimizer"),
    "weight decay on norms": (decayed_norms, "norms"),
}


def right(where: str, report: Report) -> bool:
    """Is the onset where the fault is?"""
    onset = report.verdict.onset
    if onset is None:
        return False
    site, block = onset.site, onset.block or ""
    return {
        "block": onset.phase == "backward" and block.endswith(f".{BLOCK}"),
        "weight": site.endswith(
            tuple(f"{one}#backward:out.weight" for one in ("down_proj", "c_proj", "o_proj"))
        )
        and block.endswith(f".{BLOCK}"),
        "parameters": onset.phase == "backward" and ":out." in site,
        "prompt": onset.phase == "backward" and onset.sample == 2,
        "bucket": onset.phase == "backward" and block.endswith(".2") and ":out." in site,
        "optimizer": site.partition(":")[2].startswith("in.") and onset.phase == "optimizer",
        "norms": onset.phase == "optimizer"
        and any(one in site for one in ("norm", "ln_", ".bias")),
    }[where]


def faults(models: Models, folder: Path) -> None:
    print("\n| fault | architecture | dtype | side | verdict | onset | place | side named |")
    print("|---|---|---|---|---|---|---|---|")
    count, sides = itertools.count(), itertools.cycle(("candidate", "reference"))
    found = wrong = total = 0
    for (architecture, dtype), model in models.items():
        for name, (plant, where) in {**MODEL_FAULTS, **LOOP_FAULTS}.items():
            side, in_model = next(sides), name in MODEL_FAULTS
            runs = []
            for own in ("reference", "candidate"):
                bad = own == side
                options: dict[str, Any] = (
                    {} if own == "reference" else {"like": runs[0], "attn_implementation": "sdpa"}
                )
                if bad and in_model:
                    options["prepare"] = planting(
                        lambda model, *_, plant=plant, **__: plant(model), name, None, 1.0
                    )
                with plant() if bad and not in_model else contextlib.nullcontext():
                    runs.append(
                        step(
                            model if own == "reference" else None,
                            folder / f"f{next(count)}",
                            **options,
                        )
                    )
            truth = divergence.truth(runs[0], out=folder / f"f{next(count)}")
            report = divergence.compare(*runs, truth=truth)
            verdict = report.verdict
            placed, sided = right(where, report), verdict.side == side
            total, found = total + 1, found + (placed and sided)
            blamed = verdict.side in ("candidate", "reference") and not sided
            wrong += blamed or (verdict.onset is not None and not placed)
            site = "-" if verdict.onset is None else verdict.onset.site
            cells = (
                name,
                architecture,
                dtype,
                side,
                verdict.kind,
                site,
                "right" if placed else "-" if verdict.onset is None else "WRONG",
                str(verdict.side),
            )
            print("|", " | ".join(cells), "|", flush=True)
    print(f"\n{found} of {total} named at the right place and side, {wrong} wrongly")


if __name__ == "__main__":
    tables(__doc__, health, faults, num_blocks=4)
