"""Fetches one file over HTTP so that nothing that arrived is ever fetched twice.

An own client because huggingface_hub deletes its partial files when it is interrupted. It goes on
from the kept byte after a lost connection, a kill or a restart (`Range` with `If-Range`), starts
over only when the server's file is another one, and waits longer after each failure in a row.
Proxies and certificates are httpx's: the usual environment variables work.
"""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import httpx

from storage.download_part import DownloadPart
from storage.errors import (
    AccessDenied,
    ChecksumMismatch,
    DownloadCancelled,
    DownloadFailed,
)
from storage.model_sources import public_address
from storage.progress import ProgressMeter

log = logging.getLogger(__name__)

_CONTENT_RANGE: Final = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")
_SHA256: Final = re.compile(r'(?:W/)?"?([0-9a-f]{64})"?')


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How patient a download is."""

    stall_timeout_s: float = 10.0
    """A connection that sends nothing for so long is given up and opened again."""
    min_bytes_per_s: float = 1024.0
    """A connection that brings less over `slow_window_s` is given up too: it would never end."""
    slow_window_s: float = 30.0
    num_tries: int = 6
    """Failures in a row, each of which brought hardly anything, before it gives up."""
    min_try_bytes: int = 4096
    """What a try must bring beside `min_bytes_per_s` to count as one that got on."""
    num_connect_tries: int = 3
    """The same for a server that was never reached: a wrong address should not take a minute."""
    first_wait_s: float = 1.0
    """Pause after the first failure; doubled after each further one."""
    max_wait_s: float = 32.0
    num_restarts: int = 3
    """How often the file may turn out to be another one before that is an error."""

    @property
    def min_window_bytes(self) -> float:
        """Bytes a connection must bring in each window."""
        return self.min_bytes_per_s * self.slow_window_s

    def enough_bytes(self, duration_s: float) -> float:
        """Bytes a try that took so long must bring, or it counts as a failure like the last one."""
        return self.min_try_bytes + self.min_bytes_per_s * duration_s

    def wait_s(self, num_failures: int) -> float:
        """Seconds to wait after so many failures in a row."""
        return float(min(self.first_wait_s * 2 ** (num_failures - 1), self.max_wait_s))


@dataclass(frozen=True, slots=True)
class Remote:
    """Where a file is."""

    url: str
    token: str | None = None
    """Sent to this host only, never after a redirect to another one, never logged."""
    terms_url: str = ""
    """Page where a person can accept terms; named when the server refuses."""

    def __repr__(self) -> str:
        """The address without anything secret."""
        return f"Remote({public_address(self.url)})"


@dataclass(frozen=True, slots=True)
class Waiting:
    """How a download waits and is stopped."""

    sleep: Callable[[float], None]
    is_cancelled: Callable[[], bool]
    clock: Callable[[], float]
    """Seconds that only go forward."""

    def pause(self, seconds: float) -> None:
        """Wait, in slices short enough that a cancel is felt. Raises: DownloadCancelled."""
        remaining = seconds
        while remaining > 0.0:
            self.check()
            self.sleep(min(remaining, 0.25))
            remaining -= 0.25
        self.check()

    def check(self) -> None:
        """Raises: DownloadCancelled when a person stopped the download."""
        if self.is_cancelled():
            raise DownloadCancelled("the download was cancelled; its part is kept")


class _TryAgain(Exception):
    """One try failed in a way another one may mend."""

    def __init__(self, reason: str, *, wait_s: float = 0.0, is_unreachable: bool = False) -> None:
        super().__init__(reason)
        self.wait_s = wait_s
        self.is_unreachable = is_unreachable


class HttpDownload:
    """Fetches one remote file into one part."""

    def __init__(
        self,
        client: httpx.Client,
        remote: Remote,
        part: DownloadPart,
        meter: ProgressMeter,
        waiting: Waiting,
        policy: RetryPolicy = RetryPolicy(),
    ) -> None:
        self._client = client
        self._remote = remote
        self._part = part
        self._meter = meter
        self._waiting = waiting
        self._policy = policy
        self._token = remote.token
        self._num_restarts = 0
        self._is_whole = False

    def run(self) -> None:
        """Fetch what is missing; the part then has every byte, not yet checked by hash.

        Raises: DownloadFailed and its kinds, NotEnoughSpace; the part is kept.
        """
        num_failures = 0
        self._is_whole = self._has_every_byte()
        while not self._is_whole:
            num_before, began_s = self._part.num_bytes, self._waiting.clock()
            try:
                self._try_once()
            except _TryAgain as failure:
                num_new = self._part.num_bytes - num_before
                has_advanced = num_new >= self._policy.enough_bytes(self._waiting.clock() - began_s)
                num_failures = 1 if has_advanced else num_failures + 1
                self._wait_or_give_up(failure, num_failures)

    def _try_once(self) -> None:
        self._waiting.check()
        try:
            with self._client.stream(
                "GET", self._remote.url, headers=self._headers(), follow_redirects=True
            ) as response:
                refuse_downgrade(response, self._address)
                self._take_answer(response)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _explain(error, self._address) from error

    @property
    def _address(self) -> str:
        return public_address(self._remote.url)

    def _headers(self) -> Mapping[str, str]:
        # Compressed bytes could neither be counted nor continued.
        headers = {"Accept-Encoding": "identity"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if self._part.num_bytes:
            headers["Range"] = f"bytes={self._part.num_bytes}-"
            etag = self._part.note.etag
            if etag and etag.isascii() and not etag.startswith("W/"):
                headers["If-Range"] = etag
        return headers

    def _take_answer(self, response: httpx.Response) -> None:
        match response.status_code:
            case 206:
                self._check_continuation(response)
            case 200:
                if self._part.num_bytes:
                    log.info("%s starts over: the server sent the whole file", self._address)
                    self._part.restart()
            case 416:
                self._take_unsatisfiable(response)
                return
            case _:
                self._refuse(response)
                return
        self._learn(response)
        self._part.require_space()
        self._part.save_note()
        self._receive(response)

    def _check_continuation(self, response: httpx.Response) -> None:
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        start = int(match[1]) if match and match[1] else None
        total = int(match[3]) if match and match[3] != "*" else None
        note = self._part.note
        is_other_size = None not in (total, note.size_bytes) and total != note.size_bytes
        etag = response.headers.get("ETag")
        is_other_version = None not in (etag, note.etag) and etag != note.etag
        if start != self._part.num_bytes or is_other_size or is_other_version:
            self._start_over("the file on the server has changed")

    def _take_unsatisfiable(self, response: httpx.Response) -> None:
        """416: nothing is left to send, or the part is longer than the server's file."""
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        total = int(match[3]) if match and match[3] != "*" else None
        size = self._part.note.size_bytes
        if total is not None and total == self._part.num_bytes and size in (None, total):
            self._part.note.size_bytes = total
            self._is_whole = True
            return
        self._start_over("the part does not belong to the server's file")

    def _start_over(self, reason: str) -> None:
        self._num_restarts += 1
        if self._num_restarts > self._policy.num_restarts:
            raise DownloadFailed(
                f"{self._address}: {reason} again and again", hint="try another source"
            )
        log.info("%s starts over: %s", self._address, reason)
        self._part.restart()
        raise _TryAgain(reason)

    def _learn(self, response: httpx.Response) -> None:
        """Size, version and hash as the server states them; they must agree with what is asked.

        Source: the hub's `X-Linked-Size` and `X-Linked-ETag` (SHA-256) on the redirect itself.
        """
        note = self._part.note
        if "text/html" in response.headers.get("Content-Type", ""):
            raise ChecksumMismatch(
                f"{self._address} is a web page, not a file",
                hint="open it in a browser; it may ask you to sign in",
            )
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise DownloadFailed(f"{self._address} is sent compressed and cannot be continued")
        stated = _stated_size(response)
        sizes = set() if stated is None else {stated}
        for hop in (*response.history, response):
            linked = hop.headers.get("X-Linked-Size", "")
            sizes |= {int(linked)} if linked.isdigit() else set()
            match = _SHA256.fullmatch(hop.headers.get("X-Linked-ETag", ""))
            if match and _is_same_host(hop.url, self._remote.url):
                self._expect_hash(match[1])
        sizes |= {note.size_bytes} if note.size_bytes is not None else set()
        if len(sizes) > 1:
            raise ChecksumMismatch(
                f"{self._address} has {max(sizes - {note.size_bytes})} bytes instead of "
                f"{note.size_bytes or min(sizes)}",
                hint="the file was replaced on the server; update foretell or use another source",
            )
        if not sizes and note.sha256 is None:
            raise DownloadFailed(
                f"{self._address} states neither size nor hash: nobody could tell a broken file",
                hint="use another source",
            )
        note.size_bytes = next(iter(sizes), None)
        note.etag = response.headers.get("ETag")
        if note.size_bytes is not None:
            self._meter.num_total = max(
                self._meter.num_total, self._meter.num_before + note.size_bytes
            )

    def _expect_hash(self, sha256: str) -> None:
        known = self._part.note.sha256
        if known is not None and known != sha256:
            if self._part.wanted_sha256 is None:
                self._start_over("the file on the server has changed")
            raise ChecksumMismatch(
                f"{self._address} has SHA-256 {sha256} instead of {known}",
                hint="the file was replaced on the server; update foretell or use another source",
            )
        self._part.note.sha256 = sha256

    def _receive(self, response: httpx.Response) -> None:
        self._meter.advance(self._part.num_bytes)
        window_start_s, num_before = self._waiting.clock(), self._part.num_bytes
        # Pieces as they arrive: with a chunk size httpx gathers them, and what it has gathered is
        # lost when the connection breaks.
        for chunk in response.iter_raw():
            self._part.write(chunk)
            self._meter.advance(self._part.num_bytes)
            self._waiting.check()
            now_s = self._waiting.clock()
            is_window_over = now_s - window_start_s >= self._policy.slow_window_s
            if is_window_over and not self._has_every_byte():
                if self._part.num_bytes - num_before < self._policy.min_window_bytes:
                    raise _TryAgain("only a trickle arrives")
                window_start_s, num_before = now_s, self._part.num_bytes
        if self._part.note.size_bytes is not None and not self._has_every_byte():
            raise _TryAgain("the connection ended early")
        self._is_whole = True

    def _has_every_byte(self) -> bool:
        return self._part.num_bytes > 0 and self._part.num_bytes == self._part.note.size_bytes

    def _refuse(self, response: httpx.Response) -> None:
        """Any other answer: try again without a bad token, later, or not at all."""
        status = response.status_code
        if status in (401, 403) and self._token is not None:
            # A wrong token fails even public files; the hub then says "not found".
            log.warning("the token was refused for %s; trying without", self._address)
            self._token = None
            raise _TryAgain("the token was refused")
        if status in (408, 425, 429) or status >= 500:
            raise _TryAgain(
                f"the server answered {status} {response.reason_phrase}".rstrip(),
                wait_s=_retry_after_s(response),
            )
        if status in (401, 403):
            raise self._denied(response)
        if status in (404, 410):
            raise DownloadFailed(
                f"there is no file at {self._address} ({status})",
                hint="check owner, repository, revision and file name",
            )
        raise DownloadFailed(f"{self._address} answered {status} {response.reason_phrase}".rstrip())

    def _denied(self, response: httpx.Response) -> AccessDenied:
        status, had_token = response.status_code, self._remote.token is not None
        code = response.headers.get("X-Error-Code", "")
        if code == "GatedRepo":
            what = "its terms must be accepted first"
        elif had_token:
            what = "the token in HF_TOKEN was refused, and without it there is no access"
        else:
            what = "it does not exist, is private, or its terms must be accepted first"
        page = self._remote.terms_url or self._address
        hint = f"open {page}, accept the terms, and set HF_TOKEN to a token that may read it"
        return AccessDenied(f"{self._address} was refused ({status}): {what}", hint=hint)

    def _wait_or_give_up(self, failure: _TryAgain, num_failures: int) -> None:
        tries = self._policy.num_tries
        if failure.is_unreachable and self._part.num_bytes == 0:
            tries = self._policy.num_connect_tries
        if num_failures >= tries:
            raise DownloadFailed(
                f"{self._address}: {failure} ({num_failures} tries)",
                hint="check the network and pull again: it goes on from what is there",
            ) from failure
        wait_s = max(failure.wait_s, self._policy.wait_s(num_failures))
        self._meter.stall(f"{failure}; next try in {wait_s:.0f} s")
        self._waiting.pause(wait_s)


