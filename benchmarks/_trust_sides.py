"""Cases of benchmarks/trust.py about sides and operators: other code on one side, truths of the
wrong owner, machines that are not what they seem, operators that are no pair, other scalars."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

import divergence
from benchmarks._trust import (
    BLOCK,
    Bench,
    Case,
    Machine,
    Told,
    abstained,
    finds,
    play,
    refuses,
    right,
    said,
    stays_quiet,
    wrong,
)
from divergence import compare

__all__ = ["CASES"]

HEALTHY = Machine("healthy")


# ── machines whose code is another ──────────────────────────────────────────────────────────────


def _replaced(owner: Callable[[], Any], name: str, wrap: Callable[..., Any]) -> Machine:
    """``wrap(healthy, *args)`` in place of ``owner().name`` for as long as the machine runs."""

    @contextlib.contextmanager
    def patched() -> Iterator[None]:
        healthy = getattr(owner(), name)

        def faulty(*args: Any, **values: Any) -> Any:
            return wrap(healthy, *args, **values)

        with mock.patch.object(owner(), name, faulty):
            yield

    return Machine(f"faulty {name} {wrap.__name__}", patched)


def _llama(name: str) -> Callable[[], Any]:
    def owner() -> Any:
        from transformers.models.llama import modeling_llama

        return getattr(modeling_llama, name) if name else modeling_llama

    return owner


def _is_block(module: Any, number: int = 1) -> bool:
    """Whether this attention lies in that block; other modules carry no number."""
    return getattr(module, "layer_idx", number) == number


def _mlp_scaled(healthy: Any, module: Any, x: torch.Tensor) -> torch.Tensor:
    """A vendor's fused MLP that is 20% too large."""
    return healthy(module, x) * 1.2


def _down_in_8_bits(healthy: Any, module: Any, x: torch.Tensor) -> torch.Tensor:
    """A vendor's MLP that quantises what goes into its last projection to three bits."""
    mid = module.act_fn(module.gate_proj(x)) * module.up_proj(x)
    scale = mid.float().abs().amax().clamp_min(1e-30) / 3
    return module.down_proj(((mid.float() / scale).round() * scale).to(mid.dtype))


def _norm_without_eps(healthy: Any, module: Any, x: torch.Tensor) -> torch.Tensor:
    """Another norm: the mean is subtracted first."""
    return healthy(module, x - x.mean(-1, keepdim=True))


def _attention_scaled(healthy: Any, module: Any, *args: Any, **values: Any) -> Any:
    """Another version of the attention: block 1's scale is 30% larger."""
    before = module.scaling
    module.scaling = before * 1.3 if _is_block(module) else before
    try:
        return healthy(module, *args, **values)
    finally:
        module.scaling = before


def _rotary_shifted(healthy: Any, q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kw: Any) -> Any:
    """Another version of the rotary code: queries come one position late."""
    rotated, _ = healthy(q, k, cos.roll(1, -2), sin.roll(1, -2), *args, **kw)
    return rotated, healthy(q, k, cos, sin, *args, **kw)[1]


MACHINES = {
    "mlp": _replaced(_llama("LlamaMLP"), "forward", _mlp_scaled),
    "quantised": _replaced(_llama("LlamaMLP"), "forward", _down_in_8_bits),
    "norm": _replaced(_llama("LlamaRMSNorm"), "forward", _norm_without_eps),
    "attention": _replaced(_llama("LlamaAttention"), "forward", _attention_scaled),
    "rotary": _replaced(_llama(""), "apply_rotary_pos_emb", _rotary_shifted),
}


def _judge_play(answer: dict[str, Any], printed: str, guilty: str) -> Told:
    """No level and no end may blame the healthy side."""
    healthy = "reference" if guilty == "candidate" else "candidate"
    sides = [level["side"] for level in answer.get("levels", [])] + [answer.get("side")]
    levels = ", ".join(
        f"{one['level']} {one['verdict']} {one['side'] or '-'} {one['site'] or ''}"
        for one in answer.get("levels", [])
    )
    stopped = answer.get("stopped") or ""
    text = f"{levels}; end: {answer.get('side')}; {stopped[:90]}"
    if not answer:
        return abstained("refused: " + printed.strip()[-110:])
    if healthy in sides:
        return wrong(text + f" [blames the {healthy}]")
    if guilty in sides:
        return right(text)
    return abstained(text)


