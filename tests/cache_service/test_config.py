"""What the daemon is told at start, and how it answers what makes no sense."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from mapflow.cache_service.__main__ import parse
from mapflow.cache_service.config import (
    Config,
    Endpoint,
    GpuArena,
    LogFormat,
    TlsFiles,
    parse_endpoint,
    parse_gpu_arena,
    parse_size,
)
from mapflow.cli.main import app

SOCKET = Endpoint(path="/run/mapflow/mapflow.sock")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1048576", 1 << 20),
        ("64B", 64),
        ("4GiB", 4 << 30),
        ("4gib", 4 << 30),
        ("512 MB", 512_000_000),
        ("1.5KiB", 1536),
        ("2TiB", 2 << 40),
        (" 1kB ", 1000),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "4 G", "-1", "1e9", "4GiBs", "0x10", "1,5GiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="write it like 4GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unix:///run/mapflow/mapflow.sock", SOCKET),
        ("unix:/run/mapflow/mapflow.sock", SOCKET),
        ("127.0.0.1:7070", Endpoint(host="127.0.0.1", port=7070)),
        ("localhost:0", Endpoint(host="localhost", port=0)),
        ("[::1]:7070", Endpoint(host="::1", port=7070)),
    ],
)
def test_endpoints(text: str, expected: Endpoint) -> None:
    assert parse_endpoint(text) == expected
    assert parse_endpoint(str(expected)) == expected


@pytest.mark.parametrize(
    "text", ["", "unix:", "unix://run/x.sock", "unix:///run/", "host", ":7070", "host:", "h:x", "h:70000", "http://h:1"]
)
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(ValueError, match=r"like unix:///run/mapflow/mapflow\.sock"):
        parse_endpoint(text)


def test_gpu_arenas() -> None:
    assert parse_gpu_arena("0:8GiB") == GpuArena(0, 8 << 30)
    assert parse_gpu_arena(" 12:512 MB ") == GpuArena(12, 512_000_000)


@pytest.mark.parametrize("text", ["", "8GiB", ":8GiB", "a:8GiB", "-1:8GiB", "GPU-1:8GiB"])
def test_what_is_no_gpu_arena(text: str) -> None:
    with pytest.raises(ValueError, match="write it like 0:8GiB"):
        parse_gpu_arena(text)


def test_a_gpu_arena_of_no_size() -> None:
    with pytest.raises(ValueError, match="write it like 4GiB"):
        parse_gpu_arena("0:much")


def test_a_socket_path_has_a_longest_length() -> None:
    longest = "/" + "x" * 106
    assert parse_endpoint(f"unix://{longest}") == Endpoint(path=longest)
    with pytest.raises(ValueError, match="longer than 107 bytes"):
        parse_endpoint(f"unix://{longest}x")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", "example.org"])
def test_tcp_needs_tls_or_consent(host: str) -> None:
    """Loopback too: every user of the host can open it."""
    endpoint = Endpoint(host=host, port=1)
    with pytest.raises(ValueError, match=r"--tls-cert.*--insecure-tcp"):
        Config(endpoint=endpoint, arena_bytes=64)
    Config(endpoint=endpoint, arena_bytes=64, insecure_tcp=True)
    Config(endpoint=endpoint, arena_bytes=64, tls=TlsFiles.parse("a", "b", "c"))


def test_tls_is_whole_and_for_tcp() -> None:
    assert TlsFiles.parse(None, None, None) is None
    with pytest.raises(ValueError, match="add --tls-key, --tls-client-ca"):
        TlsFiles.parse("a", None, "")
    with pytest.raises(ValueError, match=r"Unix socket.*needs no TLS"):
        Config(endpoint=Endpoint(path="/run/x.sock"), arena_bytes=64, tls=TlsFiles.parse("a", "b", "c"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: Config(endpoint=SOCKET, arena_bytes=63), "arena must have at least 64 bytes, got 63"),
        (lambda: Config(endpoint=SOCKET, arena_bytes=64, metrics_port=-1), "metrics port"),
        (lambda: Config(endpoint=SOCKET, arena_bytes=64, metrics_port=65536), "metrics port"),
        (lambda: Config(endpoint=SOCKET, arena_bytes=64, session_timeout_s=0), "session_timeout_s"),
        (lambda: Config(endpoint=SOCKET, arena_bytes=64, max_lease_s=float("nan")), "max_lease_s"),
        (lambda: Config(endpoint=SOCKET, arena_bytes=64, reservation_timeout_s=float("inf")), "reservation_timeout_s"),
        (lambda: Config(endpoint=SOCKET, arena_bytes=64, drain_s=-1), "drain_s"),
        (lambda: Config(endpoint=SOCKET, arena_bytes=64, max_keys=0), "max_keys"),
        (
            lambda: Config(endpoint=SOCKET, arena_bytes=64, gpu_arenas=(GpuArena(3, 63),)),
            "GPU arena on device 3 must have at least 64 bytes, got 63; try 3:8GiB",
        ),
        (
            lambda: Config(endpoint=SOCKET, arena_bytes=64, gpu_arenas=(GpuArena(1, 64), GpuArena(1, 128))),
            "GPU arena on device 1 is named twice; name each device once",
        ),
    ],
)
def test_values_that_make_no_sense(config: object, message: str) -> None:
    assert callable(config)
    with pytest.raises(ValueError, match=message):
        config()


def test_the_command_line() -> None:
    arguments = "--endpoint 0.0.0.0:7070 --insecure-tcp --arena 2GiB --metrics-port 9 --drain 0 --log-format json"
    config = parse(arguments.split())
    assert config.endpoint == Endpoint(host="0.0.0.0", port=7070)
    assert (config.arena_bytes, config.metrics_port, config.drain_s) == (2 << 30, 9, 0.0)
    assert config.log_format is LogFormat.JSON
    assert config.gpu_arenas == config.limits.device_arena_bytes == ()
    config = parse(["--gpu-arena", "0:8GiB", "--gpu-arena", "2:64MiB"])
    assert config.gpu_arenas == (GpuArena(0, 8 << 30), GpuArena(2, 64 << 20))
    assert config.limits.device_arena_bytes == (8 << 30, 64 << 20)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--arena", "much"],
        ["--endpoint", "nowhere"],
        ["--endpoint", "0.0.0.0:1"],
        ["--endpoint", "127.0.0.1:1"],
        ["--tls-cert", "cert.pem"],
        ["--drain", "-1"],
        ["--gpu-arena", "8GiB"],
        ["--gpu-arena", "0:1GiB", "--gpu-arena", "0:2GiB"],
    ],
)
def test_a_wrong_command_line_gets_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_mapflow_serve_takes_gpu_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[Config] = []

    def run(config: Config) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr("mapflow.cache_service.server.run", run)
    invoke = CliRunner().invoke
    assert invoke(app, ["serve"]).exit_code == 0
    assert invoke(app, ["serve", "--gpu-arena", "0:1GiB", "--gpu-arena", "1:2GiB"]).exit_code == 0
    assert [config.gpu_arenas for config in configs] == [(), (GpuArena(0, 1 << 30), GpuArena(1, 2 << 30))]
    refused = invoke(app, ["serve", "--gpu-arena", "1GiB"])
    assert refused.exit_code == 2
    assert refused.stderr == "mapflow: '1GiB' is no GPU arena; write it like 0:8GiB, the device's number and a size\n"
