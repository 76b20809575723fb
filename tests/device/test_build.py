"""Building the simulated device: once, whoever asks, and with a reason where it cannot be."""

import threading

import pytest

COMPILER = """#!/bin/sh
echo >> {folder}/calls
while [ "$1" != -o ]; do shift; done
sleep 0.2
{last}
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """``compiler(last)``: a g++ that writes down each call; returns how many there were."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    monkeypatch.setenv("SIMULATED_NPU_CACHE", str(tmp_path / "cache"))

    def make(last: str):
        program = tmp_path / "bin" / "g++"
        program.write_text(COMPILER.format(folder=tmp_path, last=last))
        program.chmod(0o755)
        return lambda: len((tmp_path / "calls").read_text().splitlines())

    return make


def test_two_that_need_it_build_it_once(simulated_build, compiler):
    """The second one waits, and takes what the first one made."""
    num_calls = compiler('echo made > "$2"')
    made = []
    threads = [
        threading.Thread(target=lambda: made.append(simulated_build.library())) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made[0] == made[1]
    assert made[0].read_text() == "made\n"
    assert num_calls() == 1


def test_what_the_compiler_says_is_shown(simulated_build, compiler):
    """A failed build is no library, and is tried again."""
    num_calls = compiler("echo no such header >&2; exit 1")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such header"):
            simulated_build.library()
    assert num_calls() == 2


def test_a_machine_without_a_compiler(simulated_build, monkeypatch, tmp_path):
    """The reason to skip names what is missing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "needs a compiler: g++" in simulated_build.why_not()
