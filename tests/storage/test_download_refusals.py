"""Downloads that must be refused: wrong bytes, no access, no room, no network."""

from __future__ import annotations

import errno
import logging
import ssl
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import httpx
import pytest

from storage import download_part
from storage import downloads as downloads_module
from storage.errors import (
    AccessDenied,
    ChecksumMismatch,
    DownloadFailed,
    NotEnoughSpace,
    OfflineError,
    StorageError,
)
from storage.model_downloads import ModelDownloads, WantedSource
from storage.model_files import ModelFiles
from tests.storage.download_bench import SIZE, Bench
from tests.storage.misbehaving_server import (
    CONTENT,
    redirect,
    run_server,
    send,
    status,
)


def test_another_file_of_that_name_is_not_taken_for_it(bench: Bench) -> None:
    bench.folder.mkdir()
    bench.target.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(StorageError, match="already there, but has another SHA-256"):
        bench.fetch()
    assert bench.server.requests == []


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (send(b"<html>sign in</html>" * 9, Content_Type="text/html; charset=utf-8"), "a web page"),
        (send(CONTENT + b"more"), "102408 bytes instead of 102404"),
        (send(CONTENT[:-4]), "102400 bytes instead of 102404"),
        (send(b"version https://git-lfs".ljust(SIZE)), "is no GGUF file"),
        (send(CONTENT, Content_Encoding="gzip"), "compressed"),
    ],
)
def test_f13_what_is_not_the_file_is_refused(
    bench: Bench, behaviour: Callable[[Any], None], reason: str
) -> None:
    bench.server.plan = [behaviour]
    with pytest.raises(DownloadFailed, match=reason):
        bench.fetch()
    assert not bench.target.exists()
    bench.fetch()
    assert bench.is_installed()


def test_bytes_beyond_the_size_are_refused(bench: Bench) -> None:
    def endless(handler: Any) -> None:
        handler.head(200, Transfer_Encoding="chunked")
        for _ in range(3):
            handler.wfile.write(b"%x\r\n%s\r\n" % (SIZE, CONTENT))
        handler.wfile.write(b"0\r\n\r\n")

    bench.server.plan = [endless]
    with pytest.raises(ChecksumMismatch, match="more than the 102404 bytes"):
        bench.fetch()
    assert not bench.target.exists()


def test_a_file_of_unknown_size_and_hash_is_refused(bench: Bench) -> None:
    bench.server.plan = [lambda handler: handler.head(200)]
    with pytest.raises(DownloadFailed, match="neither size nor hash"):
        bench.fetch(size_bytes=None, sha256=None)


def test_failures_in_a_row_wait_longer_and_end(bench: Bench) -> None:
    bench.leave_part(10)
    bench.server.plan = [status(503)] * 6
    with pytest.raises(DownloadFailed, match=r"503.*6 tries"):
        bench.fetch()
    assert len(bench.server.requests) == 6
    assert bench.clock.slept == 1 + 2 + 4 + 8 + 16
    assert bench.part.read_bytes() == CONTENT[:10]


def test_a_server_says_how_long_to_wait(bench: Bench) -> None:
    bench.server.plan = [status(429, Retry_After="17")]
    bench.fetch()
    assert bench.clock.slept == 17


@pytest.mark.parametrize(
    ("behaviour", "token", "error", "message"),
    [
        (status(401), None, AccessDenied, "does not exist, is private, or its terms"),
        (status(403, X_Error_Code="GatedRepo"), None, AccessDenied, "terms must be accepted"),
        (status(404), None, DownloadFailed, "there is no file at"),
        (status(410), None, DownloadFailed, "there is no file at"),
        (status(400), None, DownloadFailed, "answered 400"),
    ],
)
def test_f16_each_refusal_says_what_to_do(
    bench: Bench,
    behaviour: Callable[[Any], None],
    token: str | None,
    error: type[DownloadFailed],
    message: str,
) -> None:
    bench.server.plan = [behaviour]
    with pytest.raises(error, match=message) as caught:
        bench.fetch()
    assert len(bench.server.requests) == 1
    assert caught.value.hint or "400" in message
    if error is AccessDenied:
        assert "HF_TOKEN" in caught.value.hint
        assert "/owner/repo" in caught.value.hint


