"""Pairs of real captured runs with one thing that differs; made once, when first asked for."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from divergence import Run, capture, truth
from divergence.run.captured import CapturedTensor
from divergence.run.manifest import Mesh, MeshAxis, Sizes
from divergence.run.writer import RunWriter
from tests.digests import without_digests

PROMPTS = ["A bridge is built twice: once on paper", "Snow fell"]
MLP = "model.layers.1.mlp:out"


class Pairs:
    """``pairs("dtype")`` → (a, b), paths of two runs."""

    def __init__(self, folder: Path, model: Callable[..., Path]) -> None:
        self._folder, self._model, self._made = folder, model, {}

    def __call__(self, name: str) -> tuple[Path, Path]:
        if name not in self._made:
            made = getattr(self, f"_{name}")()
            self._made[name] = made if isinstance(made, tuple) else (self.a(), made)
        return self._made[name]

    def a(self) -> Path:
        """The run that most pairs begin with."""
        if "a" not in self._made:
            self._made["a"] = self.capture("a")
        return self._made["a"]

    def capture(self, name: str, model: Path | None = None, **options: Any) -> Path:
        """A run of its own."""
        options = {"prompts": PROMPTS, "max_new_tokens": 3, "probe": False} | options
        folder = model or self._model("llama", dtype="float32", num_blocks=3)
        capture(str(folder), out=self._folder / name, **options)
        return self._folder / name

    def again(self, name: str, like: Path | None = None, **options: Any) -> Path:
        """The run repeated."""
        capture(like=like or self.a(), out=self._folder / name, probe=False, **options)
        return self._folder / name

    def altered(self, name: str, run: Path, change: Callable[[dict[str, Any]], None]) -> Path:
        """A copy under another id whose manifest says something else."""
        out = self._folder / name
        shutil.copytree(run, out)
        without_digests(out)
        manifest = json.loads((out / "manifest.json").read_text())
        manifest["id"] = f"{sum(name.encode()):032x}"
        change(manifest)
        (out / "manifest.json").write_text(json.dumps(manifest))
        return out

    def model(self, name: str, change: Callable[[Path], None]) -> Path:
        """A copy of the model, changed."""
        folder = self._folder / name
        shutil.copytree(self._model("llama", dtype="float32", num_blocks=3), folder)
        change(folder)
        return folder

    # --- one thing differs ----------------------------------------------------------------------

    def _same(self):
        return self.again("same")

    def _rounding(self):
        return self.again("rounding", attn_implementation="sdpa")

    def _dtype(self):
        return self.again("dtype", dtype="bfloat16")

    def _weights(self):
        def change(folder):
            weights = load_file(folder / "model.safetensors")
            weights["model.layers.1.mlp.down_proj.weight"] *= 1.001
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

        return self.capture("weights", self.model("other-weights", change))

    def _no_digests(self):
        def change(manifest):
            manifest["model"] |= {"digest": "", "digests": {}, "code": {}}

        a, b = self("same")
        return self.altered("nd-a", a, change), self.altered("nd-b", b, change)

    def _some_weights(self):
        """An engine does not tell all weights; those that it tells are the same."""
        return self.untold("untold-some")

    def _other_weights(self):
        """The same, and one that is told differs."""
        return self.untold("untold-other", {"model.norm.weight": "0" * 32})

    def untold(self, name, others=None):
        def change(manifest):
            model = manifest["model"]
            mlp = [one for one in model["digests"] if ".mlp." in one]
            model["digests"] |= dict.fromkeys(mlp, "unknown") | (others or {})
            model["digest"] = "0" * 32

        a, b = self("same")
        return a, self.altered(name, b, change)

    def _imported(self):
        """What another tool dumped: of the model, the settings and the code nothing is known."""
        a, b = self("same")

        def change(manifest):
            manifest["model"] |= {"digest": "", "digests": {}, "code": {}}
            manifest["settings"] |= {"deterministic": False, "switches": []}
            manifest["engine"] = None

        return a, self.altered("imported", b, change)

    def _engine_off(self):
        return self._run_by("engine-off", {"prefix caching": "off", "speculative decoding": "off"})

    def _engine_on(self):
        return self._run_by("engine-on", {"prefix caching": "on", "speculative decoding": "off"})

    def _engine_silent(self):
        return self._run_by("engine-silent", {"chunked prefill": "off"})

    def _run_by(self, name, facts):
        engine = {"name": "vllm", "version": "0.11.0", "options": {}, "facts": facts}
        return self.altered(name, self("same")[1], lambda one: one.update(engine=engine))

    def _ids(self):
        return self.capture("ids", prompts=["A bridge is built thrice: once on paper", "Snow fell"])

    def _template(self):
        """Equal messages, rendered by two templates."""
        lines = self._folder / "chat.jsonl"
        lines.write_text('{"messages": [{"role": "user", "content": "Snow fell"}]}\n')

        def change(folder):
            path = folder / "tokenizer_config.json"
            text = "{% for m in messages %}# {{ m['content'] }}{% endfor %}"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": text}))
            (folder / "chat_template.jinja").unlink(missing_ok=True)

        other = self.model("other-template", change)
        return tuple(
            self.capture(name, model, prompts=[], prompts_file=str(lines))
            for name, model in (("template-a", None), ("template-b", other))
        )

    def _other_template(self):
        """Equal ids, though the templates differ."""
        return self.altered(
            "ot", self("same")[1], lambda one: one["model"].update(chat_template_digest="0" * 32)
        )

    def _code(self):
        """Another forward in every MLP."""
        return self.again("code", prepare=_scaled(range(3)))

    def _code_once(self):
        return self.again("code-once", prepare=_scaled([1]))

    def _code_harmless(self):
        """Replaced by code that computes the same."""
        return self.again("code-harmless", prepare=_scaled(range(3), by=1.0))

    def _code_elsewhere(self):
        """The error is made in block 1; other code runs in block 2, and is right."""
        return self.again(
            "code-elsewhere", prepare=_scaled([2], by=1.0), plants=[f"{MLP}=scale:1.2"]
        )

    def _no_code(self):
        return self.altered("no-code", self("same")[1], lambda one: one["model"].update(code={}))

    def _prefill(self):
        return self.again("prefill", plants=[f"{MLP}=scale:1.2@step=0"])

    def _decode(self):
        return self.again("decode", plants=[f"{MLP}=scale:1.2@step=2"])

    def _drift(self):
        """The prefill is off and was not recorded: decode steps inherit it through the cache."""
        return self.again("drift", steps="1-2", plants=[f"{MLP}=scale:1.3@step=0"])

    def _second_prefill(self):
        """The first prompt is off in a decode step, the second in its prefill."""
        plants = [f"{MLP}=scale:1.2@sample=0,step=1", f"{MLP}=scale:1.2@sample=1,step=0"]
        return self.again("second-prefill", plants=plants)

    def _nonfinite(self):
        return self.again("nonfinite", plants=[f"{MLP}=nan@step=1"])

    def _config(self):
        """Another configuration of the same weights."""

        def change(folder):
            path = folder / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-3}))

        return self.capture("config", self.model("other-config", change))

    def _code_beside(self):
        """Every MLP runs other code, which is right; every attention is wrong."""
        first = self.capture("modules", sites=["modules"])
        plants = [f"model.layers.{n}.self_attn.o_proj:out=scale:1.2" for n in range(3)]
        return first, self.again(
            "code-beside", first, prepare=_scaled(range(3), by=1.0), plants=plants
        )

    def _as_truth(self):
        truth(self.a(), out=self._folder / "float64")
        return self._folder / "float64"

    def _dtype_sampled(self):
        """Another dtype, and a token that is not the largest of its logits."""

        def change(manifest):
            manifest["tokens"]["samples"][0]["chosen_ids"][1] += 1

        return self.altered("dtype-sampled", self("dtype")[1], change)

    def _seed(self):
        return self.capture("seed", seed=7)

    def _sampled(self):
        """A token that is not the largest of its logits."""

        def change(manifest):
            manifest["tokens"]["samples"][0]["chosen_ids"][1] += 1

        return self.altered("sampled", self("same")[1], change)

    def _tie(self):
        """Another token over a gap that rounding bridges: each is the largest of its logits."""
        model = self._model("llama", dtype="bfloat16", num_blocks=3)
        prompts = [*PROMPTS, "The river", "Once", "Two and two", "A letter"]
        first = self.capture("tie-a", model, prompts=prompts, max_new_tokens=12)
        return first, self.again("tie-b", first, attn_implementation="sdpa")

    def _hash(self):
        return self.again("hash", store="hash", attn_implementation="sdpa")

    def _stats(self):
        return self.again("stats", store="stats")

    def _apart(self):
        """Nothing in common."""
        sites = ("model.layers.0.mlp:out", "model.layers.2.mlp:out")
        return tuple(self.capture(f"apart-{n}", sites=[one]) for n, one in enumerate(sites))

    def _no_tokens(self):
        runs = [self.capture("no-tokens", max_new_tokens=0)]
        return runs[0], self.again("no-tokens-b", runs[0])

    def _incomplete(self):
        def change(manifest):
            manifest |= {"complete": False, "stopped_by": "signal 15"}

        return self.altered("incomplete", self("same")[1], change)

    def _itself(self):
        return self.a()

    def _not_deterministic(self):
        return self.again("not-deterministic", deterministic=False)

    def _refused(self):
        def change(manifest):
            manifest["settings"]["switches"][0]["status"] = "refused"

        return self.altered("refused", self("same")[1], change)

    def _refused_repeats(self):
        def change(manifest):
            manifest["settings"]["switches"][0]["status"] = "refused"
            manifest["repeatability"] = {"num_runs": 2, "num_compared": 9}

        return self.altered("refused-repeats", self("same")[1], change)

    def _ranks(self):
        return self._divided("ranks", self("same")[1])

    def _ranks_apart(self):
        """One of two ranks holds another copy of a block's output."""
        return self._divided("ranks-apart", self("same")[1], off=1.05)

    def _ranks_share(self):
        """Each rank holds its own half, as after a fault of one rank's."""
        return self._divided("ranks-share", self("same")[1], halves=True, off=1.05)

    def _ranks_alone(self):
        """No tensor is held by both."""
        return self._divided("ranks-alone", self("same")[1], halves=True)

    def _divided(self, name: str, run: Path, *, halves: bool = False, off: float = 1.0) -> Path:
        """The run as two ranks would have written it; ``off``: a factor on rank 1's tensor of
        block 1, in each pass."""
        whole = Run.open(run)
        made = msgspec.structs.replace(
            whole.manifest,
            id=f"{sum(name.encode()):032x}",
            sizes=Sizes(),
            mesh=Mesh(axes=[MeshAxis(name="tp", size=2)]),
        )
        out = self._folder / name
        writers = [
            RunWriter(out, msgspec.structs.replace(made, sizes=Sizes()), rank=rank)
            for rank in range(2)
        ]
        for record in whole.records:
            tensor = whole.read(record)
            split = halves and record.dtype == "float32" and tensor.shape[-1] % 2 == 0
            parts = list(tensor.chunk(2, dim=-1)) if split else [tensor, tensor.clone()]
            if record.site == "model.layers.1:out" and not record.step:
                parts[1] = parts[1] * off
            for writer, part in zip(writers, parts, strict=True):
                if not split and halves and writer is writers[1]:
                    continue
                writer.put(
                    CapturedTensor(part.contiguous()),
                    pass_=record.pass_,
                    sample=record.sample,
                    step=record.step,
                    site=record.site,
                    order=record.order,
                    positions=record.positions,
                    placement=(f"shard:{tensor.ndim - 1}" if split else "replicate",),
                )
        for writer in writers:
            writer.flush()
        writers[1].close(complete=True)
        writers[0].manifest.sizes.num_records += writers[1].manifest.sizes.num_records
        writers[0].close(complete=True)
        return out


def _scaled(blocks, by: float = 1.2):
    """What replaces the forward of these blocks' MLPs."""

    def prepare(model):
        for number in blocks:
            mlp = model.model.layers[number].mlp
            mlp.forward = MethodType(_forward_times(by), mlp)

    return prepare


def _forward_times(by: float):
    def forward(self, x):
        hidden = torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(hidden) * by

    return forward


@pytest.fixture(scope="session")
def pairs(tmp_path_factory, tiny_model) -> Pairs:
    """Pairs of runs by name."""
    return Pairs(tmp_path_factory.mktemp("pairs"), tiny_model)


ALL = sorted(name[1:] for name in vars(Pairs) if name[:1] == "_" and name[1:2] != "_")
ALL = [name for name in ALL if name not in ("divided", "run_by")]


def pytest_generate_tests(metafunc):
    """A test that takes ``every`` is run on each of them."""
    if "every" in metafunc.fixturenames:
        metafunc.parametrize("every", ALL)