def _candidates_code(bench: Bench, name: str, here: str = "candidate") -> Told:
    a = bench.reference()
    b = bench.capture(like=a, machine=MACHINES[name])
    answer, printed = play(bench, a, b, reference=HEALTHY, candidate=MACHINES[name], here=here)
    return _judge_play(answer, printed, "candidate")


def code_of_candidate_mlp(bench: Bench) -> Told:
    """`localize` on the machine whose MLP code is wrong does not blame the reference."""
    return _candidates_code(bench, "mlp")


def code_of_candidate_quantised(bench: Bench) -> Told:
    """Nor for an MLP that quantises inside."""
    return _candidates_code(bench, "quantised")


def code_of_candidate_norm(bench: Bench) -> Told:
    """Nor for another norm."""
    return _candidates_code(bench, "norm")


def code_of_candidate_attention(bench: Bench) -> Told:
    """Nor for another attention scale in one block."""
    return _candidates_code(bench, "attention")


def code_of_candidate_rotary(bench: Bench) -> Told:
    """Nor for another rotary function."""
    return _candidates_code(bench, "rotary")


def code_seen_from_reference(bench: Bench) -> Told:
    """`localize` on the reference's machine finds the candidate's code as well."""
    return _candidates_code(bench, "attention", here="reference")


def code_of_reference(bench: Bench) -> Told:
    """Where the reference's code is wrong, the healthy candidate is not blamed."""
    machine = MACHINES["attention"]
    a = bench.capture(
        str(bench.model()),
        prompts=("The first of all prompts.",),
        max_new_tokens=3,
        machine=machine,
    )
    b = bench.capture(like=a)
    answer, printed = play(bench, a, b, reference=machine, candidate=HEALTHY, here="reference")
    return _judge_play(answer, printed, "reference")


def truth_of_candidates_code(bench: Bench) -> Told:
    """A truth made by the candidate's faulty code is refused, or blames nobody."""
    a, machine = bench.reference(), MACHINES["attention"]
    b = bench.capture(like=a, machine=machine)
    return refuses(
        lambda: compare(a, b, truth=bench.truth(a, machine=machine)),
        lambda r: finds(r, side="candidate", kinds=("localized", "systematic", "drift")),
    )


def truth_of_another_run(bench: Bench) -> Told:
    """The truth of a run with another fault of its own weights or prompts is refused."""
    a = bench.reference()
    other = bench.reference(prompts=("Other words altogether, and more of them.", "And others."))
    b = bench.capture(like=a, plants=[f"{BLOCK}:out=scale:1.2"])
    return refuses(
        lambda: compare(a, b, truth=bench.truth(other)),
        lambda r: finds(r, block=BLOCK, sides=("candidate",)),
    )


def unseen_variable(bench: Bench) -> Told:
    """The difference hangs on a variable that no field records: what is captured again here does
    not repeat the candidate, and that is said."""
    a = bench.reference()
    b = bench.capture(like=a, machine=MACHINES["attention"])
    answer, printed = play(bench, a, b, reference=HEALTHY, candidate=HEALTHY, here="both")
    stopped = answer.get("stopped") or ""
    if "repeat" in stopped or not answer:
        return abstained(f"stopped: {(stopped or printed.strip())[:110]}")
    return wrong(f"operator {(answer.get('operator') or {}).get('site')}; {stopped[:110]}")


def unseen_variable_auto(bench: Bench) -> Told:
    """The same with nothing said of whose machine this is."""
    a = bench.reference()
    b = bench.capture(like=a, machine=MACHINES["mlp"])
    ran = bench.cli("localize", a, b, "-o", bench.folder("localize"), "--json")
    answer = json.loads(ran.out) if ran.out.startswith("{") else {}
    stopped = answer.get("stopped") or ran.err
    if "repeat" in stopped or (answer.get("commands") and not answer.get("operator")):
        return abstained(stopped[:110])
    return wrong(f"operator {(answer.get('operator') or {}).get('site')}; {stopped[:110]}")


