"""One evaluation by lm-evaluation-harness, in a process of its own (kernels are chosen at start).

    python benchmarks/_scores_eval.py MODEL OUT --dtype bfloat16 [--int8] [--fault NAME]

Run it in a folder that ``_scores_task.write_task`` wrote, with a Python that has lm-eval.
``--int8`` rounds each weight matrix to eight bits a row; ``--fault`` plants one of FAULTS.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

FAULTS = {
    # the gate's sign is lost, as by a kernel that fuses it wrongly
    "gate-sign": ("model.layers.5.mlp.gate_proj", lambda out: -out),
    # half of what one block adds, as by a scale applied twice
    "mlp-half": ("model.layers.15.mlp", lambda out: out / 2),
}


def _round_to_int8(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, torch.nn.Linear):
                step = part.weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-8) / 127
                part.weight.copy_((part.weight / step).round() * step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--task", default="facts")
    parser.add_argument("--batch", type=int, default=32)
    given = parser.parse_args()

    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=getattr(torch, given.dtype))
    model.eval()
    if given.int8:
        _round_to_int8(model)
    if given.fault:
        path, change = FAULTS[given.fault]
        model.get_submodule(path).register_forward_hook(lambda _, __, out: change(out))
    lm = HFLM(
        pretrained=model,
        tokenizer=AutoTokenizer.from_pretrained(given.model),
        batch_size=given.batch,
        device="cpu",
        dtype=given.dtype,
    )
    tracker = EvaluationTracker(output_path=given.out)
    found = simple_evaluate(
        lm,
        tasks=[given.task],
        task_manager=TaskManager(include_path="."),
        bootstrap_iters=0,
        evaluation_tracker=tracker,
        log_samples=True,
        device="cpu",
        batch_size=given.batch,
    )
    samples = found.pop("samples")
    tracker.save_results_aggregated(results=found, samples=samples)
    for name, rows in samples.items():
        tracker.save_results_samples(task_name=name, samples=rows)
    print(Path(given.out), found["results"])


if __name__ == "__main__":
    main()
