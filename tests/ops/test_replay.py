"""Running recorded operators again, as a run."""

import pytest
import torch

import divergence.ops.replay as execute
from divergence import Run, capture, replay
from divergence.errors import RunExistsError, UsageError


def _seeded(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def _block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x @ weight.t()
    y = torch.softmax(y.float(), -1).to(x.dtype)
    return torch.nn.functional.silu(y) + x


def _bits(run: Run) -> dict[str, str]:
    return {record.site: record.xxh3 for record in run.records if ":out" in record.site}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_machine_same_bits(record, tmp_path, dtype):
    """Each operator gives the recorded bits when it is run again here."""
    x, weight = _seeded(1, 5, 16, dtype=dtype), _seeded(16, 16, dtype=dtype)
    run = record(lambda: _block(x, weight))
    again = replay(run, out=tmp_path / "again", device="cpu")
    assert _bits(again) == _bits(run)
    assert again.manifest.complete
    assert again.manifest.plan.skipped_operators == {}


def test_a_replay_is_a_run_of_its_source(record, tmp_path):
    """It keeps site, sample, step, order and call, and says what it repeated."""
    x = _seeded(3, 4)
    run = record(lambda: torch.relu(x) * 2)
    again = replay(run, out=tmp_path / "again", device="cpu", command="divergence replay")
    plan = again.manifest.plan
    assert (plan.passes, plan.anchored_to, plan.replayed_pass) == (
        ["replayed"],
        run.manifest.id,
        "free",
    )
    assert again.manifest.model == run.manifest.model
    assert again.manifest.tokens == run.manifest.tokens
    assert again.manifest.id != run.manifest.id
    wanted = {r.site: (r.sample, r.step, r.order, r.call) for r in run.records if ":out" in r.site}
    found = {r.site: (r.sample, r.step, r.order, r.call) for r in again.records}
    assert found == wanted
    assert {r.pass_ for r in again.records} == {"replayed"}


def test_reference_is_float64(record, tmp_path):
    """In float64 the results are those of float64, of each operator by itself."""
    x, weight = _seeded(1, 5, 16, dtype=torch.bfloat16), _seeded(16, 16, dtype=torch.bfloat16)
    run = record(lambda: _block(x, weight))
    truth = replay(run, out=tmp_path / "truth", truth=True)
    assert truth.manifest.settings.compute_dtype == "float64"
    found = {record.site: truth.read(record) for record in truth.records}
    assert {tensor.dtype for tensor in found.values()} == {torch.float64}
    wanted = x.double().reshape(5, 16) @ weight.double().t()
    (product,) = (tensor for site, tensor in found.items() if "aten.mm" in site)
    torch.testing.assert_close(product, wanted, rtol=1e-14, atol=1e-14)


def test_only_chosen_sites(record, tmp_path):
    """--site leaves the others out; a site that is not there is named with near ones."""
    x = _seeded(3, 4)
    run = record(lambda: torch.relu(x) * 2)
    again = replay(run, out=tmp_path / "again", sites=["block/aten.mul:out"], device="cpu")
    assert [record.site for record in again.records] == ["block/aten.mul:out"]
    with pytest.raises(UsageError, match=r"did you mean block/aten.mul:out"):
        replay(run, out=tmp_path / "other", sites=["block/aten.mull:out"], device="cpu")


def test_a_run_without_operators_is_refused(tmp_path, record):
    """The error gives the command that makes a run that holds some."""
    run = record(lambda: None)
    with pytest.raises(UsageError, match=r"capture --like .* --sites ops@block --weights"):
        replay(run, out=tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_replay_is_not_replayed(record, tmp_path):
    """It holds no inputs: its source does."""
    x = _seeded(3, 4)
    again = replay(record(lambda: torch.relu(x)), out=tmp_path / "again", device="cpu")
    with pytest.raises(UsageError, match="is a replay itself"):
        replay(again, out=tmp_path / "twice")


def test_the_source_is_never_replaced(record):
    """Not even with force."""
    x = _seeded(3, 4)
    run = record(lambda: torch.relu(x))
    with pytest.raises(RunExistsError, match="is the run to be repeated"):
        replay(run, out=run.path, force=True, device="cpu")


def test_interrupted(record, tmp_path):
    """Ctrl-C leaves what was done, readable and marked incomplete."""
    x = _seeded(3, 4)
    run = record(lambda: torch.relu(x) * 2)

    def stop(event: str, done: int, total: int | None, detail: str) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(run, out=tmp_path / "again", device="cpu", progress=stop)
    left = Run.open(tmp_path / "again")
    assert not left.manifest.complete
    assert left.manifest.stopped_by == "interrupted"
    assert [record.site for record in left.records] == ["block/aten.relu:out"]


def test_another_kind_of_device_has_its_own_addresses(record, tmp_path, monkeypatch):
    """Where memory began on a CPU says nothing of an accelerator; there it is aligned."""
    seen = []
    laid_out = execute.laid_out

    def watch(values, stride, *, device, misalignment_bytes):
        seen.append(misalignment_bytes)
        return laid_out(values, stride, device=device, misalignment_bytes=misalignment_bytes)

    monkeypatch.setattr(execute, "laid_out", watch)
    x = torch.arange(8.0)[1:]
    run = record(lambda: torch.relu(x))
    replay(run, out=tmp_path / "here", device="cpu")
    run.manifest.environment.device_type = "cuda"
    replay(run, out=tmp_path / "there", device="cpu")
    assert seen == [4, 0]


def test_a_replay_is_not_repeated_as_a_model(record, tmp_path):
    """No model ran in it; the error says what to give."""
    again = replay(record(lambda: torch.relu(torch.ones(2))), out=tmp_path / "again", device="cpu")
    with pytest.raises(UsageError, match="is a replay of single operators"):
        capture(like=again, out=tmp_path / "like")