# ── operators ───────────────────────────────────────────────────────────────────────────────────


def _split(model: Any, *, pieces: int = 8) -> None:
    """Block 1's down projection as partial products and additions, as right as one product."""
    linear = model.model.layers[1].mlp.down_proj

    def forward(x: torch.Tensor) -> torch.Tensor:
        parts = zip(x.chunk(pieces, -1), linear.weight.chunk(pieces, -1), strict=True)
        products = [F.linear(part, weight) for part, weight in parts]
        return functools.reduce(torch.add, products)

    linear.forward = forward


def _localized(bench: Bench, a: Any, b: Any, prepare: Any, **values: Any) -> Any:
    return divergence.localize(
        a,
        b,
        out=bench.folder("localize"),
        prepare_candidate=prepare,
        prepare_reference=lambda model: None,
        **values,
    )


def _told_of(found: Any) -> str:
    first = found.operator
    place = "-" if first is None else f"{first.site} ({first.match})"
    return f"operator {place}, side {found.side}; {(found.stopped or '')[:100]}"


def _split_down_proj(bench: Bench, dtype: str, *, healthy: bool) -> Told:
    a = bench.reference(bench.model(dtype=dtype))
    b = bench.capture(like=a, prepare=_split)
    found = _localized(bench, a, b, _split, block=BLOCK)
    text = _told_of(found)
    if found.side == "reference":
        return wrong(text)
    if healthy and found.operator is not None and found.side == "candidate":
        return wrong(text + " [a healthy split is blamed]")
    first = found.operator
    if first is not None and "aten.mm" in first.operator and first.match == "exact":
        return wrong(text + " [one product taken for the pair of one of eight]")
    return right(text)


def split_down_proj_bfloat16(bench: Bench) -> Told:
    """One product against eight partial ones, rounded to bfloat16: the reference is not blamed."""
    return _split_down_proj(bench, "bfloat16", healthy=False)


def split_down_proj_float32(bench: Bench) -> Told:
    """The same in float32, where both are as right: nobody is blamed."""
    return _split_down_proj(bench, "float32", healthy=True)


def split_is_healthy(bench: Bench) -> Told:
    """Split products in float32 raise no alarm."""
    a = bench.reference(bench.model(dtype="float32"))
    return stays_quiet(compare(a, bench.capture(like=a, prepare=_split), truth=bench.truth(a)))


