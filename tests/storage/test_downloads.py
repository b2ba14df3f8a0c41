"""Downloads from a server that misbehaves. Nothing sleeps: the clock is moved by hand."""

from __future__ import annotations

import errno
import json
import logging
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from storage import downloads as downloads_module
from storage import part_file
from storage.downloads import RetryPolicy
from storage.errors import (
    AccessDenied,
    ChecksumMismatch,
    DownloadCancelled,
    DownloadFailed,
    NotEnoughSpace,
    OfflineError,
    StorageError,
)
from storage.model_downloads import DownloadTools, HubAccess, ModelDownloads, WantedSource
from storage.model_files import ModelFiles, read_record
from storage.progress import DownloadProgress
from tests.storage.fakes_storage import FakeClock, finish, start_python
from tests.storage.misbehaving_server import (
    CONTENT,
    SHA256,
    FileServer,
    cut_after,
    good,
    hang_up,
    ignore_if_range,
    ignore_range,
    redirect,
    run_server,
    send,
    short_ranges,
    stall_after,
    status,
)

SIZE = len(CONTENT)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture
def server() -> Iterator[FileServer]:
    with run_server() as running:
        yield running


class Bench:
    """One models folder and everything a download needs."""

    def __init__(self, folder: Path, server: FileServer, clock: FakeClock) -> None:
        self.folder = folder
        self.server = server
        self.clock = clock
        self.reports: list[DownloadProgress] = []
        self.is_cancelled: Callable[[], bool] = lambda: False
        self.token: str | None = None
        self.free_bytes = 1 << 40
        self.is_offline = False
        self.policy = RetryPolicy(stall_timeout_s=0.4)

    @property
    def target(self) -> Path:
        return self.folder / "tiny.gguf"

    @property
    def part(self) -> Path:
        return self.folder / "tiny.gguf.part"

    def fetch(
        self,
        *,
        source: str | None = None,
        size_bytes: int | None = SIZE,
        sha256: str | None = SHA256,
    ) -> Path:
        tools = DownloadTools(
            policy=self.policy,
            clock=self.clock,
            sleep=self.clock.sleep,
            get_free_space=lambda _: self.free_bytes,
        )
        downloads = ModelDownloads(
            self.folder,
            hub=HubAccess(self.server.url, self.token),
            is_offline=self.is_offline,
            tools=tools,
        )
        address = source or "hf:owner/repo/tiny.gguf"
        wanted = WantedSource("tiny.gguf", (address,), size_bytes, sha256)
        return downloads.fetch(
            [wanted], on_progress=self.reports.append, is_cancelled=self.is_cancelled
        )

    def leave_part(self, num_bytes: int, **changes: Any) -> None:
        """A part as an interrupted run leaves it."""
        note = {
            "source": "https://huggingface.co/owner/repo/resolve/main/tiny.gguf",
            "size_bytes": SIZE,
            "sha256": SHA256,
            "etag": '"v1"',
            "num_sources": 0,
        }
        self.folder.mkdir(exist_ok=True)
        self.part.write_bytes(CONTENT[:num_bytes])
        (self.folder / "tiny.gguf.part.json").write_text(json.dumps(note | changes))

    @property
    def ranges(self) -> list[str | None]:
        return [headers.get("Range") for _, headers in self.server.requests]

    def is_installed(self) -> bool:
        """Whole, right, and nothing else left over."""
        names = {path.name for path in self.folder.iterdir() if not path.name.startswith(".")}
        return self.target.read_bytes() == CONTENT and names == {"tiny.gguf", "tiny.gguf.json"}


@pytest.fixture
def bench(tmp_path: Path, server: FileServer, clock: FakeClock) -> Bench:
    return Bench(tmp_path / "models", server, clock)


