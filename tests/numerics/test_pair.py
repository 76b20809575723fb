"""measure_pair against exact arithmetic (mpmath, 80 digits) and on its own definitions."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from divergence.numerics import pairs as pair_module
from divergence.numerics.formats import FORMATS, format_of

REL = 1e-6
CHOSEN: dict = {}


@pytest.fixture(autouse=True)
def all_kernels(kernel_or_device):
    """Every test below holds for each of them."""
    CHOSEN.clear()
    CHOSEN.update(kernel_or_device)


def measure_pair(a, b, **options):
    """(metrics, rel_l2 of each row)."""
    metrics, rows = pair_module.measure_pair(a, b, **CHOSEN, **options)
    return metrics, torch.from_numpy(rows.rel_l2)


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def _noise(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _pair(shape, dtype, *, eps=1e-2, seed=0):
    a = _noise(shape, seed)
    return a.to(dtype), (a * (1 + eps * _noise(shape, seed + 1))).to(dtype)


def _ratio(x, y):
    return float(x / y) if y else (math.inf if x else 0.0)


def _norm(values):
    return mpmath.sqrt(mpmath.fsum(value * value for value in values))


def _exact(a, b):
    """Whole, per-row and per-channel metrics of two finite float tensors, by definition."""
    with mpmath.workdps(80):
        cols = a.shape[-1] if a.ndim else 1
        x = [mpmath.mpf(v) for v in a.to(torch.float64).reshape(-1).tolist()]
        y = [mpmath.mpf(v) for v in b.to(torch.float64).reshape(-1).tolist()]
        d = [p - q for p, q in zip(x, y, strict=True)]
        norm_a, norm_b, norm_d = _norm(x), _norm(y), _norm(d)
        inner = mpmath.fdot(x, y)
        rows = [
            _ratio(_norm(d[i : i + cols]), _norm(x[i : i + cols])) for i in range(0, len(x), cols)
        ]
        unit = max(format_of(t.dtype).unit_roundoff for t in (a, b))
        floor = unit * norm_a / mpmath.sqrt(cols)
        channels = [_ratio(_norm(d[c::cols]), max(_norm(x[c::cols]), floor)) for c in range(cols)]
        products = [p * q for p, q in zip(x, d, strict=True)]
        n = len(x)
        spread = mpmath.fdot(products, products) - mpmath.fsum(products) ** 2 / n
        if norm_a and norm_b:
            one_minus_cosine = 1 - inner / (norm_a * norm_b)
        else:
            one_minus_cosine = 0 if not norm_d else 1
        return {
            "rel_l2": _ratio(norm_d, norm_a),
            "one_minus_cosine": float(one_minus_cosine),
            "reference_norm": float(norm_a),
            "candidate_norm": float(norm_b),
            "max_abs": float(max(abs(v) for v in d)),
            "gain": float(inner / norm_a**2 - 1) if norm_a else 0.0,
            "gain_se": (
                float(mpmath.sqrt(spread * n / (n - 1)) / norm_a**2)
                if norm_a and n > 1
                else math.inf
            ),
            "channel_rel_l2_max": max(channels),
            "rows": rows,
        }


def _check(a, b, *, found=None, **options):
    """Every metric within 1e-6 of the exact one; gain within 1e-6 of itself and its error."""
    metrics, rows = found or measure_pair(a, b, **options)
    exact = _exact(a, b)
    for name in "rel_l2 reference_norm candidate_norm max_abs channel_rel_l2_max gain_se".split():
        assert getattr(metrics, name) == pytest.approx(exact[name], rel=REL, abs=0), name
    # An angle of 2^-53 is all that float64 arithmetic can tell from none: 1 - cos = 6e-33.
    wanted = exact["one_minus_cosine"]
    assert metrics.one_minus_cosine == pytest.approx(wanted, rel=REL, abs=1e-32)
    slack = 1e-70 + (REL * metrics.gain_se if math.isfinite(metrics.gain_se) else 0.0)
    assert metrics.gain == pytest.approx(exact["gain"], rel=REL, abs=slack)
    assert rows.tolist() == pytest.approx(exact["rows"], rel=REL, abs=0)
    assert metrics.token_rel_l2_max == pytest.approx(max(exact["rows"]), rel=REL, abs=0)
    if metrics.max_abs_index is not None:
        at_a, at_b = a[metrics.max_abs_index].item(), b[metrics.max_abs_index].item()
        assert (metrics.max_abs_reference, metrics.max_abs_candidate) == (at_a, at_b)
    return metrics


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (64,), (2, 3, 37), (5, 300), (700, 1), (1, 2500)])
def test_all_metrics_against_exact_arithmetic(dtype, shape):
    """Ordinary pairs of any shape are measured to 1e-6 relative."""
    _check(*_pair(shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_massive_activations_and_a_sink_token(dtype):
    """A channel 1e4 times the rest and a sink token hide nothing in rows and channels."""
    scale = torch.ones(12, 50, dtype=torch.float64)
    scale[:, 7] = 1e4 if dtype is not torch.float16 else 1e3
    scale[0] = 500.0 if dtype is not torch.float16 else 10.0
    a, b = _noise((12, 50)), _noise((12, 50), 1)
    metrics = _check((a * scale).to(dtype), (a * scale * (1 + 1e-2 * b)).to(dtype))
    assert metrics.gain_se > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e30, 1e-20, 1e-30, 1e-37])
def test_squares_beyond_float32(dtype, scale):
    """Values whose squares overflow or vanish in float32 are measured in float64."""
    a, b = _noise((6, 40)) * scale, _noise((6, 40), 1) * scale
    _check(a.to(dtype), (a + 1e-2 * b).to(dtype))
    a[2], b[2] = a[2] / scale, b[2] / scale  # one ordinary row among them
    _check(a.to(dtype), (a + 1e-2 * b).to(dtype))


def test_subnormals():
    """Subnormal float32 values and differences of one step keep all digits."""
    a = torch.arange(1, 201, dtype=torch.float32).reshape(4, 50) * 1.4e-45
    _check(a, a + 1.4e-45)
    _check(torch.ones(4, 50), torch.ones(4, 50) - torch.finfo(torch.float32).eps / 2)


@pytest.mark.parametrize("scale", [1e300, 1e-200])
def test_float64_beyond_the_square_root_of_its_range(scale):
    """float64 values whose squares leave float64 are scaled, and norms scaled back."""
    a, b = _noise((3, 30)) * scale, _noise((3, 30), 1) * scale
    found = measure_pair(a, a + 1e-3 * b)
    exact = _exact(a, a + 1e-3 * b)
    assert found[0].rel_l2 == pytest.approx(exact["rel_l2"], rel=REL)
    assert found[0].reference_norm == pytest.approx(exact["reference_norm"], rel=REL, abs=0)
    assert found[0].max_abs == exact["max_abs"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-2, 1e-5, 3e-8])
def test_tiny_angles(dtype, size):
    """1 - cos near 1e-15 is right to 1e-6, where the textbook form answers 0."""
    a = torch.zeros(2, 500, dtype=dtype)
    b = a.clone()
    a[0], b[0] = 1.0, 1.0
    b[1] = size * _noise((500,)).to(dtype)  # at right angles to a
    metrics = _check(a, b)
    assert metrics.one_minus_cosine == pytest.approx(0.5 * size**2, rel=0.2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [1 + 2**-7, 0.5, -1.0, 1e-3, 3.0, 1 + 2**-20])
def test_pure_scale_differences(dtype, factor):
    """A candidate that is a scaled reference: the angle left is that of rounding alone."""
    a = _noise((8, 100)).to(dtype)
    _check(a, (a.to(torch.float64) * factor).to(dtype))


def test_an_exact_scale_has_no_angle():
    """Twice the reference points the same way, to the last bit, and gain says so."""
    a = _noise((8, 100)).to(torch.float32)
    metrics, _ = measure_pair(a, 2 * a)
    assert (metrics.cosine, metrics.one_minus_cosine) == (1.0, 0.0)
    assert metrics.gain == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.bfloat16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
        (torch.float16, torch.float8_e4m3fn),
    ],
)
def test_different_dtypes_are_widened(x, y):
    """Two formats are compared by value, and ulp are counted in the narrower one."""
    a, b = _noise((4, 30)).to(x), _noise((4, 30)).to(y)
    metrics = _check(a, b)
    assert metrics.ulp_format == min((format_of(x), format_of(y)), key=lambda f: f.itemsize).name
    assert not metrics.identical


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool])
def test_integers_and_bool(dtype):
    """Integers and bool are measured by value and have no ulp."""
    a = (10 * _noise((6, 20)).abs()).to(dtype)
    metrics = _check(a, a.roll(1))
    assert metrics.ulp_format is metrics.ulp_max is None


@pytest.mark.parametrize(
    "name", [n for n in FORMATS if n.startswith("float8") and "e8m0" not in n and hasattr(torch, n)]
)
def test_fp8(name):
    """8-bit floats, which have no arithmetic of their own, are widened exactly."""
    metrics = _check(*_pair((4, 100), getattr(torch, name), eps=0.1))
    assert metrics.ulp_format == name


def test_fp16_at_its_overflow_edge():
    """65504 against -65504 and against inf: one is a difference, the other is not finite."""
    a = torch.tensor([[65504.0, 1.0], [2.0, 3.0]], dtype=torch.float16)
    assert _check(a, -a).max_abs == 131008.0
    b = a.clone()
    b[0, 0] = math.inf
    metrics, rows = measure_pair(a, b)
    assert (metrics.candidate_inf, metrics.rel_l2) == (1, 0.0)
    assert rows.tolist() == [0.0, 0.0]


def test_float32_extremes():
    """A difference beyond float32's range is a float64 number, not inf."""
    a = torch.tensor([[3e38, 1.0], [2.0, 3.0]])
    assert _check(a, -a).max_abs == pytest.approx(6e38)


