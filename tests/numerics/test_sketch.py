"""Sketches against their definition, and what they promise of distances."""

import math

import pytest
import torch

from divergence.numerics.formats import format_named, format_of
from divergence.numerics.sketches import (
    SHIFT,
    SIGMA,
    TAU,
    Projections,
    grid_of,
    mixed,
    num_pooled,
    num_projections,
    resolution,
    rows_of,
    sketch_bytes,
    sketch_many,
    sketch_tensor,
)
from divergence.numerics.sums import has_compiled

GAMMA = 0x9E3779B97F4A7C15


EXAMPLE = [
    [-10.0, -12.0, -14.0, -16.0, -8.0, 8.0, 8.0, -8.0],
    [10.0, 12.0, 14.0, 16.0, 8.0, -8.0, -8.0, 8.0],
]


def sign(seed: int, number: int) -> int:
    return -1 if mixed(seed + (number + 1) * GAMMA) >> 63 else 1


def by_definition(rows: list[list[float]], k: int, numbers: list[int]) -> list[list[float]]:
    """docs/dump-format.md, word for word."""
    found = []
    for row, t in zip(rows, numbers, strict=True):
        sums = [0.0] * k
        for j, x in enumerate(row):
            sums[j % k] += sign(SIGMA, j) * sign(TAU, (t << 32) + j // k) * x
        found.append(sums)
    return found


@pytest.mark.parametrize("features", [64, 67, 200], ids=str)
def test_the_definition(features, kernel):
    """Every projection is the defined signed sum, also where k does not divide the row."""
    x = torch.randint(-9, 9, (1, 5, features)).float()
    found = sketch_tensor(x, 8, kernel=kernel)
    assert found.rows[:, :8].tolist() == by_definition(x[0].tolist(), 8, list(range(5)))


def test_the_definition_of_pooled_sums(kernel):
    """Every pooled sum is the defined one, of each block's rows, also where K does not divide
    the row."""
    x = torch.randint(-9, 9, (2, 5, 67)).float()
    found = sketch_tensor(x, 8, num_pooled=16, kernel=kernel)
    wanted = [[0.0] * 16, [0.0] * 16]
    for t, row in enumerate(x.view(10, 67).tolist()):
        for j, value in enumerate(row):
            sign_of_it = sign(SIGMA, j) * sign(TAU, (t << 32) + j // 8)
            wanted[t // 5][(j + SHIFT * t) % 16] += sign_of_it * value
    assert found.pooled.tolist() == wanted
    assert torch.equal(found.rows, sketch_tensor(x, 8, kernel=kernel).rows)


def test_stored_and_taken_apart():
    """On one axis where there are pooled sums, rows first."""
    x = torch.randn(2, 5, 67)
    for num_sums in (0, 16):
        found = sketch_tensor(x, 8, num_pooled=num_sums)
        stored = found.joined()
        assert stored.shape == ((10 * 10 + 2 * 16,) if num_sums else (10, 10))
        again = Projections.of(stored, x.shape, 8, num_sums)
        assert torch.equal(again.rows, found.rows) and torch.equal(again.pooled, found.pooled)


def test_the_documented_example():
    """The row 1, 2, ..., 16 as row 0 and as row 1, in 8 projections: see docs/dump-format.md."""
    row = torch.arange(1.0, 17.0)
    found = sketch_tensor(row.expand(1, 2, 16), 8)
    assert found.rows[0].tolist()[:8] == EXAMPLE[0]
    assert found.rows[1].tolist()[:8] == EXAMPLE[1]
    assert float(found.rows[0, 8]) == pytest.approx(math.sqrt(1496), rel=1e-7)


def test_row_numbers():
    """Rows of another tensor are projected with the signs that they have there."""
    x = torch.randn(1, 9, 128)
    whole = sketch_tensor(x, 8).rows
    part = sketch_tensor(x[:, 4:7], 8, row_numbers=[4, 5, 6]).rows
    assert torch.equal(whole[4:7], part)
    x = torch.randint(-9, 9, (3, 4, 128)).float()
    block = sketch_tensor(x[1:2], 8, num_pooled=32, row_numbers=[4, 5, 6, 7]).pooled
    assert torch.equal(block, sketch_tensor(x, 8, num_pooled=32).pooled[1:2])


def stored(tensor: torch.Tensor) -> tuple[str, memoryview, tuple[int, ...]]:
    """As the writer holds it."""
    data = memoryview(tensor.contiguous().view(torch.uint8).reshape(-1).numpy())
    return str(tensor.dtype).removeprefix("torch."), data, tuple(tensor.shape)


def test_many_rows_alone():
    """Single rows of many tensors are stacked, and give what each gives alone."""
    tensors = [
        torch.randn(1, 1, 128),
        torch.randn(1, 3, 128),
        torch.randn(1, 1, 128),
        torch.randn(1, 1, 256).bfloat16(),
    ]
    found = sketch_many([*map(stored, tensors)], [8] * 4, [0] * 4)
    for tensor, one in zip(tensors, found, strict=True):
        assert torch.equal(one.rows, sketch_tensor(tensor, 8).rows)


@pytest.mark.parametrize(
    "shape, rows",
    [((4, 7), (4, 7)), ((2, 3, 5), (6, 5)), ((2, 3, 5, 7), (6, 35)), ((9,), (1, 9)), ((), (1, 1))],
    ids=str,
)
def test_rows(shape, rows):
    """Rows lie behind the first two axes, or are the last of two, or the whole."""
    assert rows_of(shape) == rows


@pytest.mark.parametrize(
    "features, dtype, k",
    [
        (1024, "bfloat16", 8),
        (2047, "bfloat16", 8),
        (2048, "bfloat16", 16),
        (8192, "float32", 64),
        (151936, "float32", 64),
        (64, "bfloat16", 8),
        (32, "bfloat16", None),
        (32, "float32", 8),
        (16, "float32", None),
        (1024, "int64", None),
        (1024, "float64", None),
        (1024, "complex64", None),
    ],
    ids=str,
)
def test_how_many_projections(features, dtype, k):
    """A power of two, one for some 128 features; none where bytes would hardly be saved."""
    form = format_named(dtype)
    assert num_projections((1, 30, features), form) == k
    size = (
        30 * (k + 2) * 4 + 4 * num_pooled((1, 30, features), k)
        if k
        else 30 * features * form.itemsize
    )
    assert sketch_bytes((1, 30, features), form) == size


@pytest.mark.parametrize(
    "rows, features, k",
    [(1, 4096, 64), (2, 1024, 32), (5, 1024, 8), (7, 1024, 8), (1, 256, 32), (1, 64, 8)],
)
def test_few_rows(rows, features, k):
    """As many projections as make up 64, if they take no more than half of the bytes."""
    assert num_projections((1, rows, features), format_named("bfloat16")) == k
    assert num_projections((1, rows, features), format_named("float32")) == k


@pytest.mark.parametrize(
    "shape, k, number",
    [
        ((1, 128, 1024), 8, 64),
        ((1, 128, 2048), 16, 128),
        ((4, 512, 4096), 32, 128),
        ((1, 16, 1024), 8, 64),
        ((1, 8, 1024), 8, 32),
        ((40, 1024), 8, 64),
        ((1, 1, 1024), 64, 0),
        ((1, 4, 128, 128), 64, 0),
        ((1, 16, 64), 8, 0),
        ((300000,), 64, 0),
    ],
    ids=str,
)
def test_how_many_pooled_sums(shape, k, number):
    """Few of a block's bytes; none of rows alone, nor where they are no more than a row has."""
    assert num_pooled(shape, k) == number
    _, num_rows, features = grid_of(shape)
    assert 4 * number <= num_rows * features * 2 / 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norms(dtype):
    """High and low part together are the row's norm far below float32's unit."""
    x = (torch.randn(1, 20, 300) * 3).to(dtype)
    found = sketch_tensor(x, 8).rows.double()
    exact = x[0].double().norm(dim=-1)
    assert torch.allclose(found[:, 8] + found[:, 9], exact, rtol=1e-13, atol=0)


def test_linear():
    """The sketch of a difference is the difference of the sketches, to float32's rounding."""
    a, b = torch.randn(1, 6, 512), torch.randn(1, 6, 512)
    apart = sketch_tensor(a, 8).rows[:, :8] - sketch_tensor(b, 8).rows[:, :8]
    assert torch.allclose(apart, sketch_tensor(a - b, 8).rows[:, :8], atol=1e-4)


DIRECTIONS = {
    "noise": lambda x: torch.randn_like(x),
    "scale": lambda x: 0.01 * x,
    "one direction, other sizes": lambda x: torch.randn(x.shape[1], 1) * torch.randn(x.shape[2]),
    "one direction": lambda x: torch.randn(x.shape[2]).expand_as(x),
    "one channel": lambda x: x * torch.nn.functional.one_hot(torch.tensor(5), x.shape[2]),
    "one head": lambda x: x * (torch.arange(x.shape[2]) < 64),
}


@pytest.mark.parametrize("kind", DIRECTIONS)
def test_distances(kind):
    """‖d‖ comes out within four standard deviations, whatever the errors have in common."""
    torch.manual_seed(11)
    x = torch.randn(1, 256, 1024)
    d = DIRECTIONS[kind](x)
    k = num_projections(x.shape, format_of(x.dtype))
    found = sketch_tensor(d.contiguous(), k).rows[:, :k].double().norm()
    limit = 4 * 0.5 * math.sqrt(2 / (k * 256))
    assert float(found / d.double().norm()) == pytest.approx(1.0, abs=limit)


@pytest.mark.skipif(not has_compiled(), reason="numba is not installed")
@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float32", pytest.param("float16", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("shape", [(1, 7, 520), (3, 64), (1, 1, 2048), (2, 3, 8, 70)])
def test_compiled_loops_find_the_same(shape, dtype):
    """On any shape and dtype, with rows alone and with elements that are no finite numbers."""
    x = torch.randn(shape).to(format_named(dtype).torch_dtype)
    x.view(-1)[::37] = math.inf
    x.view(-1)[5] = math.nan
    k = num_projections(shape, format_of(x.dtype)) or 8
    for num_sums in (0, 2 * k):
        one, two = (
            sketch_tensor(x, k, num_pooled=num_sums, kernel=kernel)
            for kernel in ("numpy", "compiled")
        )
        assert torch.allclose(one.rows, two.rows, rtol=1e-5, atol=1e-4)
        assert torch.allclose(one.pooled, two.pooled, rtol=1e-5, atol=1e-3)
    many = sketch_many([stored(x[:1])] * 2, [8, 8], [0, 0], kernel="compiled")
    assert torch.equal(many[0].rows, many[1].rows)
    assert torch.allclose(many[0].rows, sketch_tensor(x[:1], 8).rows, rtol=1e-5, atol=1e-4)


def test_nonfinite_elements_count_as_zero():
    """nan and inf leave the other features' projections as they are."""
    x = torch.randn(1, 3, 128)
    holes = x.clone()
    holes[0, 1, 17], holes[0, 1, 40] = torch.nan, -torch.inf
    x[0, 1, 17] = x[0, 1, 40] = 0.0
    assert torch.equal(sketch_tensor(holes, 8).rows, sketch_tensor(x, 8).rows)


def test_the_tensor_stays_as_it_is():
    """Nothing is written to what is sketched."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.randn(2, 4, 96).to(dtype)
        before = x.clone()
        sketch_tensor(x, 8)
        assert torch.equal(x, before)


def test_resolution():
    """Two roundings to float32; more where sums are in float32, and far below 16 bits' own."""
    assert resolution(1024, 8) == pytest.approx(0.58 * 2**-24, rel=1e-3)
    assert resolution(1024, 8, sums="float32") == pytest.approx(0.58 * 2**-24 * 8.06, rel=1e-2)
    assert resolution(8192, 64, sums="float32") < 2**-11 / 1000