def test_a_file_is_installed_with_its_source_and_hash(bench: Bench) -> None:
    assert bench.fetch() == bench.target
    assert bench.is_installed()
    record = read_record(bench.target)
    assert record is not None
    assert record.sha256 == SHA256
    assert record.source == "https://huggingface.co/owner/repo/resolve/main/tiny.gguf"
    assert bench.server.requests[0][0] == "/owner/repo/resolve/main/tiny.gguf"
    assert bench.reports[-1].num_done == bench.reports[-1].num_total == SIZE


def test_an_installed_file_is_not_fetched_again(bench: Bench) -> None:
    bench.fetch()
    bench.fetch()
    assert len(bench.server.requests) == 1


def test_another_file_of_that_name_is_not_taken_for_it(bench: Bench) -> None:
    bench.folder.mkdir()
    bench.target.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(StorageError, match="already there, but has another SHA-256"):
        bench.fetch()
    assert bench.server.requests == []


def test_a_cut_connection_goes_on_from_the_kept_byte(bench: Bench) -> None:
    bench.server.plan = [cut_after(60_000), hang_up, cut_after(30_000)]
    bench.fetch()
    assert bench.is_installed()
    assert bench.ranges == [None, "bytes=60000-", "bytes=60000-", "bytes=90000-"]
    assert bench.server.requests[1][1]["If-Range"] == '"v1"'


def test_a_part_left_by_an_earlier_run_is_continued(bench: Bench) -> None:
    bench.leave_part(70_000)
    bench.fetch()
    assert bench.is_installed()
    assert bench.ranges == ["bytes=70000-"]
    assert bench.reports[0].stage == "checking"


def test_a_part_goes_on_from_a_mirror_when_the_hash_is_known(bench: Bench) -> None:
    bench.leave_part(70_000, source="https://elsewhere/tiny.gguf", etag=None)
    bench.fetch()
    assert bench.ranges == ["bytes=70000-"]


@pytest.mark.parametrize(
    "changes",
    [{"sha256": "0" * 64}, {"source": "https://x/y", "sha256": None}, {"bogus": 1}],
)
def test_a_part_of_another_file_is_not_continued(bench: Bench, changes: dict[str, Any]) -> None:
    bench.leave_part(70_000, **changes)
    bench.fetch()
    assert bench.is_installed()
    assert bench.ranges == [None]


def test_f14_a_whole_part_is_installed_without_a_request(bench: Bench) -> None:
    bench.leave_part(SIZE)
    bench.fetch()
    assert bench.is_installed()
    assert bench.server.requests == []


def test_f14_416_on_a_whole_part_of_unknown_size_finishes(bench: Bench) -> None:
    bench.leave_part(SIZE, size_bytes=None)
    bench.fetch(size_bytes=None)
    assert bench.is_installed()
    assert bench.ranges == [f"bytes={SIZE}-"]


def test_f14_a_part_longer_than_the_file_starts_over(bench: Bench) -> None:
    bench.leave_part(SIZE, size_bytes=None)
    with bench.part.open("ab") as file:
        file.write(b"more")
    bench.fetch(size_bytes=None)
    assert bench.is_installed()
    assert bench.ranges == [f"bytes={SIZE + 4}-", None]


def test_f14_200_to_a_range_starts_over_cleanly(bench: Bench) -> None:
    bench.server.plan = [cut_after(60_000), ignore_range]
    bench.fetch()
    assert bench.is_installed()


@pytest.mark.parametrize("behaviour", [good, ignore_if_range])
def test_f14_a_file_that_changed_meanwhile_starts_over(
    bench: Bench, behaviour: Callable[[Any], None]
) -> None:
    old = b"GGUF" + b"old" * 20_000
    bench.leave_part(0, sha256=None, size_bytes=len(old), etag='"v0"')
    bench.part.write_bytes(old[:50_000])
    bench.server.plan = [behaviour]
    bench.fetch(size_bytes=None, sha256=None)
    assert bench.is_installed()


def test_a_server_that_sends_less_than_the_range_is_asked_again(bench: Bench) -> None:
    bench.server.plan = [cut_after(10_000), *[short_ranges(40_000)] * 3]
    bench.fetch()
    assert bench.is_installed()
    assert bench.ranges[1:] == ["bytes=10000-", "bytes=50000-", "bytes=90000-"]


