"""Names of places: what is a path, what a URL, and what is refused."""

from pathlib import Path

import pytest

from divergence.errors import UsageError
from divergence.run.storage import Url, archive_kind, folder_of, location_of, same_location


def test_a_path_stays_a_path():
    """Also one with odd characters, and one whose file does not exist."""
    assert location_of("runs/a [1]") == Path("runs/a [1]")
    assert location_of("~").is_absolute()
    assert location_of("file:///tmp/a%20b") == Path("/tmp/a b")
    assert location_of("file://localhost/tmp/a") == Path("/tmp/a")


@pytest.mark.parametrize("text", ["s3://bucket/a", "gs://b/x/y.tar", "memory://m", "hf://d/u/r"])
def test_a_url_prints_as_it_is_and_parses_back(text):
    """So that a printed command can be pasted."""
    url = location_of(text)
    assert isinstance(url, Url)
    assert (str(url), location_of(str(url)), location_of(url)) == (text, url, url)


def test_parts_of_a_url():
    """A trailing slash means nothing; the last part is the name."""
    url = location_of("S3://bucket/runs/a/")
    assert (str(url), url.name, url.scheme) == ("s3://bucket/runs/a", "a", "s3")
    assert str(url / "manifest.json") == "s3://bucket/runs/a/manifest.json"


@pytest.mark.parametrize(
    "text",
    [
        "s3://",
        "s3:///",
        "zip://a::s3://b/c",
        "s3://bucket/../other",
        Path("s3://b/c"),
        "s3:///bucket/a",
        "gs://bucket//a",
        "S3://b/a//c/",
    ],
)
def test_what_is_no_place_is_refused(text):
    """Before anything is opened, with a hint."""
    with pytest.raises(UsageError) as caught:
        location_of(text)
    assert caught.value.hint or ".." in str(text)


def test_a_slash_too_many_is_no_empty_name():
    """An object of such a name would be stored, and not found again."""
    with pytest.raises(UsageError, match="names no bucket"):
        location_of("s3:///bucket/a")
    with pytest.raises(UsageError, match="empty name") as caught:
        location_of("s3://bucket//runs//a//")
    assert "did you mean s3://bucket/runs/a?" in caught.value.hint
    assert str(location_of("s3://bucket/a//")) == "s3://bucket/a"
    assert str(location_of("https://host/x//a")) == "https://host/x//a"  # a server may mean it


def test_archives_are_known_by_their_names():
    """Where nothing exists yet, only the name can say what is to be made."""
    assert archive_kind(Path("a.tar")) == archive_kind(Url("s3://b/A.TAR")) == "tar"
    assert archive_kind(Path("a.zip")) == "zip"
    assert archive_kind(Path("a.v2")) is None
    for name in ("a.tar.gz", "a.tgz", "a.tar.zst"):
        with pytest.raises(UsageError, match="compressed"):
            archive_kind(Path(name))


def test_plain_files_are_not_written_to_urls():
    """A reproducer or a descent is a folder of this machine."""
    with pytest.raises(UsageError, match="is a URL"):
        folder_of("s3://b/c")


def test_the_same_place_by_two_names(tmp_path):
    """By what is there, not by how it is spelled; URLs by their text."""
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert same_location(tmp_path / "a", tmp_path / "link")
    assert not same_location(tmp_path / "a", tmp_path)
    assert same_location(Url("s3://b/a"), Url("s3://b/a"))
    assert not same_location(Url("s3://b/a"), tmp_path / "a")
