"""Runs in an object store: which requests are made, in which order, and what if they fail."""

import builtins
import contextlib
import json
import tempfile
import threading
import time
import zlib
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from divergence import Run, compare, pack
from divergence.errors import RunExistsError, RunFormatError, RunWriteError, UsageError
from divergence.run import target as targets
from divergence.run import writer as writing
from divergence.run.remote import Ranges
from divergence.run.storage import Url
from divergence.run.writer import RunWriter
from tests.by_hand import put

URL = "far://bucket/run"


@pytest.fixture
def large_run(write_run):
    """Ten tensors of 64 KiB each, so that a shard is larger than what is read of it to open it."""
    return write_run({f"m.{k}:out": torch.full((128, 128), float(k)) for k in range(10)})


@pytest.fixture
def uploaded(far, large_run):
    """That run here; it lies at URL as well."""
    for file in large_run.rglob("*"):
        if file.is_file():
            far().pipe_file(f"{URL}/{file.relative_to(large_run)}", file.read_bytes())
    far.requests.clear()
    return large_run


# --- reading -----------------------------------------------------------------------------------


def test_a_run_far_away_reads_as_if_it_were_here(far, uploaded):
    """Records, tensors and checksums; the name is the URL."""
    run, here = Run.open(URL), Run.open(uploaded)
    assert str(run.path) == URL and run.far and not here.far
    assert run.records == here.records and run.verify() == []
    for record in run.records:
        assert torch.equal(run.read(record), here.read(record))


def test_opening_reads_no_tensor(far, uploaded):
    """One listing, the manifest, the lines, and the beginning of each shard."""
    Run.open(URL)
    assert [what for what, *_ in far.requests] == ["list", "get", "get", "get"]
    sizes = {path.rpartition("run/")[2]: n for _, path, n in far.requests[1:]}
    assert sizes["tensors/r00000-000000.safetensors"] == 64 << 10
    assert sizes["manifest.json"] == (uploaded / "manifest.json").stat().st_size


def test_one_tensor_costs_one_request_of_its_size(far, uploaded):
    """No byte of its neighbours."""
    run = Run.open(URL)
    far.requests.clear()
    run.read(run.records[5])
    assert far.requests == [("get", "bucket/run/tensors/r00000-000000.safetensors", 65536)]


def test_announced_tensors_come_in_one_request(far, uploaded):
    """Neighbours together; what is not wanted is not read, unless it is less than a gap."""
    run = Run.open(URL)
    far.requests.clear()
    wanted = [run.records[k] for k in (2, 3, 4)]
    run.expect(wanted)
    for record in wanted:
        run.read(record)
    assert [n for _, _, n in far.requests] == [3 * 65536]


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_archive_far_away_is_read_by_ranges(far, large_run, kind):
    """Its index, and then what a directory would cost; never the whole."""
    pack(large_run, out=f"{URL}.{kind}")
    far.requests.clear()
    run = Run.open(f"{URL}.{kind}")
    opened = sum(n for _, _, n in far.requests)
    assert len(far.requests) <= 6
    far.requests.clear()
    run.read(run.records[7])
    assert sum(n for _, _, n in far.requests) == 65536
    assert opened < 300_000 < run.manifest.sizes.stored_bytes
    assert run.verify() == []


def test_a_comparison_fetches_only_what_differs(far, uploaded, write_run, tmp_path):
    """Tensors that are equal by their checksums stay on the far side; printed commands name it."""
    tensors = {f"m.{k}:out": torch.full((128, 128), float(k)) for k in range(10)}
    tensors["m.4:out"] = tensors["m.4:out"] + 1
    other = write_run(tensors, tmp_path / "other")
    run = Run.open(URL)
    far.requests.clear()
    report = compare(run, other)
    assert [n for what, _, n in far.requests if what == "get"] == [65536]
    assert report.coverage.num_compared == 10
    assert [s.site for s in report.sites if not s.identical] == ["m.4:out"]
    assert any(URL in command for command in report.verdict.next)
    here = compare(uploaded, other)
    assert [s.max_abs for s in report.sites] == [s.max_abs for s in here.sites]


