"""capture --train: options that make no step are refused, with what to type instead."""

from __future__ import annotations


def test_one_process_has_no_stage_of_zero(invoke, llama, tmp_path):
    code, _, err = invoke("capture", llama, "--train", "--zero", "2", "-o", tmp_path / "run")
    assert code == 2
    assert "--zero 2 has no ranks to divide over" in err and "--mesh fsdp" in err
