"""Settings come from four layers, and each value knows which."""

from pathlib import Path

import pytest
from pydantic import Field

from services.common.config import ServiceConfig, load_config
from services.common.errors import ConfigError


class WorkerLike(ServiceConfig):
    block_size: int = Field(16, gt=0, description="Tokens per block.")
    enable_prefix_caching: bool = Field(True, description="Share prefixes.")
    schedulers: tuple[str, ...] = Field(("127.0.0.1:1",), description="Addresses.")
    model: str | None = Field(None, description="Model.")


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "s.toml"
    path.write_text("[worker]\nblock_size = 32\nmodel = 'file'\nport = 7\n[gateway]\nport = 1\n")
    return path


def test_flags_beat_environment_beats_file_beats_default(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICEWAY_WORKER__MODEL", "env")
    monkeypatch.setenv("SLUICEWAY_WORKER__BLOCK_SIZE", "64")
    argv = ["--config", str(toml), "--block-size", "128"]
    loaded = load_config(WorkerLike, section="worker", argv=argv)
    assert (loaded.config.block_size, loaded.config.model, loaded.config.port) == (128, "env", 7)
    origins = loaded.origins
    assert origins["block_size"] == "flag"
    assert origins["model"] == "environment"
    assert origins["port"] == f"file {toml}"
    assert origins["host"] == "default"


def test_booleans_have_a_no_flag_and_lists_split_at_commas() -> None:
    argv = ["--no-enable-prefix-caching", "--schedulers", "a:1, b:2"]
    config = load_config(WorkerLike, section="worker", argv=argv).config
    assert config.enable_prefix_caching is False
    assert config.schedulers == ("a:1", "b:2")


def test_an_unknown_environment_key_is_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICEWAY_WORKER__BLOCKSIZE", "16")
    with pytest.raises(ConfigError, match=r"'blocksize' from environment.*'block_size'"):
        load_config(WorkerLike, section="worker", argv=[])


def test_an_environment_key_of_an_unknown_service_is_refused_with_a_hint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLUICEWAY_WRKER__BLOCK_SIZE", "16")
    with pytest.raises(ConfigError, match=r"'wrker' from environment.*'worker'"):
        load_config(WorkerLike, section="worker", argv=[])


@pytest.mark.parametrize("text", ["[worker]\nblocks = 1\n", "[wrker]\n"])
def test_an_unknown_file_key_or_table_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="unknown setting"):
        load_config(WorkerLike, section="worker", argv=["--config", str(path)])


def test_a_bad_value_names_field_value_and_source() -> None:
    with pytest.raises(ConfigError, match=r"worker\.block_size = '0' \(from flag\)"):
        load_config(WorkerLike, section="worker", argv=["--block-size", "0"])


def test_an_unknown_flag_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(WorkerLike, section="worker", argv=["--blok-size", "1"])
    assert caught.value.code == 2
    assert "--blok-size" in capsys.readouterr().err


def test_the_token_is_not_shown_when_a_config_is_printed() -> None:
    assert "sesame" not in repr(WorkerLike(cluster_token="sesame"))