def fused_gate_and_up(bench: Bench) -> Told:
    """Gate and up as one product of twice the width: nobody is blamed."""

    def fuse(model: Any) -> None:
        mlp = model.model.layers[1].mlp

        def forward(x: torch.Tensor) -> torch.Tensor:
            both = F.linear(x, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
            gate, up = both.chunk(2, -1)
            return mlp.down_proj(mlp.act_fn(gate) * up)

        mlp.forward = forward

    a = bench.reference(bench.model(dtype="float32"))
    b = bench.capture(like=a, prepare=fuse)
    found = _localized(bench, a, b, fuse, block=BLOCK)
    return wrong(_told_of(found)) if found.side else right(_told_of(found))


def _scale_attention(model: Any, *, times: float = 1.05) -> None:
    model.model.layers[1].self_attn.scaling *= times


def _scalar(bench: Bench, times: float) -> Told:
    a = bench.reference(bench.model(dtype="float32"))
    prepare = functools.partial(_scale_attention, times=times)
    b = bench.capture(like=a, prepare=prepare)
    found = _localized(bench, a, b, prepare)
    text = found.to_json()
    first = found.operator
    numbers = (0.25, 0.25 * times)  # head size 16
    named = all(any(f"{n:.{d}g}" in text for d in (4, 5, 6)) for n in numbers)
    if found.side == "reference":
        return wrong(_told_of(found))
    if named and first is not None:
        return right(_told_of(found) + " (both numbers told)")
    if found.side is None and first is None:
        return abstained(_told_of(found))
    return wrong(_told_of(found) + " [the scalars are not told]")


def attention_scale_scalar(bench: Bench) -> Told:
    """An attention scale 5% off is named as a scalar argument, with both numbers."""
    return _scalar(bench, 1.05)


def attention_scale_scalar_gross(bench: Bench) -> Told:
    """So is one 50% off."""
    return _scalar(bench, 1.5)


def repro_of_other_scalars(bench: Bench) -> Told:
    """`repro --against` refuses a pair whose scalar arguments differ."""
    a = bench.reference(
        bench.model(dtype="float32"), prompts=1, sites=("blocks", f"ops@{BLOCK}"), weights=True
    )
    b = bench.capture(like=a, prepare=_scale_attention)
    for name in divergence.Run.open(a).sites():
        if "/aten.mul" in name and "self_attn/" in name:
            ran = bench.cli("repro", a, "--site", name, "--against", b, "-o", bench.folder("repro"))
            if "0.25" in ran.text or "0.2625" in ran.text or "other=" in ran.text:
                return abstained(f"exit {ran.code}: {ran.err[:110]}")
            if ran.code == 2 and "scalar" in ran.text:
                return abstained(ran.err[:110])
    return wrong("no operator was refused for its scalars")


def activation_argument(bench: Bench) -> Told:
    """Another keyword (gelu exact against tanh) is named, and the healthy side is not blamed."""

    def exact(model: Any) -> None:
        model.transformer.h[1].mlp.act = torch.nn.GELU(approximate="none")

    a = bench.reference(bench.model("gpt2", dtype="float32"))
    b = bench.capture(like=a, prepare=exact)
    found = _localized(bench, a, b, exact)
    return wrong(_told_of(found)) if found.side == "reference" else right(_told_of(found))


def operator_faults_of_reference(bench: Bench) -> Told:
    """A fault of the reference's own block is blamed on the reference, at every level."""
    healthy = bench.reference()

    def scaled(model: Any) -> None:
        mlp = model.model.layers[1].mlp
        mlp.register_forward_hook(lambda _, __, out: out * 1.3)

    a = bench.capture(like=healthy, prepare=scaled)
    b = bench.capture(like=healthy)
    report = compare(a, b, truth=bench.truth(healthy))
    if report.verdict.side != "reference":
        return finds(report, block=BLOCK, sides=("reference",))
    return right(said(report))


CASES: tuple[Case, ...] = (
    Case("2", "candidate's MLP × 1.2, localize there", code_of_candidate_mlp),
    Case("2", "candidate's MLP quantised inside", code_of_candidate_quantised),
    Case("2", "candidate's norm subtracts the mean", code_of_candidate_norm),
    Case("2", "candidate's attention scale × 1.3 in block 1", code_of_candidate_attention),
    Case("2", "candidate's rotary one position late", code_of_candidate_rotary),
    Case("2", "attention again, localize at the reference", code_seen_from_reference),
    Case("2", "reference's attention scale × 1.3", code_of_reference),
    Case("2", "truth by the candidate's code", truth_of_candidates_code),
    Case("2", "truth of other prompts", truth_of_another_run),
    Case("2", "reference's MLP × 1.3", operator_faults_of_reference),
    Case("3", "attention scale by a hidden variable", unseen_variable),
    Case("3", "MLP × 1.2 by a hidden variable, --here auto", unseen_variable_auto),
    Case("4", "down_proj as 8 products, bfloat16", split_down_proj_bfloat16),
    Case("4", "down_proj as 8 products, float32", split_down_proj_float32),
    Case("4", "nothing: down_proj as 8 products", split_is_healthy),
    Case("4", "nothing: gate and up as one product", fused_gate_and_up),
    Case("5", "attention scale × 1.05", attention_scale_scalar),
    Case("5", "attention scale × 1.5", attention_scale_scalar_gross),
    Case("5", "repro --against other scalars", repro_of_other_scalars),
    Case("5", "gelu exact in place of tanh", activation_argument),
)