def test_nonfinite_elements_are_counted_and_left_out():
    """nan and inf on one side or both leave the metrics to the elements finite on both."""
    a, b = _pair((50, 40), torch.float32)
    clean_a, clean_b = a.clone(), b.clone()
    for at in ((3, 5), (4, 6), (5, 7), (7, 0)):
        clean_a[at] = clean_b[at] = 0.0
    a[3, 5] = b[3, 5] = math.nan
    a[4, 6], b[5, 7], b[7, 0] = math.inf, math.nan, -math.inf
    a[9], b[10] = math.nan, math.inf
    clean_a[9:11] = clean_b[9:11] = 0.0
    metrics, rows = measure_pair(a, b)
    counts = (
        metrics.reference_nan,
        metrics.reference_inf,
        metrics.candidate_nan,
        metrics.candidate_inf,
    )
    assert counts == (41, 1, 2, 41)
    assert metrics.num_finite == 2000 - 84
    assert rows[9:11].isnan().all() and rows.isnan().sum() == 2
    clean, _ = measure_pair(clean_a, clean_b)
    for name in ("rel_l2", "one_minus_cosine", "max_abs", "max_abs_index", "channel_rel_l2_max"):
        assert getattr(metrics, name) == pytest.approx(getattr(clean, name), rel=REL), name
    assert metrics.ulp_max == clean.ulp_max


