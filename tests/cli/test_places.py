"""Runs in archives and object stores, by every command that takes one."""

import json
import re
import shlex

import pytest

PLANT = "model.layers.1.self_attn.o_proj:out=scale:1.5"


@pytest.fixture
def archive(invoke, llama, tmp_path):
    """A run of the tiny model, captured into a tar."""
    code, out, err = invoke("capture", llama, "-o", "a.tar", "--max-new-tokens", "2")
    assert code == 0, err
    assert "captured a.tar" in out
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]
    return tmp_path / "a.tar"


@pytest.mark.slow
def test_the_whole_way_through_a_bucket(invoke, archive, s3):
    """Captured into an archive, repeated into a bucket, judged and compared where they lie."""
    url = f"{s3}/runs/b"
    like = ("capture", "--like", "a.tar", "--plant", PLANT)
    code, out, err = invoke(*like, "-o", url)
    assert code == 0, err
    assert f"captured {url}" in out and f"divergence compare a.tar {url}" in out
    code, out, err = invoke("truth", url, "-o", f"{s3}/truth.zip", "-q")
    assert code == 0, err
    assert out == f"{s3}/truth.zip\n"
    code, out, err = invoke("compare", "a.tar", url, "--truth", f"{s3}/truth.zip")
    assert code == 0, err
    assert "model.layers.1" in out
    code, out, _ = invoke("check", "a.tar", url, "--json")
    assert code == 1
    assert json.loads(out)["report"]["candidate"]["path"] == url
    code, out, _ = invoke("inspect", url, "--verify")
    assert code == 0
    assert "every tensor has the checksum" in out


@pytest.mark.slow
def test_what_is_printed_to_do_next_works(invoke, archive, s3):
    """Each command that a comparison prints names the URL and can be pasted."""
    assert invoke("capture", "--like", "a.tar", "-o", f"{s3}/b", "--plant", PLANT, "-q")[0] == 0
    _, out, _ = invoke("compare", "a.tar", f"{s3}/b")
    commands = re.findall(r"^\s+(divergence .*?)(?:  +#.*)?$", out, flags=re.MULTILINE)
    assert commands and any(f"{s3}/b" in command for command in commands)
    inspected = [c for c in commands if c.startswith("divergence inspect")]
    for command in inspected:
        assert invoke(*shlex.split(command)[1:])[0] == 0, command


def test_packing_and_unpacking(invoke, archive, s3, tmp_path):
    """Through a bucket and back: the same archive, bit for bit."""
    code, out, err = invoke("pack", "a.tar", "-o", f"{s3}/a.zip")
    assert code == 0, err
    assert out.startswith(f"packed {s3}/a.zip: ")
    assert invoke("unpack", f"{s3}/a.zip", "-q") == (0, "a\n", "")
    assert invoke("pack", "a", "-o", "again.tar", "-q")[:2] == (0, "again.tar\n")
    assert (tmp_path / "again.tar").read_bytes() == archive.read_bytes()
    code, out, _ = invoke("unpack", "a.tar", "--json", "-o", "b")
    assert (code, json.loads(out)["path"]) == (0, "b")
    code, _, err = invoke("unpack", "a.tar")
    assert code == 2 and "--force" in err


def test_a_golden_may_come_from_anywhere_and_is_of_this_machine(invoke, archive, s3):
    """Blessing replaces it by renaming, which a URL has not."""
    assert invoke("pack", "a.tar", "-o", f"{s3}/a.tar", "-q")[0] == 0
    code, _, err = invoke("check", "golden", f"{s3}/a.tar", "--bless")
    assert code == 0, err
    code, _, err = invoke("check", "golden", "a.tar", "-q")
    assert code == 2 and "a copy of it" in err
    code, _, err = invoke("check", f"{s3}/golden", "golden", "--bless")
    assert code == 2 and "divergence pack golden" in err


REFUSED = {
    "inspect nosuch://x/y": "Protocol not known",
    "inspect gs://bucket/run": "pip install 'divergence-debug[remote]'",
    "inspect zip://a::s3://b/c": "chain of URLs",
    "compare a.tar s3://no-such-bucket/b": "there is nothing at s3://no-such-bucket/b",
    "capture --like a.tar -o s3://no-such-bucket/b": "there is no bucket 'no-such-bucket'",
    "capture --like a.tar -o a.tar.gz": "compressed",
    "capture --like a.tar -o a.tar --force": "is the run to be repeated",
    "capture --like a.tar -o a.tar": "is the run to be repeated",
    "pack a.tar -o b": "is not the name of an archive",
    "unpack a.tar -o s3://bucket/a": "is not the name of a directory",
    "localize a.tar a.tar -o s3://bucket/a": "is a URL",
}


def test_refusals(invoke, archive, s3):
    """Exit code 2, one sentence, and what to do."""
    for words, said in REFUSED.items():
        code, out, err = invoke(*shlex.split(words))
        assert (code, out) == (2, ""), words
        assert said in " ".join(err.split()), words
        assert "try:" in err or "where:" in err, words