# --- reading what fails ------------------------------------------------------------------------


def test_a_request_that_breaks_is_made_again(far, uploaded):
    """Twice; the reader notices nothing."""
    left = [2]

    def fail(what, path):
        if what == "get" and left[0]:
            left[0] -= 1
            raise ConnectionResetError("peer")

    far.fail = fail
    assert Run.open(URL).verify() == []
    assert left == [0]


def test_a_connection_that_stays_broken_is_one_error(far, uploaded):
    """Which names the URL and what was tried."""

    def fail(what, path):
        if path.endswith(".safetensors"):
            raise TimeoutError("no answer")

    far.fail = fail
    with pytest.raises(RunFormatError, match=r"failed 3 times.*no answer") as caught:
        Run.open(URL)
    assert caught.value.where == f"{URL}/tensors/r00000-000000.safetensors"
    assert len([r for r in far.requests if r[1].endswith(".safetensors")]) == 3


@pytest.mark.parametrize(
    ("kind", "text", "said", "hint"),
    [
        ("PermissionError", "Access Denied", "the store refuses: Access Denied", ""),
        ("NoCredentialsError", "Unable to locate", "there are no credentials", "AWS_PROFILE"),
        ("ProfileNotFound", "no (nope)", r"own settings cannot be used: .*nope", "AWS_PROFILE"),
    ],
)
def test_a_refusal_is_no_network_that_breaks(far, uploaded, kind, text, said, hint):
    """Each store has exceptions of its own: what they say is told, and nothing is tried again."""
    error = getattr(builtins, kind, None) or type(kind, (Exception,), {})

    def fail(what, path):
        raise error(text)

    far.fail = fail
    with pytest.raises(RunFormatError, match=said) as caught:
        Run.open(URL)
    assert hint in (caught.value.hint or "") and len(far.requests) == 1


