"""What a path or a URL names, and places in stores as paths."""

import pickle
from pathlib import Path

import pytest

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.storage.object_path import ObjectPath, is_url, locate


@pytest.mark.parametrize(
    ("url", "root", "key"),
    [
        ("s3://bucket/run/step-100", "s3://bucket", "run/step-100"),
        ("S3://bucket/run/", "s3://bucket", "run"),
        ("s3://bucket", "s3://bucket", ""),
        ("s3://dotted.name/a", "s3://dotted.name", "a"),
        ("abfss://container@account.dfs.core.windows.net/a", None, "a"),
        ("memory://run/a", "memory://", "run/a"),
        ("memory:///run/a", "memory://", "run/a"),
        ("gs://bucket/a b/ä#?%", "gs://bucket", "a b/ä#?%"),
    ],
)
def test_a_url_names_a_key_in_a_bucket(url, root, key):
    place = locate(url)
    assert isinstance(place, ObjectPath)
    assert place.key == key
    assert place.root == (root or url.rpartition("/")[0])
    assert locate(str(place)) == place
    assert str(locate(str(place))) == str(place)
    assert is_url(url)


@pytest.mark.parametrize("path", ["/a/b", "file:///a/b", Path("/a/b")])
def test_anything_else_is_a_file(path):
    assert locate(path) == Path("/a/b")
    assert not is_url(path)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://", "no bucket"),
        ("s3:///run", "no bucket"),
        ("3://bucket/a", "no URL"),
        ("s3://bucket/a//b", "''"),
        ("s3://bucket/a/../b", "'..'"),
        ("s3://bucket/./a", "'.'"),
        ("s3://bucket/a\nb", "names no place"),
        ("s3://bucket/a\x7fb", "names no place"),
        ("az://container/a\\b", "names no place"),
    ],
)
def test_what_names_no_place_is_refused(url, says):
    with pytest.raises(ConfigurationError, match=says):
        locate(url)


@pytest.mark.parametrize(
    "path", [Path("s3://bucket/run"), "gs:/bucket/run", "/here/memory:/run", Path("/a/az:/c/run")]
)
def test_a_url_that_has_lost_a_slash_is_no_directory(path):
    with pytest.raises(ConfigurationError, match=r"lost a slash.*://bucket/run"):
        locate(path)
    assert locate("/a/s3:b/run:1") == Path("/a/s3:b/run:1")


def test_credentials_in_a_url_are_refused_and_not_repeated():
    with pytest.raises(ConfigurationError) as raised:
        locate("s3://AKIAEXAMPLE:very-secret@bucket/run")
    assert "secret" not in repr(raised.value)
    assert "AKIA" not in repr(raised.value)
    with pytest.raises(ConfigurationError, match="credentials") as raised:
        locate("mine://host/run?version=1&token=0123abcd")
    assert "0123" not in repr(raised.value)


def test_options_are_never_shown():
    place = locate("s3://bucket/a", options={"key": "AKIAEXAMPLE", "secret": "very-secret"})
    for shown in (repr(place), str(place / "b"), pickle.dumps(place).decode("latin1")):
        assert "very-secret" not in shown


def test_a_place_in_memory_has_the_url_that_was_given():
    assert str(locate("memory://run/step-1")) == "memory://run/step-1"
    assert str(locate("memory://run").parent) == "memory://"


def test_an_object_path_is_like_a_path():
    run = locate("s3://bucket/run")
    step = run / "step-100" / "r.safetensors"
    assert str(step) == "s3://bucket/run/step-100/r.safetensors"
    assert (step.name, step.suffix) == ("r.safetensors", ".safetensors")
    assert step.parent.parent == run
    assert run.parent == locate("s3://bucket") == run.parent.parent
    assert {run, locate("s3://bucket/run")} == {run}
    assert sorted([step, run]) == [run, step]
    assert run != locate("s3://other/run")
    assert not run.is_symlink()