def test_all_nan_measures_nothing():
    """Two tensors without a common finite element: zeros, counts, and nan rows."""
    a = torch.full((2, 3), math.nan)
    metrics, rows = measure_pair(a, a)
    assert (metrics.num_finite, metrics.rel_l2, metrics.reference_nan) == (0, 0.0, 6)
    assert metrics.identical
    assert rows.isnan().all() and metrics.worst_row is None


def test_zeros():
    """0/0 is 0, x/0 is inf; -0 equals +0 but is not identical to it."""
    zero, one = torch.zeros(3, 4), torch.ones(3, 4)
    same, _ = measure_pair(zero, -zero)
    assert (same.rel_l2, same.cosine, same.channel_rel_l2_max, same.ulp_max) == (0.0, 1.0, 0.0, 0.0)
    assert not same.identical
    made, rows = measure_pair(zero, one)
    assert (made.rel_l2, made.cosine, made.sqnr_db) == (math.inf, 0.0, -math.inf)
    assert made.channel_rel_l2_max == math.inf and rows.tolist() == [math.inf] * 3
    lost, _ = measure_pair(one, zero)
    assert (lost.rel_l2, lost.cosine, lost.gain) == (1.0, 0.0, -1.0)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)])
def test_empty(shape):
    """An empty pair has zeros, and no worst row or channel beyond its axes."""
    metrics, rows = measure_pair(torch.empty(shape), torch.empty(shape))
    assert (metrics.numel, metrics.rel_l2, metrics.max_abs_index) == (0, 0.0, None)
    assert metrics.worst_row is None and rows.numel() == math.prod(shape[:-1])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.bool, torch.complex64])