def test_f13_one_flipped_byte_is_not_installed(bench: Bench) -> None:
    bench.server.content = CONTENT[:-1] + b"?"
    with pytest.raises(ChecksumMismatch, match="SHA-256"):
        bench.fetch()
    assert not bench.target.exists()
    assert not bench.part.exists()
    bench.server.content = CONTENT
    bench.fetch()
    assert bench.is_installed()


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


def test_a_file_without_a_known_hash_is_checked_by_the_hubs_own(bench: Bench) -> None:
    linked = {"X_Linked_ETag": f'"{SHA256}"', "X_Linked_Size": str(SIZE)}
    bench.server.plan = [redirect("/cdn/blob", **linked), send(CONTENT[:-1] + b"?")]
    with pytest.raises(ChecksumMismatch, match="SHA-256"):
        bench.fetch(sha256=None)
    bench.server.plan = [redirect("/cdn/blob", **linked)]
    bench.fetch(sha256=None)
    assert bench.is_installed()


def test_a_hub_that_has_another_file_is_noticed_before_the_first_byte(bench: Bench) -> None:
    bench.server.plan = [redirect("/cdn/blob", X_Linked_ETag='"' + "0" * 64 + '"')]
    with pytest.raises(ChecksumMismatch, match="has SHA-256 0000"):
        bench.fetch()
    assert not bench.part.exists()


def test_a_stall_is_reported_with_rate_zero_and_tried_again(bench: Bench) -> None:
    bench.server.plan = [stall_after(40_000)]
    bench.fetch()
    assert bench.is_installed()
    (stall,) = [report for report in bench.reports if report.stage == "stalled"]
    assert (stall.num_done, stall.bytes_per_s) == (40_000, 0.0)
    assert stall.note == "nothing arrives; next try in 1 s"
    assert bench.ranges == [None, "bytes=40000-"]


def test_failures_in_a_row_wait_longer_and_end(bench: Bench) -> None:
    bench.leave_part(10)
    bench.server.plan = [status(503)] * 6
    with pytest.raises(DownloadFailed, match=r"503.*6 tries"):
        bench.fetch()
    assert len(bench.server.requests) == 6
    assert bench.clock.slept == 1 + 2 + 4 + 8 + 16
    assert bench.part.read_bytes() == CONTENT[:10]


def test_progress_between_failures_starts_the_count_again(bench: Bench) -> None:
    bench.server.plan = [cut_after(5_000)] * 12
    bench.fetch()
    assert bench.is_installed()
    assert bench.clock.slept == 12


def test_a_server_says_how_long_to_wait(bench: Bench) -> None:
    bench.server.plan = [status(429, Retry_After="17")]
    bench.fetch()
    assert bench.clock.slept == 17


def test_the_reported_bytes_never_fall(bench: Bench) -> None:
    bench.server.plan = [cut_after(60_000), ignore_range, good]
    bench.fetch()
    done = [report.num_done for report in bench.reports]
    assert done == sorted(done)
    assert done[-1] == SIZE


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
        downloads_module._refuse_downgrade(response, "https://x/y")


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


def test_f15_bytes_already_here_need_no_room(bench: Bench) -> None:
    bench.leave_part(70_000)
    bench.free_bytes = SIZE - 70_000 + part_file.SPACE_RESERVE_BYTES
    bench.fetch()
    assert bench.is_installed()


def test_f15_a_disk_that_fills_up_keeps_the_part_which_can_go_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [60_000]
    append = part_file.PartFile._append

    def append_until_full(part: part_file.PartFile, chunk: bytes) -> None:
        if part.num_bytes + len(chunk) > room[0]:
            part._file = _FullDisk(part._file, room[0] - part.num_bytes)  # type: ignore[assignment]
        append(part, chunk)

    monkeypatch.setattr(part_file.PartFile, "_append", append_until_full)
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