def refuse_downgrade(response: httpx.Response, address: str) -> None:
    """Raises: DownloadFailed when a redirect left the encrypted address for a plain one."""
    schemes = [hop.url.scheme for hop in (*response.history, response)]
    if schemes[0] == "https" and "http" in schemes:
        raise DownloadFailed(
            f"{address} leads to an unencrypted address", hint="use another source"
        )


def _is_same_host(url: httpx.URL, address: str) -> bool:
    return url.host == httpx.URL(address).host


def _stated_size(response: httpx.Response) -> int | None:
    """Bytes of the whole file: a server may send less of it than the range that was asked for."""
    if response.status_code == 206:
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        return int(match[3]) if match and match[3] != "*" else None
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isdigit() else None


def _retry_after_s(response: httpx.Response) -> float:
    value = response.headers.get("Retry-After", "")
    return float(min(int(value), 300)) if value.isdigit() else 0.0


def failure_of(error: httpx.HTTPError | httpx.InvalidURL, address: str) -> DownloadFailed:
    """What to say of a request that is not tried again."""
    explained = _explain(error, address)
    if isinstance(explained, DownloadFailed):
        return explained
    return DownloadFailed(f"{address}: {explained}", hint="check the network and try again")


def _explain(error: httpx.HTTPError | httpx.InvalidURL, address: str) -> DownloadFailed | _TryAgain:
    """What to do about it: a broken connection is tried again, a refused certificate or proxy is
    not.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return DownloadFailed(
                f"{address}: the certificate was refused: {cause}",
                hint="behind a company proxy, set SSL_CERT_FILE to its certificate",
            )
        cause = cause.__cause__ or cause.__context__
    match error:
        case httpx.InvalidURL():
            return DownloadFailed(f"{address} is no address: {error}")
        case httpx.ProxyError():
            return DownloadFailed(
                f"the proxy refused {address}: {error}", hint="check HTTPS_PROXY and NO_PROXY"
            )
        case httpx.LocalProtocolError():
            # Without the error's own words: they repeat the header, and with it a token.
            return DownloadFailed(
                f"{address}: the request cannot be written", hint="check HF_TOKEN"
            )
        case httpx.TooManyRedirects() | httpx.UnsupportedProtocol():
            return DownloadFailed(f"{address}: {error}", hint="use another source")
        case httpx.ReadTimeout():
            return _TryAgain("nothing arrives")
        case httpx.ConnectError() | httpx.ConnectTimeout():
            return _TryAgain(f"cannot connect: {error}", is_unreachable=True)
        case _:
            return _TryAgain(f"the connection broke: {error or type(error).__name__}")