def test_a_tensor_against_itself_is_identical(dtype):
    """Identical tensors have exact zeros and an infinite signal-to-noise ratio."""
    a = (3 * _noise((40, 50))).to(dtype)
    metrics, rows = measure_pair(a, a.clone())
    assert metrics.identical
    assert metrics.rel_l2 == metrics.one_minus_cosine == metrics.max_abs == metrics.gain == 0.0
    assert metrics.cosine == 1.0 and metrics.sqnr_db == math.inf
    assert not rows.any() and metrics.max_abs_index is None


def test_complex_is_measured_as_its_components():
    """Complex norms are those of the vector; index and channel are complex ones."""
    a = torch.view_as_complex(_noise((4, 6, 2)))
    b = a.clone()
    b[2, 5] += 1j
    metrics, _ = measure_pair(a, b)
    assert metrics.rel_l2 == pytest.approx((1 / a.abs().square().sum().sqrt()).item())
    assert (metrics.max_abs_index, metrics.worst_channel, metrics.worst_row) == ((2, 5), 5, 2)
    with pytest.raises(ValueError, match="complex"):
        measure_pair(a, a.real)


def test_one_wrong_element_is_noticed():
    """The comparison can fail: one changed element changes every kind of metric."""
    a, _ = _pair((20, 30), torch.bfloat16)
    b = a.clone()
    b[11, 4] += 1.0
    metrics, rows = measure_pair(a, b)
    assert not metrics.identical and metrics.rel_l2 > 0 and metrics.one_minus_cosine > 0
    assert (metrics.max_abs_index, metrics.worst_row, metrics.worst_channel) == ((11, 4), 11, 4)
    assert rows.count_nonzero() == 1 and metrics.ulp_max > 1
    with pytest.raises(AssertionError):
        _check(a, a, found=(metrics, rows))


def test_row_mask_leaves_pads_out_and_reports_them():
    """Masked rows are in no metric but pad_rel_l2."""
    a, b = _pair((3, 7, 20), torch.bfloat16)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, 2:] = False
    mask[2, 0] = False
    b[1, 3] = math.nan
    metrics, rows = measure_pair(a, b, row_mask=mask)
    alone, alone_rows = measure_pair(a[mask], b[mask])
    assert rows.isnan().tolist() == (~mask).reshape(-1).tolist()
    assert torch.equal(rows[mask.reshape(-1)], alone_rows)
    assert (metrics.num_masked, metrics.num_rows, metrics.candidate_nan) == (6, 15, 0)
    for name in ("rel_l2", "one_minus_cosine", "gain", "max_abs", "ulp_p99", "numel"):
        assert getattr(metrics, name) == getattr(alone, name), name
    pads, _ = measure_pair(a[~mask], b[~mask])
    assert metrics.pad_rel_l2 == pytest.approx(pads.rel_l2, rel=REL)
    assert alone.pad_rel_l2 is None