def test_f16_a_bad_token_is_dropped_for_a_public_file(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    bench.token = "hf_secret"
    bench.server.plan = [status(401)]
    bench.fetch()
    assert bench.is_installed()
    sent = [headers.get("Authorization") for _, headers in bench.server.requests]
    assert sent == ["Bearer hf_secret", None]
    assert "hf_secret" not in caplog.text


def test_f16_a_bad_token_for_a_private_file_is_named(bench: Bench) -> None:
    bench.token = "hf_secret"
    bench.server.plan = [status(401), status(401)]
    with pytest.raises(AccessDenied, match="HF_TOKEN was refused") as caught:
        bench.fetch()
    assert "hf_secret" not in str(caught.value) + caught.value.hint


@pytest.mark.parametrize("token", ["hf_secret\n", "hf_secr\u00e9t", "hf secret", ""])
def test_f16_a_token_that_cannot_be_one_is_refused_and_not_shown(bench: Bench, token: str) -> None:
    """It was shown in an error message, or ended in a traceback."""
    bench.token = token
    with pytest.raises(AccessDenied, match="characters") as caught:
        bench.fetch()
    assert not token or token not in str(caught.value) + caught.value.hint
    assert bench.server.requests == []


def test_a_token_that_cannot_be_one_stops_no_download_that_does_not_use_it(bench: Bench) -> None:
    bench.token = "hf secret"
    bench.is_offline = True
    with pytest.raises(OfflineError):
        bench.fetch()
    bench.is_offline = False
    bench.fetch(source=f"{bench.server.url}/tiny.gguf")
    assert bench.is_installed()


def test_f16_a_header_that_cannot_be_written_is_not_shown() -> None:
    error = httpx.LocalProtocolError("Illegal header value b'Bearer hf_secret'")
    explained = downloads_module._explain(error, "https://x/y")
    assert isinstance(explained, DownloadFailed)
    assert "hf_secret" not in str(explained) + explained.hint


def test_a_version_that_is_no_ascii_is_not_sent_back(bench: Bench) -> None:
    bench.leave_part(70_000, etag='"v\u00e9"')
    bench.server.etag = '"v\u00e9"'
    bench.fetch()
    assert bench.is_installed()
    assert "If-Range" not in bench.server.requests[0][1]


def test_a_token_does_not_follow_to_another_host(bench: Bench) -> None:
    bench.token = "hf_secret"
    with run_server() as storage:
        address = f"{storage.url}/blob?signature=hf_signed".replace("127.0.0.1", "localhost")
        bench.server.plan = [redirect(address)]
        bench.fetch()
        assert bench.is_installed()
        assert "Authorization" not in storage.requests[0][1]
    assert bench.server.requests[0][1]["Authorization"] == "Bearer hf_secret"


def test_a_token_is_not_sent_to_plain_addresses(bench: Bench) -> None:
    bench.token = "hf_secret"
    bench.fetch(source=f"{bench.server.url}/files/tiny.gguf")
    assert "Authorization" not in bench.server.requests[0][1]


def test_endless_redirects_end(bench: Bench) -> None:
    bench.server.plan = [redirect("/again")] * 30
    with pytest.raises(DownloadFailed, match="redirects"):
        bench.fetch()


def test_a_server_that_is_not_there_fails_soon(bench: Bench) -> None:
    with pytest.raises(DownloadFailed, match=r"cannot connect.*3 tries"):
        bench.fetch(source="http://127.0.0.1:9/tiny.gguf")


def test_f16_a_refusing_proxy_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", bench.server.url)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(DownloadFailed, match="proxy refused"):
        bench.fetch(source="https://models.invalid/tiny.gguf")


@pytest.mark.parametrize(
    "proxy", ["socks://user:secret@host:1080", "http://host:port", "ftp://host"]
)
def test_a_proxy_address_nobody_can_use_is_named_by_its_variable(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    """GNOME's `socks://` was a traceback, and in the screen the end of the program."""
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(DownloadFailed, match="proxy address") as caught:
        bench.fetch()
    assert "ALL_PROXY" in caught.value.hint
    assert "secret" not in str(caught.value) + caught.value.hint


def test_a_socks_proxy_is_used(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without socksio the client could not even be made."""
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    with pytest.raises(DownloadFailed, match=r"cannot connect.*3 tries"):
        bench.fetch(source="http://models.invalid/tiny.gguf")


def test_a_certificate_file_that_is_not_there_is_named(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(bench.folder / "none.pem"))
    with pytest.raises(DownloadFailed, match="certificates") as caught:
        bench.fetch()
    assert "SSL_CERT_FILE" in caught.value.hint


def test_f16_a_refused_certificate_is_named_and_not_tried_again() -> None:
    error = httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED]")
    error.__cause__ = ssl.SSLCertVerificationError("self-signed certificate")
    explained = downloads_module._explain(error, "https://x/y")
    assert isinstance(explained, DownloadFailed)
    assert "certificate was refused" in str(explained)
    assert "SSL_CERT_FILE" in explained.hint


def test_an_address_that_leads_to_plain_http_is_refused() -> None:
    hops = [httpx.Response(302, request=httpx.Request("GET", "https://x/y"))]
    response = httpx.Response(200, request=httpx.Request("GET", "http://x/y"), history=hops)
    with pytest.raises(DownloadFailed, match="unencrypted"):
        downloads_module.refuse_downgrade(response, "https://x/y")


@pytest.mark.parametrize("code", [404, 401, 503])
def test_a_failed_download_leaves_no_empty_part(bench: Bench, code: int) -> None:
    bench.server.plan = [status(code)] * 6
    with pytest.raises(DownloadFailed):
        bench.fetch()
    assert ModelFiles(bench.folder).parts() == []


def test_offline_connects_to_nothing(bench: Bench) -> None:
    bench.is_offline = True
    with pytest.raises(OfflineError, match="stay offline"):
        bench.fetch()
    assert bench.server.requests == []


def test_offline_an_installed_file_still_counts(bench: Bench) -> None:
    bench.fetch()
    bench.is_offline = True
    assert bench.fetch() == bench.target


def test_f15_no_room_is_refused_before_the_first_byte_with_both_numbers(bench: Bench) -> None:
    bench.free_bytes = SIZE
    with pytest.raises(NotEnoughSpace, match=r"needs 0 MB more.*only 0 MB are free"):
        bench.fetch()
    assert not bench.part.exists()


def test_f15_a_split_model_that_does_not_fit_as_a_whole_is_refused_before_the_first_byte(
    bench: Bench,
) -> None:
    """60 of 254 GB were fetched before the first file that did not fit was looked at."""
    bench.leave_part(70_000, target="big/b-00002-of-00003.gguf")
    missing = 3 * SIZE - 70_000
    for num_free, error in ((missing - 1, NotEnoughSpace), (missing, None)):
        bench.free_bytes = num_free + download_part.SPACE_RESERVE_BYTES
        files = [
            WantedSource(f"big/b-0000{n}-of-00003.gguf", ("hf:owner/repo/tiny.gguf",), SIZE)
            for n in (1, 2, 3)
        ]
        with pytest.raises(error, match=r"^big needs") if error else nullcontext():
            bench.downloads.fetch(
                files, on_progress=bench.reports.append, is_cancelled=bench.is_cancelled
            )
        assert len(bench.server.requests) == (0 if error else 3)


def test_f15_bytes_already_here_need_no_room(bench: Bench) -> None:
    bench.leave_part(70_000)
    bench.free_bytes = SIZE - 70_000 + download_part.SPACE_RESERVE_BYTES
    bench.fetch()
    assert bench.is_installed()


def test_f15_a_disk_that_fills_up_keeps_the_part_which_can_go_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [60_000]
    append = download_part.DownloadPart._append

    def append_until_full(part: download_part.DownloadPart, chunk: bytes) -> None:
        if part.num_bytes + len(chunk) > room[0]:
            part._file = _FullDisk(part._file, room[0] - part.num_bytes)  # type: ignore[assignment]
        append(part, chunk)

    monkeypatch.setattr(download_part.DownloadPart, "_append", append_until_full)
    with pytest.raises(NotEnoughSpace, match="became full"):
        bench.fetch()
    assert bench.part.read_bytes() == CONTENT[:60_000]
    room[0] = SIZE
    bench.fetch()
    assert bench.is_installed()
    assert bench.ranges == [None, "bytes=60000-"]


class _FullDisk:
    """A file on a disk with so many bytes left."""

    def __init__(self, file: Any, num_left: int) -> None:
        self._file = file
        self._num_left = num_left

    def write(self, chunk: bytes) -> int:
        if self._num_left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._file.write(chunk[: self._num_left])
        self._num_left -= written
        return int(written)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize("name", ["../x.gguf", "/etc/x.gguf", "a/../../x.gguf", "C:x.gguf", ".x"])
def test_nothing_is_written_outside_the_models_folder(bench: Bench, name: str) -> None:
    wanted = WantedSource(name, ("hf:o/r/x.gguf",))
    with pytest.raises(StorageError, match="cannot be used as a file name"):
        ModelDownloads(bench.folder).fetch(
            [wanted], on_progress=bench.reports.append, is_cancelled=lambda: False
        )
    assert not bench.folder.exists()
