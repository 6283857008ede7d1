"""Downloads a model from the Hugging Face hub; knows nothing of other sources."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError, NotFound, Unavailable
from services.pull.progress import Report, bytes_progress

_WANTED = ("*.safetensors", "*.json", "*.jinja", "tokenizer*")


def fetch_from_hub(
    repo_id: str, *, cache_dir: Path | None, report: Report, endpoint: str | None = None
) -> Path:
    """Download weights, configuration and tokenizer, or find them in the cache.

    Several processes may do so at once: huggingface_hub locks each file.

    Args:
        repo_id: ``owner/name``.
        cache_dir: The snapshots go to ``hub`` below it; ``None`` = huggingface_hub's own cache.
        report: Told how many bytes have come.
        endpoint: Address of the hub; ``None`` = the public one, or what ``HF_ENDPOINT`` says.

    Returns:
        The snapshot's directory.

    Raises:
        NotFound: There is no such model.
        ConfigError: huggingface_hub is missing, or the model's owner has to grant access first.
        Unavailable: The hub cannot be reached and the cache does not have the model.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
        from tqdm import tqdm
    except ImportError as error:
        raise ConfigError(
            f"fetching {repo_id} needs huggingface_hub: run `pip install 'sluiceway[pull]'`"
        ) from error
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo_id,
                cache_dir=cache_dir / "hub" if cache_dir else None,
                allow_patterns=list(_WANTED),
                tqdm_class=_reporting(tqdm, _ByteCounter(report).set),
                endpoint=endpoint,
            )
        )
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{repo_id} is gated: accept its terms on https://huggingface.co/{repo_id}, "
            "then run `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise NotFound(
            f"the hub has no model {repo_id!r} (a private one needs `hf auth login` or HF_TOKEN)"
        ) from error
    # OSError: what huggingface_hub makes of no network, of a server error and of a full disk.
    except (OSError, errors.HTTPError) as error:
        raise Unavailable(f"could not fetch {repo_id} from the hub: {error}") from error


class _ByteCounter:
    """Turns the two byte bars of a snapshot (received, written) into one that never goes back."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._done = 0

    def set(self, done: int, total: int) -> None:
        with self._lock:
            self._done = max(self._done, done)
            self._report(bytes_progress("download", self._done, total))


def _reporting(bar: type[Any], tell: Callable[[int, int], None]) -> type[Any]:
    """A silent progress bar that tells its bytes.

    Args:
        bar: Plain ``tqdm``: huggingface_hub's own counts nothing where stderr is no terminal.
        tell: Told the bytes done, and in all.
    """

    class ReportingBar(bar):  # type: ignore[misc] # tqdm has no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.unit == "B":
                tell(int(self.n), int(self.total or 0))
            return shown

        def display(self, *_args: object, **_kwargs: object) -> None:
            """Nothing: the caller shows the progress."""

    return ReportingBar