def test_a_mask_over_all_rows_measures_nothing():
    """With every row masked there is nothing but pad_rel_l2."""
    a, b = _pair((4, 8), torch.float32)
    metrics, rows = measure_pair(a, b, row_mask=torch.zeros(4, dtype=torch.bool))
    assert (metrics.numel, metrics.rel_l2, metrics.worst_row) == (0, 0.0, None)
    assert rows.isnan().all() and metrics.pad_rel_l2 > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_update_is_measured_against_what_the_block_added(dtype):
    """‖d‖/‖a - base‖ sees what a large residual stream hides."""
    base = (100 * _noise((9, 30), 5)).to(dtype)
    a = (base.double() + _noise((9, 30))).to(dtype)
    b = (base.double() + _noise((9, 30)) * 1.5).to(dtype)
    metrics, _ = measure_pair(a, b, base=base)
    update = (a.double() - base.double()).norm().item()
    assert metrics.update_norm == pytest.approx(update, rel=REL)
    wanted = (a.double() - b.double()).norm().item() / update
    assert metrics.update_rel_l2 == pytest.approx(wanted, rel=REL)
    assert metrics.update_rel_l2 > 10 * metrics.rel_l2
    assert measure_pair(a, b)[0].update_rel_l2 is None


def test_sinks_are_counted_and_set_apart():
    """A token of 10 times the median norm is a sink; rel_l2 without it is that of the others."""
    a, b = _pair((20, 16), torch.float32)
    a[0] *= 1000
    b[0] = a[0]
    metrics, _ = measure_pair(a, b)
    rest, _ = measure_pair(a[1:], b[1:])
    assert (metrics.num_sink_tokens, rest.num_sink_tokens) == (1, 0)
    assert metrics.rel_l2_without_sinks == pytest.approx(rest.rel_l2, rel=REL)
    assert rest.rel_l2_without_sinks is None


def test_a_dead_channel_is_measured_against_the_typical_one():
    """A channel of ‖a_c‖ = 0 has the floor u·‖a‖/sqrt(C) below it, so its ratio stays finite."""
    a, b = _pair((10, 8), torch.bfloat16, eps=0.0)
    a[:, 3] = 0.0
    b = a.clone()
    b[5, 3] = 1e-3
    metrics = _check(a, b)
    assert metrics.worst_channel == 3 and math.isfinite(metrics.channel_rel_l2_max)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(3, 150_000), (1, 400_001), (1_000_000, 1), (70_000, 3), (997, 509)]
)
def test_large_and_odd_shapes(dtype, shape):
    """Rows longer than a block, a huge number of short rows, sizes that fit no block."""
    a, b = _pair(shape, dtype)
    metrics, rows = measure_pair(a, b)
    x, y = a.double(), b.double()
    d = x - y
    assert metrics.rel_l2 == pytest.approx((d.norm() / x.norm()).item(), rel=REL)
    assert metrics.max_abs == d.abs().max().item()
    wanted = d.norm(dim=-1) / x.norm(dim=-1)
    wanted[x.norm(dim=-1) == 0] = 0
    assert torch.allclose(rows, wanted, rtol=REL, atol=0)
    floor = format_of(dtype).unit_roundoff * x.norm() / math.sqrt(shape[-1])
    channels = d.norm(dim=0) / x.norm(dim=0).clamp(min=floor)
    assert metrics.channel_rel_l2_max == pytest.approx(channels.max().item(), rel=REL)
    aside = (d - (x * d).sum() / (x * x).sum() * x).square().sum() / y.square().sum()
    assert metrics.one_minus_cosine == pytest.approx((aside / 2).item(), rel=1e-4)


