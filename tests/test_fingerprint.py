"""What compiled kernels are kept under: sources and versions are read again exactly when one has changed."""

from __future__ import annotations

import os
import sys

import pytest

from nbattn import cache


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a source file, and the folder of a package that is found first."""
    source, folder = tmp_path / "kernel.py", tmp_path / "site"
    source.write_text("x = 1\n")
    (folder / "some_compiler-1.0.dist-info").mkdir(parents=True)
    monkeypatch.setenv("NBATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [str(folder), str(tmp_path / "nowhere"), *sys.path])
    monkeypatch.setattr(cache, "_SETTLED", -(10**18))  # everything counts as old
    return source, folder


def fingerprint(source):
    return cache.fingerprint([str(source)], ["some-compiler"])


def test_nothing_is_read_again_while_nothing_changes(installed, monkeypatch):
    source, _ = installed
    found = fingerprint(source)
    monkeypatch.setattr(cache, "hash_of", lambda sources: pytest.fail("sources were read"))
    monkeypatch.setattr(cache, "versions_of", lambda *names: pytest.fail("packages were listed"))
    assert fingerprint(source) == found


def test_an_edit_is_noticed_whatever_its_size_and_times_say(installed):
    source, _ = installed
    found, before = fingerprint(source), source.stat()
    while source.stat().st_ctime_ns == before.st_ctime_ns:
        source.write_text("x = 2\n")
        os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = source.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    edited = fingerprint(source)
    assert edited != found
    source.write_text("x = 10\n")
    assert fingerprint(source) not in (found, edited)
    source.write_text("x = 1\n")
    assert fingerprint(source) == found


def test_another_version_is_noticed(installed):
    source, folder = installed
    found = fingerprint(source)
    (folder / "some_compiler-1.0.dist-info").rename(folder / "some_compiler-1.0.1.dist-info")
    assert fingerprint(source) != found


def test_another_python_has_a_fingerprint_of_its_own(installed, monkeypatch):
    source, _ = installed
    found = fingerprint(source)
    monkeypatch.setattr(sys, "version_info", (4, 0, 0))
    assert fingerprint(source) != found


def test_recent_changes_are_not_trusted(installed, monkeypatch):
    source, _ = installed
    monkeypatch.setattr(cache, "_SETTLED", 10**18)
    found = fingerprint(source)
    assert not cache.cache_directory().exists()
    source.write_text("x = 3\n")
    assert fingerprint(source) != found


@pytest.mark.parametrize("damage", [b"", b"one", b"a b", b"\xff\xfe"])
def test_a_damaged_file_is_replaced(installed, damage):
    source, _ = installed
    found = fingerprint(source)
    (kept,) = cache.cache_directory().glob("*.sources")
    whole = kept.read_bytes()
    kept.write_bytes(damage)
    assert fingerprint(source) == found
    assert kept.read_bytes() == whole


def test_a_cache_that_cannot_be_written_serves_as_well(installed, monkeypatch):
    source, _ = installed
    found = fingerprint(source)
    monkeypatch.setenv("NBATTN_CACHE_DIR", str(source / "below"))
    assert fingerprint(source) == found
