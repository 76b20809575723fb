"""What a capture of a large model costs: bytes, records, time, memory, and many ranks.

    python benchmarks/scale.py [--prompt 4096] [--new 32] [--copy 25] [--write 2] [--read 3]

Three models with the published hyper-parameters (each model's config.json on the Hugging Face
hub), planned by the same code as ``divergence capture MODEL --dry-run``: the modules are built on
torch's meta device, so no weight is loaded and no accelerator is needed. Bytes are those of the
plan, which may differ by a percent from one plan to the next: without values, equal tensors are
known as such only while they are there. Times are bytes over a rate, and the rates are printed with
them: those of this machine's processor and disk are measured here; of a device nothing is known, so
``--copy`` is an assumption.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from divergence.numerics.pairs import measure_pair
from divergence.recording.api import capture
from divergence.recording.dry_run import DryRun, plan_capture
from divergence.run.manifest import digest_tensor
from divergence.run.reader import Run
from tests.models import tiny

LLAMA_3_8B = {
    # meta-llama/Llama-3.1-8B, config.json
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
LLAMA_3_70B = LLAMA_3_8B | {
    # meta-llama/Llama-3.1-70B, config.json
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
DEEPSEEK_V3 = {
    # deepseek-ai/DeepSeek-V3, config.json; in bfloat16, as transformers runs it
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
MODELS = {"8B": LLAMA_3_8B, "70B": LLAMA_3_70B, "671B": DEEPSEEK_V3}
GB = 1e9
SHARD_BYTES = 64 << 20
SITES = (("blocks", "sdpa"), ("modules", "sdpa"), ("modules", "eager"))
"""What is recorded, and under which attention: eager, the default of a capture, hands on all
attention weights, T × T for each head, which modules record."""
MODES = ("full", "sketch", "stats", "hash")
RANKS = (8, 64, 1000)


@dataclass
class Planned:
    """One model and one choice of sites, in each storage mode. ``seconds``: CPU time of the first
    plan, start of python included."""

    modes: dict[str, DryRun]
    seconds: float
    rss_bytes: float

    @property
    def plan(self) -> DryRun:
        return self.modes["full"]

    @property
    def num_records(self) -> int:
        return sum(site.num_steps for site in self.plan.rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument(
        "--copy", type=float, default=25.0, help="GB/s from device to host, assumed"
    )
    parser.add_argument("--write", type=float, help="GB/s to disk; measured here if not given")
    parser.add_argument("--read", type=float, help="GB/s from disk; measured here if not given")
    parser.add_argument("--plan", nargs=3, help=argparse.SUPPRESS)  # one, in a process of its own
    args = parser.parse_args()
    if args.plan:
        print(_planned(*args.plan, args))
        return
    rates = _rates(args)
    line_bytes, environment_bytes = _metadata()
    print(f"prompt {args.prompt} tokens, {args.new} new tokens, batch 1, bfloat16\n")
    print("| model | parameters | weights | sites, attention | records | plan made in | its RSS |")
    print("|---|---|---|---|---|---|---|")
    plans: dict[tuple[str, tuple[str, str]], Planned] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, config in MODELS.items():
            path = Path(folder) / name
            path.mkdir()
            (path / "config.json").write_text(json.dumps(config))
            count = _num_parameters(path)
            for sites in SITES:
                planned = plans[name, sites] = _in_own_process(path, sites, folder, args)
                cells = (
                    name,
                    f"{count / GB:.1f} B",
                    f"{2 * count / GB:,.0f} GB",
                    ", ".join(sites),
                    f"{planned.num_records:,}",
                    f"{planned.seconds:.0f} s CPU",
                    f"{planned.rss_bytes / GB:.2f} GB",
                )
                print("| " + " | ".join(cells) + " |")
    _print_costs(plans, rates, line_bytes)
    _print_shares(plans, rates)
    _print_thousand(plans, line_bytes, environment_bytes)


def _planned(path: str, sites: str, folder: str, args: argparse.Namespace) -> str:
    """Plan one capture here, in all modes; what was found as JSON."""
    import msgspec

    prompts = Path(folder) / "prompts.jsonl"
    prompts.write_text(json.dumps({"input_ids": list(range(1, args.prompt + 1))}) + "\n")
    sites, attention = sites.split(",")
    plans, seconds = {}, 0.0
    for mode in MODES:
        plans[mode] = plan_capture(
            path,
            prompts_file=prompts,
            max_new_tokens=args.new,
            sites=[sites],
            attn_implementation=attention,
            store=mode,
        )
        usage = resource.getrusage(resource.RUSAGE_SELF)
        seconds = seconds or usage.ru_utime + usage.ru_stime
    status = Path("/proc/self/status").read_text()  # ru_maxrss begins with the parent's
    peak_kib = int(status.split("VmHWM:")[1].split()[0])
    return json.dumps([msgspec.to_builtins(plans), seconds, peak_kib * 1024])


def _in_own_process(
    path: Path, sites: tuple[str, str], folder: str, args: argparse.Namespace
) -> Planned:
    import msgspec

    done = subprocess.run(
        [
            sys.executable,
            __file__,
            "--plan",
            str(path),
            ",".join(sites),
            folder,
            "--prompt",
            str(args.prompt),
            "--new",
            str(args.new),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    plans, seconds, rss = json.loads(done.stdout.splitlines()[-1])
    return Planned(msgspec.convert(plans, dict[str, DryRun]), seconds, rss)


def _num_parameters(path: Path) -> int:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    return sum(parameter.numel() for parameter in model.parameters())


def _print_costs(plans: dict, rates: dict[str, float], line_bytes: float) -> None:
    print("\nrates, GB/s: " + ", ".join(f"{name} {rate:.2f}" for name, rate in rates.items()))
    print(
        "\n| model | sites, attention | mode | stored | records.jsonl | copy to host | hash "
        "| write | read two, to compare |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for (name, sites), planned in plans.items():
        for mode, stored in _by_stored(planned):
            lines = planned.num_records * line_bytes
            cells = (
                name,
                ", ".join(sites),
                mode,
                _size(stored),
                _size(lines),
                _time(stored / GB / rates["copy"]),
                _time(stored / GB / rates["hash"]),
                _time((stored + lines) / GB / rates["write"]),
                _time(2 * (stored + lines) / GB / rates["read"]),
            )
            print("| " + " | ".join(cells) + " |")


def _by_stored(planned: Planned) -> list[tuple[str, float]]:
    """(modes, bytes) of each, those that store equally many in one."""
    found: dict[float, list[str]] = {}
    for mode in MODES:
        found.setdefault(planned.modes[mode].total_bytes, []).append(mode)
    return [(", ".join(modes), stored) for stored, modes in found.items()]


def _tensors(plan: DryRun) -> list[float]:
    """Bytes of each tensor that is compared, in no order."""
    found: list[float] = []
    for site in plan.rows:
        num_decode = site.num_steps - bool(site.bytes_prefill)
        found += [site.bytes_prefill] * bool(site.bytes_prefill)
        found += [site.bytes_per_step] * (num_decode if site.bytes_per_step else 0)
    return found or [0.0]


def _print_shares(plans: dict, rates: dict[str, float]) -> None:
    """Is splitting by pairs enough? The busiest rank's share over the mean, and the time that the
    largest pair takes alone, below which no number of ranks comes."""
    print("\nthe busiest rank's bytes over the mean, pairs dealt out whole:\n")
    heads = " | ".join(f"{n} ranks" for n in RANKS)
    print(f"| model | sites, attention | largest pair | of all bytes | measured in | {heads} |")
    print("|---|---|---|---|---|" + "---|" * len(RANKS))
    for (name, sites), planned in plans.items():
        sizes = [2 * size for size in _tensors(planned.plan)]
        cells = [name, ", ".join(sites), _size(max(sizes)), f"{100 * max(sizes) / sum(sizes):.2f}%"]
        cells.append(_time(max(sizes) / GB / rates["measure"]))
        for num_ranks in RANKS:
            load = [0.0] * num_ranks
            for size in sizes:
                load[load.index(min(load))] += size
            cells.append(f"{max(load) * num_ranks / sum(load):.2f}")
        print("| " + " | ".join(cells) + " |")


def _print_thousand(plans: dict, line_bytes: float, environment_bytes: float) -> None:
    """A rank's part where nothing is divided: what is divided among tensor-parallel ranks is less,
    and what they hold alike (a block's output) is written by each."""
    num_ranks = 1000
    print(f"\n{num_ranks:,} ranks, each with a prompt of its own or an equal copy, at most:\n")
    print(
        "| model | sites, attention | mode | bytes a rank | shards a rank | all bytes | records |"
    )
    print("|---|---|---|---|---|---|---|")
    for (name, sites), planned in plans.items():
        if name != "671B" or sites[1] == "eager":
            continue
        for mode, stored in _by_stored(planned):
            whole = stored + planned.num_records * line_bytes
            cells = (
                name,
                ", ".join(sites),
                mode,
                _size(whole),
                f"{-(-int(stored) // SHARD_BYTES):,}",
                _size(num_ranks * whole),
                f"{num_ranks * planned.num_records:,}",
            )
            print("| " + " | ".join(cells) + " |")
    print(
        f"\na record takes {line_bytes:.0f} B; an environment {environment_bytes:.0f} B: "
        f"{_size(num_ranks * environment_bytes)} of manifest where every rank's differs"
    )


def _rates(args: argparse.Namespace) -> dict[str, float]:
    """GB/s. Processor: by CPU time of one thread, which other work on the machine leaves alone."""
    torch.set_num_threads(1)
    x = torch.randn(64 << 20).bfloat16()  # 128 MiB
    y = x * (1 + 1e-3 * torch.randn(x.shape[0])).bfloat16()
    grid = [tensor.reshape(-1, 4096) for tensor in (x, y)]
    num_bytes = x.numel() * 2
    found = {
        "copy": args.copy,
        "hash": num_bytes / _cpu_s(lambda: digest_tensor(x)) / GB,
        "measure": 2 * num_bytes / _cpu_s(lambda: measure_pair(*grid, threads=1)) / GB,
    }
    write, read = _disk(x)
    return found | {"write": args.write or write, "read": args.read or read}


def _cpu_s(work) -> float:
    work()
    times = []
    for _ in range(5):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return statistics.median(times)


def _disk(x: torch.Tensor) -> tuple[float, float]:
    """(write with fsync, cold read) of 1 GiB, medians of three, by wall clock."""
    data = memoryview(x.view(torch.uint8).numpy())
    writes, reads = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bytes"
        for _ in range(3):
            begin = time.perf_counter()
            with open(path, "wb") as file:
                for _ in range(8):
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
            writes.append(8 * len(data) / (time.perf_counter() - begin) / GB)
            with open(path, "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                begin = time.perf_counter()
                while file.read(16 << 20):
                    pass
            reads.append(8 * len(data) / (time.perf_counter() - begin) / GB)
    return statistics.median(writes), statistics.median(reads)


def _metadata() -> tuple[float, float]:
    """Bytes of a record's line, and of an environment in the manifest, in a real capture."""
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.build("llama", Path(folder) / "model")
        run = capture(str(model), out=Path(folder) / "run", sites=["modules"], max_new_tokens=4)
        lines = (Path(folder) / "run" / "records.jsonl").read_bytes()
        manifest = json.loads((Path(folder) / "run" / "manifest.json").read_text())
        environment = json.dumps(manifest["environment"])
        _print_opening(Path(folder) / "run", lines)
        return len(lines) / len(run.records), float(len(environment))


def _print_opening(path: Path, lines: bytes) -> None:
    """What it takes to open a run of many records: this one's, said again for further steps."""
    manifest = json.loads((path / "manifest.json").read_text())
    some = [json.loads(line) for line in lines.splitlines()]
    some = [record for record in some if record["step"] == 1]
    count = 1 + 100_000 // len(some)
    with open(path / "records.jsonl", "w") as file:
        for step in range(count):
            for record in some:
                file.write(json.dumps(record | {"step": step}) + "\n")
    manifest["sizes"]["num_records"] = count * len(some)
    manifest.update(digest=None, record_digests={})
    (path / "manifest.json").write_text(json.dumps(manifest))
    before, begin = _resident(), time.process_time()
    run = Run.open(path)
    seconds, grown = time.process_time() - begin, _resident() - before
    print(
        f"opening {len(run.records):,} records: {seconds:.1f} s CPU, "
        f"{grown / len(run.records):,.0f} B of memory each\n"
    )


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB" if num_bytes < 999.5 else f"{num_bytes / 1000:,.3g} PB"


def _time(seconds: float) -> str:
    if seconds < 0.1:
        return "< 0.1 s"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


if __name__ == "__main__":
    main()