@settings(max_examples=25)
@given(
    st.integers(1, 40),
    st.integers(1, 60),
    st.integers(7, 3000),
    st.integers(1, 3),
    st.sampled_from(["bfloat16", "float16", "float32", "float64", "int8"]),
)
def test_metrics_do_not_depend_on_blocks_or_threads(rows, cols, block, threads, name):
    """Block size and thread count change no count and no index, and no metric beyond 1e-6."""
    a, b = ((10 * side).to(getattr(torch, name)) for side in _pair((rows, cols), torch.float64))
    whole, whole_rows = measure_pair(a, b, threads=1)
    split, split_rows = measure_pair(a, b, threads=threads, block=block)
    assert torch.allclose(whole_rows, split_rows, rtol=REL, atol=0)
    for field in whole.__struct_fields__:
        x, y = getattr(whole, field), getattr(split, field)
        if field == "gain":
            slack = REL * whole.gain_se if math.isfinite(whole.gain_se) else 1e-6
            assert x == pytest.approx(y, rel=REL, abs=slack)
        elif field == "cosine":
            assert x == pytest.approx(y, abs=REL * whole.one_minus_cosine)
        elif isinstance(x, float):
            assert x == pytest.approx(y, rel=REL, abs=0), field
        elif field not in ("worst_row", "worst_channel"):  # ties up to rounding
            assert x == y, field


def test_inputs_are_never_written_to():
    """Views of memory maps may be passed: neither side changes, whatever the path taken."""
    a, b = _pair((30, 40), torch.float32)
    a[3, 4], b[5] = math.nan, 1e30
    copies = a.clone(), b.clone()
    measure_pair(a, b, base=b, row_mask=torch.arange(30) != 2)
    assert torch.equal(a.view(torch.int32), copies[0].view(torch.int32))
    assert torch.equal(b, copies[1])


def test_mismatched_shapes_are_refused():
    """Shapes, masks and bases that do not fit are errors, not broadcasts."""
    a = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"candidate has shape \(3,\)"):
        measure_pair(a, torch.ones(3))
    with pytest.raises(ValueError, match="base"):
        measure_pair(a, a, base=torch.ones(3))
    with pytest.raises(ValueError, match="row mask"):
        measure_pair(a, a, row_mask=torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_norms_of_the_reference_and_of_its_update(dtype):
    """‖a_t‖ and ‖a_t - base_t‖ come back for every row, exact to 1e-6."""
    a, b = _pair((3, 5, 33), dtype)
    base = (a.double() + _noise(a.shape, 7)).to(dtype)
    _, rows = pair_module.measure_pair(a, b, base=base, **CHOSEN)
    wide, input_ = a.double().reshape(-1, 33), base.double().reshape(-1, 33)
    assert rows.norm.tolist() == pytest.approx(wide.norm(dim=1).tolist(), rel=REL)
    assert rows.update_norm.tolist() == pytest.approx((wide - input_).norm(dim=1).tolist(), rel=REL)


def test_row_norms_at_the_ends_of_the_range():
    """Values whose squares leave float32 or float64 keep their row norms."""
    for value, dtype in ((1e30, torch.float32), (1e-30, torch.bfloat16), (1e200, torch.float64)):
        a = torch.full((2, 8), value, dtype=dtype)
        _, rows = pair_module.measure_pair(a, a * 1.5, base=torch.zeros_like(a), **CHOSEN)
        wanted = float(a[0, 0]) * math.sqrt(8)
        assert rows.norm.tolist() == pytest.approx([wanted] * 2, rel=REL)
        assert rows.update_norm.tolist() == pytest.approx([wanted] * 2, rel=REL)


@pytest.mark.filterwarnings("error")
def test_a_row_norm_beyond_the_range_is_infinite():
    """A mask of the most negative float64 has one; nothing is said of it on the way."""
    a = torch.full((2, 8), torch.finfo(torch.float64).min, dtype=torch.float64)
    _, rows = pair_module.measure_pair(a, a * 0.5, base=torch.zeros_like(a), **CHOSEN)
    assert rows.norm.tolist() == rows.update_norm.tolist() == [math.inf] * 2