@pytest.mark.parametrize("name", ["a", "a.tar"])
@pytest.mark.parametrize(
    ("status", "said"),
    [
        (403, "the store refuses: HTTP 403"),
        (404, "there is nothing at http"),
        (500, "failed 3 times, the last time with: 500"),
        (None, "failed 3 times, the last time with: Cannot connect"),
    ],
)
def test_a_web_server_is_quoted(name, status, said, monkeypatch):
    """fsspec says of each of these that there is no such file."""
    pytest.importorskip("aiohttp")
    monkeypatch.setattr("divergence.run.remote.FIRST_PAUSE_S", 0.0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        url = f"http://127.0.0.1:{server.server_port}/{name}"
        if status is None:
            server.server_close()
        else:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(RunFormatError) as caught:
            Run.open(url)
        if status is not None:
            server.shutdown()
    assert said in str(caught.value)


def test_what_comes_short_is_an_error(far, uploaded):
    """A truncated answer is asked for again, and never taken for the whole."""
    far.cut = lambda path, data: data[:-1]
    with pytest.raises(RunFormatError, match="bytes came"):
        Run.open(URL)


def test_a_shard_that_is_replaced_meanwhile_is_told_apart_from_damage(far, uploaded):
    """Its checksum is wrong either way; what to do differs."""
    path = f"{URL}/tensors/r00000-000000.safetensors"
    data = bytearray(far().cat_file(path))
    data[-1] ^= 1
    run = Run.open(URL)
    far().pipe_file(path, bytes(data))
    with pytest.raises(RunFormatError, match="wrong checksum") as caught:
        run.read(run.records[9])
    assert "replaced while it was read" in caught.value.hint
    run = Run.open(URL)
    with pytest.raises(RunFormatError, match="wrong checksum") as caught:
        run.read(run.records[9])
    assert "damaged" in caught.value.hint


def test_what_is_no_run_is_refused(far, uploaded):
    """Nothing there; something else there; a shard missing."""
    with pytest.raises(RunFormatError, match="there is nothing at"):
        Run.open("far://bucket/none")
    with pytest.raises(RunFormatError, match="there is nothing at"):
        Run.open("far://bucket/none.tar")
    far().pipe_file("far://bucket/other/file", b"x")
    with pytest.raises(RunFormatError, match="is not a run"):
        Run.open("far://bucket/other")
    far().pipe_file("far://bucket/x.tar", b"x" * 2000)
    with pytest.raises(RunFormatError, match="neither a tar nor a zip"):
        Run.open("far://bucket/x.tar")
    far().rm_file("/bucket/run/tensors/r00000-000000.safetensors")
    with pytest.raises(RunFormatError, match="is missing"):
        Run.open(URL)


def test_unknown_schemes_and_missing_packages_say_what_to_do():
    """A package is named with the command that installs it."""
    with pytest.raises(UsageError, match="no place that can be read"):
        Run.open("nosuch://bucket/run")
    with pytest.raises(UsageError, match="needs a package") as caught:
        Run.open("gs://bucket/run")
    assert caught.value.hint == "pip install 'divergence-debug[remote]'"


# --- writing -----------------------------------------------------------------------------------


def states(far) -> list[dict[str, bytes]]:
    """What is in the store after each change, from now on."""
    seen: list[dict[str, bytes]] = []

    def remember(what, path):
        seen.append({name: bytes(file.getvalue()) for name, file in far.store.items()})

    far.fail = remember
    return seen


def restored(far, state: dict[str, bytes]) -> None:
    far.fail = None
    far.store.clear()
    for name, data in state.items():
        far().pipe_file(name, data)


def test_at_no_moment_does_half_a_run_look_whole(far, manifest, monkeypatch):
    """Killed after any request: no run yet, or an incomplete one that verifies; whole at last."""
    monkeypatch.setattr(writing, "SHARD_BYTES", 300)
    seen = states(far)
    with RunWriter(URL, manifest()) as writer:
        for step in range(12):
            put(writer, torch.full((50,), float(step)), step=step)
            writer.drain()
    assert Run.open(URL).manifest.complete and len(Run.open(URL).records) == 12
    assert len(seen) > 10
    lengths = []
    for state in seen[:-2]:
        restored(far, state)
        if "/bucket/run/manifest.json" not in state:
            with pytest.raises(RunFormatError):
                Run.open(URL)
            continue
        run = Run.open(URL)
        if not json.loads(state["/bucket/run/manifest.json"])["complete"]:
            assert not run.manifest.complete
            lengths.append(len(run.records))
        assert run.verify() == []
    assert lengths == sorted(lengths) and lengths[-1] == 12


def test_lines_are_stored_again_when_they_have_grown_by_a_fifth(far, manifest, monkeypatch):
    """Altogether some six times their size is sent, however many there are."""
    monkeypatch.setattr(writing, "SHARD_BYTES", 1)
    with RunWriter(URL, manifest()) as writer:
        for step in range(150):
            put(writer, torch.full((2,), float(step)), step=step)
            writer.drain()
    sent = [n for what, path, n in far.requests if what == "put" and path.endswith("jsonl")]
    assert sent == sorted(sent)
    assert sum(sent) < 7 * sent[-1]
    assert len(Run.open(URL).records) == 150


def test_the_manifest_goes_with_the_lines(far, manifest):
    """It changes with each prompt; the model does not wait for it to be stored each time."""
    with RunWriter(URL, manifest()) as writer:
        for step in range(50):
            put(writer, torch.ones(3), step=step)
            writer.manifest.stopped_by = str(step)
            writer.update_manifest()
        Run.open(writer.flush())
        assert json.loads(far().cat_file(f"{URL}/manifest.json"))["stopped_by"] == "49"
    stored = [path for what, path, _ in far.requests if what == "put" and "manifest" in path]
    assert 3 <= len(stored) <= 6


def test_what_was_put_can_be_read_after_a_flush(far, manifest):
    """The whole pass reads inputs that this run recorded."""
    with RunWriter(URL, manifest()) as writer:
        put(writer, torch.ones(4))
        run = Run.open(writer.flush())
        assert torch.equal(run.read(run.records[0]), torch.ones(4))


def test_local_copies_are_bounded_and_removed(far, manifest, monkeypatch, tmp_path):
    """A slow store makes the capture wait; the disk here is not filled."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(writing, "SHARD_BYTES", 1)
    most = [0]

    def slow(what, path):
        if what == "put" and path.endswith(".safetensors"):
            most[0] = max(most[0], len(list(tmp_path.rglob("*.safetensors"))))
            time.sleep(0.01)

    far.fail = slow
    with RunWriter(URL, manifest()) as writer:
        for step in range(40):
            put(writer, torch.full((2,), float(step)), step=step)
            writer.drain()
    assert 1 <= most[0] <= targets.NUM_WAITING
    assert list(tmp_path.iterdir()) == []


def test_an_upload_that_fails_while_it_is_looked_at_is_not_lost(far, tmp_path):
    """It is over the second time one asks; its error is raised all the same."""

    class Late(Future):
        asked = 0

        def done(self):
            self.asked += 1
            return self.asked > 1

    target = targets.RemoteTarget(Url(URL), force=False)
    late = Late()
    late.set_exception(OSError("broken"))
    target._shards.append(late)
    target._raise_failure()
    with pytest.raises(OSError, match="broken"):
        target._raise_failure()
    target._shards.clear()
    target.close()


def test_an_upload_that_fails_stops_the_capture(far, manifest, monkeypatch):
    """With one error that names the URL; what was stored before is a readable, incomplete run."""
    monkeypatch.setattr(writing, "SHARD_BYTES", 1)

    def fail(what, path):
        if what == "put" and "000003" in path:
            raise ConnectionResetError("peer")

    far.fail = fail
    wrong = pytest.raises(RunWriteError, match="writing failed 3 times")
    with wrong as caught, RunWriter(URL, manifest()) as writer:
        for step in range(50):
            put(writer, torch.full((2,), float(step)), step=step)
            writer.drain()
    assert caught.value.where == f"{URL}/tensors/r00000-000003.safetensors"
    far.fail = None
    run = Run.open(URL)
    assert not run.manifest.complete and run.verify() == []
    assert "writing failed" in run.manifest.stopped_by
    assert len(run.records) <= 3


def test_an_interrupt_keeps_what_was_recorded(far, manifest):
    """Ctrl-C waits for what is under way, and says incomplete."""
    with pytest.raises(KeyboardInterrupt), RunWriter(URL, manifest()) as writer:
        put(writer, torch.ones(3))
        raise KeyboardInterrupt
    run = Run.open(URL)
    assert (run.manifest.stopped_by, len(run.records)) == ("interrupted", 1)


def test_something_that_removes_objects_meanwhile_is_noticed(far, manifest):
    """Before the manifest says complete, everything is looked at once more."""
    with pytest.raises(RunWriteError, match="it is not there"), RunWriter(URL, manifest()) as w:
        put(w, torch.ones(3))
        w.flush()
        del far.store["/bucket/run/tensors/r00000-000000.safetensors"]
    assert not json.loads(far().cat_file(f"{URL}/manifest.json"))["complete"]


def test_a_store_that_refuses_writing_is_one_error(far, manifest, tmp_path, monkeypatch):
    """At once, and no temporary directory stays."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def fail(what, path):
        if what == "put":
            raise PermissionError("Access Denied")

    far.fail = fail
    with pytest.raises(RunWriteError, match="the store refuses"):
        RunWriter(URL, manifest())
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_overwritten(far, manifest, uploaded):
    """A run only by force, the manifest first; foreign objects never."""
    with pytest.raises(RunExistsError, match="exists already"):
        RunWriter(URL, manifest())
    far.requests.clear()
    with RunWriter(URL, manifest(), force=True):
        pass
    assert Run.open(URL).records == []
    removed = [path for what, path, _ in far.requests if what == "remove"]
    assert removed[0] == "bucket/run/manifest.json" and len(removed) == 3
    far().pipe_file(f"{URL}/thesis.tex", b"x")
    with pytest.raises(RunExistsError, match=r"holds thesis\.tex, so --force does not"):
        RunWriter(URL, manifest(), force=True)
    far().pipe_file("far://bucket/object", b"x")
    with pytest.raises(RunExistsError, match="is an object"):
        RunWriter("far://bucket/object", manifest(), force=True)


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_archive_is_stored_as_one_object_at_the_end(far, manifest, tmp_path, monkeypatch, kind):
    """Nothing is at the URL before; the same bytes as the archive made here."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with RunWriter(f"{URL}.{kind}", manifest()) as writer:
        put(writer, torch.ones(3))
        writer.flush()
        assert not far.store
    with RunWriter(tmp_path / f"r.{kind}", manifest()) as writer:
        put(writer, torch.ones(3))
    assert far().cat_file(f"{URL}.{kind}") == (tmp_path / f"r.{kind}").read_bytes()
    assert [what for what, *_ in far.requests].count("put") == 1


@pytest.fixture
def lying(monkeypatch):
    """``lying(answer)`` → the URL of a web server whose every answer is ``answer(handler)``."""
    pytest.importorskip("aiohttp")
    monkeypatch.setattr("divergence.run.remote.FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr("divergence.run.remote.MAX_BODY_BYTES", 1 << 20)
    monkeypatch.setattr("divergence.run.remote.MAX_PAGE_BYTES", 1 << 20)
    over = threading.Event()
    servers = []

    def start(answer):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                with contextlib.suppress(OSError):
                    answer(self, over)

            do_HEAD = do_GET

            def log_message(self, *_):
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[0].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[0].server_port}/run.tar"

    yield start
    over.set()
    for server in servers:
        server.shutdown()
        server.server_close()


def _sending_to(place):
    def answer(handler, over):
        handler.send_response(302)
        handler.send_header("Location", place(handler) if callable(place) else place)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def _page(make):
    """A page of links at every address."""

    def answer(handler, over):
        body = "".join(f'<a href="{link}">x</a>' for link in make(handler)).encode()
        handler.send_response(200)
        handler.send_header("Content-Type", "text/html")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(body)

    return answer


def _bomb(handler, over):
    """1,000 times as large as it comes."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    body = packer.compress(bytes(4 << 20)) + packer.flush()
    handler.send_response(200)
    for name, value in (("Type", "text/html"), ("Encoding", "gzip"), ("Length", str(len(body)))):
        handler.send_header(f"Content-{name}", value)
    handler.end_headers()
    if handler.command == "GET":
        handler.wfile.write(body)


SHARDS = [f"tensors/{number}.safetensors" for number in range(10_001)]
HOSTILE = {
    "a file": (_sending_to("file:///etc/passwd"), "redirects lead nowhere"),
    "another scheme": (_sending_to("ftp://127.0.0.1/x"), "redirects lead nowhere"),
    "a loop": (_sending_to(lambda handler: handler.path), "redirects lead nowhere"),
    "no address": (_sending_to("http://[::1"), "redirects lead nowhere"),
    "a metadata service": (_sending_to("http://169.254.169.254/"), "sends on to 169.254.169.254"),
    "the same, hidden": (_sending_to("http://[::ffff:a9fe:a9fe]/"), "nearer to this machine"),
    "links elsewhere": (
        _page(
            lambda _: [
                "http://192.0.2.1/run/manifest.json",
                "//x/run/manifest.json",
                "../../x",
                "/etc/passwd",
                "file:///etc/passwd",
                "http://[",
                "manifest.json/",
                "%00",
            ]
        ),
        "neither a tar nor a zip",
    ),
    "more files than a run has": (_page(lambda _: SHARDS), "over 10,000 files"),
    "a page without an end": (_page(lambda _: ["x" * 1000] * 2_000), "over 1 MiB"),
    "a bomb": (_bomb, "over 1 MiB"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_web_server_is_refused(lying, name):
    """Whatever it answers: nothing is fetched from elsewhere, and the error is one sentence."""
    answer, message = HOSTILE[name]
    with pytest.raises(RunFormatError, match=message):
        Run.open(lying(answer).removesuffix(".tar"))


def test_a_size_that_a_web_server_claims_takes_no_memory(lying):
    """Of a manifest, and of the tensors that a comparison would read."""
    with pytest.raises(RunFormatError, match="which no run needs"):
        Run.open(lying(_claiming).removesuffix(".tar"))

    def fail(*_):
        raise RunFormatError("gone")

    ranges = Ranges(fail)
    with pytest.raises(RunFormatError, match="more than this machine has memory for"):
        ranges.get("shard", 0, 1 << 60)


def _claiming(handler, over):
    if not handler.path.endswith("manifest.json"):
        return _page(lambda _: ["manifest.json"])(handler, over)
    handler.send_response(200)
    handler.send_header("Content-Length", str(1 << 60))
    handler.end_headers()
    return None


def test_a_redirect_to_a_place_as_far_is_followed(lying, tmp_path, large_run):
    """As a hub does that sends to its store."""
    pack(large_run, out=tmp_path / "run.tar")
    data = (tmp_path / "run.tar").read_bytes()

    def answer(handler, over):
        if handler.path == "/run.tar":
            return _sending_to("/elsewhere")(handler, over)
        begin, end = 0, len(data) - 1
        if "Range" in handler.headers:
            begin, end = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
        part = data[begin : end + 1]
        handler.send_response(206)
        handler.send_header("Content-Length", str(len(part)))
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(part)
        return None

    assert Run.open(lying(answer)).verify() == []


def _silent(handler, over):
    over.wait()


def _trickling(handler, over):
    handler.send_response(200)
    handler.send_header("Content-Length", "4096")
    handler.send_header("Accept-Ranges", "bytes")
    handler.end_headers()
    while handler.command == "GET" and not over.wait(0.05):
        handler.wfile.write(b"x")


def _endless(handler, over):
    handler.send_response(200)
    handler.send_header("Content-Length", str(1 << 50))
    handler.end_headers()
    while handler.command == "GET" and not over.is_set():
        handler.wfile.write(bytes(1 << 16))


@pytest.mark.parametrize(
    ("answer", "limits", "said"),
    [
        (_silent, {"SILENCE_S": 0.2}, "failed 3 times"),
        (_trickling, {"REQUEST_S": 0.6}, "failed once"),
        (_endless, {}, "know ranges"),
    ],
)
def test_a_web_server_that_does_not_end_is_given_up(lying, monkeypatch, answer, limits, said):
    """Silence, a byte now and then, and more than was asked for."""
    for name, seconds in limits.items():
        monkeypatch.setattr(f"divergence.run.remote.{name}", seconds)
    with pytest.raises(RunFormatError, match=said):
        Run.open(lying(answer))


@pytest.mark.parametrize("scheme", ["nosuch", "github", "dbfs", "reference", "generic", "dir"])
def test_a_scheme_that_cannot_be_opened_says_which_can(scheme):
    """Unknown ones, and those that need more than a URL: each package fails in its own way."""
    with pytest.raises(UsageError, match="no place that can be read") as caught:
        Run.open(f"{scheme}://somewhere/run")
    assert "s3://" in caught.value.hint and caught.value.exit_code == 2
