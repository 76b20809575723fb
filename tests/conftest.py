"""What every test stands on: no network, no settings of the user, tiny models built once."""

import atexit
import contextlib
import gc
import json
import logging
import os
import random
import shlex
import shutil
import signal
import socket
import sys
import tarfile
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# For `from tests.models import ...` and `from benchmarks...`, in whatever way pytest was started.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Before anything imports torch or huggingface_hub: both read these once. Child processes inherit
# them, so a command that a test runs is as offline as the test.
_home = tempfile.mkdtemp(prefix="divergence-tests-")
atexit.register(shutil.rmtree, _home, ignore_errors=True)
for _name in [name for name in os.environ if name.startswith("DIVERGENCE_")]:
    del os.environ[_name]
os.environ |= {
    "HF_HOME": _home,
    "HF_HUB_OFFLINE": "1",
    "XDG_CACHE_HOME": _home,
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# Hundreds of modules are compiled once for all workers and the processes that tests start, not by
# each: the environment of a container often forbids it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# The simulated accelerator is compiled once for all workers, and for later runs of this checkout.
os.environ.setdefault("SIMULATED_NPU_CACHE", str(Path(__file__).parents[1] / "build" / "device"))
# A job in a shell's background has Ctrl-C ignored, one under nohup the end of its terminal, and so
# have their children; tests send both.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# One thread is fastest for tensors this small, and it leaves the other cores alone.
os.environ.setdefault("OMP_NUM_THREADS", "1")


SLOW = Path(__file__).with_name("slow.txt")
"""Cases of tests whose other cases hold nearly the same in less time: for `make test-slow`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--order", type=int, help="the seed of a random order of files, and of tests")


def pytest_configure() -> None:
    """Properties hold for the same examples in every run, however busy the machine is."""
    with contextlib.suppress(ImportError):
        from hypothesis import HealthCheck, settings

        slow = [HealthCheck.too_slow]
        settings.register_profile(
            "same", deadline=None, derandomize=True, suppress_health_check=slow
        )
        settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is listed as slow. Where the domains are taken away, what is of the whole house
    is left out. With ``--order``, files come in a random order, and the tests of each in one."""
    from divergence.domain import own_domains

    if (seed := config.getoption("order")) is not None:
        generator = random.Random(seed)
        places = {path: generator.random() for path in dict.fromkeys(item.path for item in items)}
        items.sort(key=lambda item: (places[item.path], generator.random()))

    slow = set(SLOW.read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)
    if not own_domains():
        for item in items:
            if item.get_closest_marker("whole"):
                item.add_marker(pytest.mark.skip(reason="the domains are not here"))


@pytest.fixture(autouse=True, scope="session")
def _no_network() -> Iterator[None]:
    """A connection to any host but this one fails at once and says who asked."""
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a test tried to reach {address[0]}; tests run offline")
        connect(self, address)

    patch = pytest.MonkeyPatch()
    patch.setattr(socket.socket, "connect", refuse)
    yield
    patch.undo()


@pytest.fixture(autouse=True, scope="session")
def _no_own_truth() -> Iterator[None]:
    """Captures make no truth of their own unless a test asks for it: most tests are about
    something else, and tiny models take longer in float64 than in all that is tested."""
    from divergence.recording import api, passes

    patch = pytest.MonkeyPatch()
    patch.setattr(passes, "DEFAULT_TRUTH", "no")
    patch.setattr(api, "LEAST_SECONDS", 300.0)  # however busy this machine is
    yield
    patch.undo()


@pytest.fixture
def own_truths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures make their own truth by default, as they do for users."""
    from divergence.recording import passes

    monkeypatch.setattr(passes, "DEFAULT_TRUTH", "auto")


@pytest.fixture(scope="session")
def unpack(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """``unpack(ARCHIVE)``: a folder with the runs of a fixture."""

    def unpacked(archive: Path) -> Path:
        folder = tmp_path_factory.mktemp("fixture")
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
        return folder

    return unpacked


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_model("llama", num_blocks=2)`` → its folder; the same arguments, the same folder.

    Takes what tests.models.tiny.build takes, less the folder. Do not write into it.
    """
    built: dict[tuple[Any, ...], Path] = {}

    def build(architecture: str, **options: Any) -> Path:
        from tests.models import tiny

        key = (architecture, *sorted(options.items()))
        if key not in built:
            folder = tmp_path_factory.mktemp(f"tiny-{architecture}-")
            built[key] = tiny.build(architecture, folder, **options)
        return built[key]

    return build


@pytest.fixture(scope="session")
def drawn_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``drawn_model("Mistral", change, sliding_window=4)`` → the folder of a model of transformers
    with random weights, whose blocks do much; ``change(model)`` is done before it is stored."""
    built: dict[tuple[Any, ...], Path] = {}

    def build(family: str = "Llama", change: Any = None, seed: int = 0, **sizes: Any) -> Path:
        import torch
        import transformers

        hidden = sizes.setdefault("hidden_size", 128)
        usual = {"vocab_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4}
        usual |= {"num_key_value_heads": 2, "intermediate_size": 2 * hidden}
        sizes = usual | {"initializer_range": 0.08} | sizes
        if (key := (family, change, seed, str(sizes))) not in built:
            torch.manual_seed(seed)
            config = getattr(transformers, f"{family}Config")(**sizes)
            model = getattr(transformers, f"{family}ForCausalLM")(config)
            if change is not None:
                with torch.no_grad():
                    change(model)
            built[key] = tmp_path_factory.mktemp("drawn-") / "model"
            model.save_pretrained(built[key])
        return built[key]

    return build


@pytest.fixture(scope="session")
def llama(tiny_model: Callable[..., Path]) -> Path:
    """The folder of the model that most tests use."""
    return tiny_model("llama")


@pytest.fixture(scope="session")
def shared_run(
    tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """``shared_run("llama", model={"num_blocks": 4}, dtype="float32")``: a run of a tiny model, or
    of one in a folder, of ``capture``'s options; ``shared_run(like=run)`` repeats one. Equal
    arguments give the same run to all tests: nobody writes into it."""
    from divergence import Run, capture
    from divergence.recording import passes

    made: dict[str, Path] = {}

    def make(
        architecture: str | Path = "llama", *, like: Any = None, model: Any = None, **options: Any
    ) -> Run:
        source = (architecture, sorted((model or {}).items())) if like is None else like.path
        key = repr((source, sorted(options.items()), passes.DEFAULT_TRUTH))
        if key not in made:
            folder = architecture if isinstance(architecture, Path) else None
            if like is None and folder is None:
                folder = tiny_model(architecture, **(model or {}))
            folder = folder and str(folder)
            out = tmp_path_factory.mktemp("shared") / "run"
            made[key] = capture(folder, like=like, out=out, **options).path
        return Run.open(made[key])

    return make


@pytest.fixture(scope="session")
def shared_truth(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``shared_truth(run)``: its truth, made once for all tests."""
    from divergence import Run, truth

    made: dict[str, Path] = {}

    def make(run: Run) -> Run:
        if (key := str(run.path)) not in made:
            made[key] = truth(run, out=tmp_path_factory.mktemp("shared") / "truth").path
        return Run.open(made[key])

    return make


@pytest.fixture
def answer(tmp_path: Path) -> Callable[..., Any]:
    """``answer(run, prepare, truth=truth, **options)``: what `compare` says of a run and of one
    like it, of a model that ``prepare`` changed; the machine is probed as it was for the run."""
    from divergence import capture, compare

    def call(run: Any, prepare: Any = None, truth: Any = None, **options: Any) -> Any:
        out = Path(tempfile.mkdtemp(dir=tmp_path)) / "b"
        options = {"probe": bool(run.manifest.arithmetic)} | options
        return compare(run, capture(like=run, out=out, prepare=prepare, **options), truth=truth)

    return call


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[str]:
    """An S3 API on this machine; its URL."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request else
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def s3(_s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A fresh bucket behind a real S3 API, with credentials set; its URL, ``s3://bucket-...``."""
    import s3fs

    for name, value in {
        "AWS_ENDPOINT_URL": _s3_server,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_CONFIG_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem().mkdir(bucket)
    yield f"s3://{bucket}"
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def invoke(capsys, monkeypatch, tmp_path):
    """``invoke(*args)`` → (exit code, stdout, stderr) of one command, in an empty directory."""
    from divergence.cli.main import app

    monkeypatch.chdir(tmp_path)
    for name in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")

    def call(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            app([str(arg) for arg in args], prog_name="divergence")
        captured = capsys.readouterr()
        return caught.value.code, captured.out, captured.err

    return call


@pytest.fixture
def dry_run(invoke):
    """``dry_run(model, *options)``: the plan that `capture --dry-run` prints; what it refuses, as
    the error."""

    def call(*words: object) -> dict[str, Any] | str:
        code, out, err = invoke("capture", *words, "--dry-run", "--json")
        return err if code else json.loads(out)["dry_run"]

    return call


@pytest.fixture
def bless(invoke):
    """``bless(golden, new, *options)``: what `check --bless` answers; what it refuses, as the error
    that it prints."""

    def call(golden: Path | str, new: Path | str, *options: str) -> dict[str, Any] | str:
        code, out, err = invoke("check", golden, new, "--bless", "--json", *options)
        return err if code else json.loads(out)["blessed"]

    return call


@pytest.fixture
def follow(invoke, tmp_path):
    """``follow(*args, **places)`` runs a command, each that it prints under `next`, and each that
    these print in turn: none is refused, none fails. OTHER is a second run; ``places``: what other
    words in capitals stand for."""
    tried = []

    def call(*args: str, depth: int = 2, **places: object) -> list[str]:
        code, out, err = invoke(*args)
        assert code in (0, 1), (args, out, err)
        for line in out.partition("\nnext\n")[2].splitlines() if depth else ():
            command = line.partition("   #")[0].strip()
            if not command.startswith("divergence ") or command in tried:
                continue
            tried.append(command)
            made = "-o OTHER" in command or (tmp_path / "other").exists()
            names = {"OTHER": "other" if made else "b", **places}
            words = [str(names.get(word, word)) for word in shlex.split(command)]
            call(*words[1:], depth=depth - 1, **places)
        return tried

    return call


def pytest_collection_finish() -> None:
    """What is there before the first test lives until the last: the garbage collector need not
    look at it again and again."""
    gc.collect()
    gc.freeze()