def test_cancel_keeps_the_part_which_can_go_on(bench: Bench) -> None:
    bench.server.plan = [stall_after(40_000)]
    bench.is_cancelled = lambda: bench.part.exists() and bench.part.stat().st_size == 40_000
    with pytest.raises(DownloadCancelled, match="part is kept"):
        bench.fetch()
    assert bench.part.read_bytes() == CONTENT[:40_000]
    (part,) = ModelFiles(bench.folder).parts()
    assert (part.name, part.size_bytes, part.total_bytes) == ("tiny", 40_000, SIZE)
    assert ModelFiles(bench.folder).installed() == []
    bench.is_cancelled = lambda: False
    bench.fetch()
    assert bench.is_installed()
    assert bench.ranges == [None, "bytes=40000-"]


def test_cancel_is_felt_while_waiting_for_the_next_try(bench: Bench) -> None:
    bench.server.plan = [status(503)] * 6
    bench.is_cancelled = lambda: bench.clock.slept >= 4
    with pytest.raises(DownloadCancelled):
        bench.fetch()
    assert len(bench.server.requests) == 3


FETCH = """
import sys
from pathlib import Path
from storage.errors import DownloadBusy
from storage.model_downloads import HubAccess, ModelDownloads, WantedSource
downloads = ModelDownloads(Path(sys.argv[1]), hub=HubAccess(sys.argv[2]))
wanted = WantedSource("tiny.gguf", ("hf:owner/repo/tiny.gguf",))
def report(progress):
    print(progress.num_done, flush=True)
try:
    downloads.fetch([wanted], on_progress=report, is_cancelled=lambda: False)
except DownloadBusy as error:
    print("busy", error)
"""


def test_one_process_downloads_a_file_at_a_time(bench: Bench) -> None:
    bench.server.plan = [stall_after(50_000)]
    first = start_python(FETCH, str(bench.folder), bench.server.url)
    assert first.stdout is not None
    assert first.stdout.readline() == "0\n"
    second = start_python(FETCH, str(bench.folder), bench.server.url)
    assert "busy tiny.gguf is being downloaded by another process" in finish(second)
    first.kill()
    first.communicate()
    num_kept = bench.part.stat().st_size
    bench.fetch()
    assert bench.is_installed()
    assert bench.ranges == [None, f"bytes={num_kept}-" if num_kept else None]


def test_shards_are_one_download_with_one_progress(bench: Bench, clock: FakeClock) -> None:
    downloads = ModelDownloads(
        bench.folder,
        hub=HubAccess(bench.server.url),
        tools=DownloadTools(clock=clock, sleep=clock.sleep),
    )
    files = [
        WantedSource(f"big/big-0000{n}-of-00002.gguf", (f"hf:o/r/{n}.gguf",), SIZE, SHA256)
        for n in (1, 2)
    ]
    path = downloads.fetch(files, on_progress=bench.reports.append, is_cancelled=lambda: False)
    assert path == bench.folder / "big" / "big-00001-of-00002.gguf"
    assert bench.reports[-1].num_done == bench.reports[-1].num_total == 2 * SIZE
    done = [report.num_done for report in bench.reports]
    assert done == sorted(done)
    (model,) = ModelFiles(bench.folder).installed()
    assert (model.name, model.is_complete, model.size_bytes) == ("big", True, 2 * SIZE)


@pytest.mark.parametrize("name", ["../x.gguf", "/etc/x.gguf", "a/../../x.gguf", "C:x.gguf", ".x"])
def test_nothing_is_written_outside_the_models_folder(bench: Bench, name: str) -> None:
    wanted = WantedSource(name, ("hf:o/r/x.gguf",))
    with pytest.raises(StorageError, match="cannot be used as a file name"):
        ModelDownloads(bench.folder).fetch(
            [wanted], on_progress=bench.reports.append, is_cancelled=lambda: False
        )
    assert not bench.folder.exists()
