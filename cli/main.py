"""The `mapflow` command. Each subcommand imports what it needs only when it runs, so that `serve` needs no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from mapflow.v1.version import __version__

app = typer.Typer(
    name="mapflow",
    help="Attention maps of one model speed up the prefill of another.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Endpoint = Annotated[str, typer.Option(help="unix:///path or host:port of the daemon.")]
_DEFAULT_ENDPOINT = "unix:///run/mapflow/mapflow.sock"


def main() -> None:
    """Entry point of the console script."""
    app()


def fail(message: object) -> typer.Exit:
    """One line on standard error, and exit status 2."""
    print(f"mapflow: {message}", file=sys.stderr)
    return typer.Exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mapflow {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Attention maps of one model speed up the prefill of another."""


@app.command()
def serve(
    endpoint: Endpoint = _DEFAULT_ENDPOINT,
    arena: Annotated[str, typer.Option(help="Shared memory for attention maps, like 4GiB.")] = "1GiB",
    gpu_arena: Annotated[
        list[str] | None,
        typer.Option(metavar="DEVICE:SIZE", help="GPU memory for copies of maps, like 0:8GiB; once for each GPU."),
    ] = None,
    metrics_host: Annotated[str, typer.Option(help="Address of the Prometheus port.")] = "127.0.0.1",
    metrics_port: Annotated[int, typer.Option(help="Prometheus port; 0 serves no metrics.")] = 0,
    session_timeout: Annotated[float, typer.Option(help="Silence that ends a session, in seconds.")] = 10.0,
    max_lease: Annotated[float, typer.Option(help="Longest life of a lease, in seconds.")] = 60.0,
    reservation_timeout: Annotated[float, typer.Option(help="Longest write of a blob, in seconds.")] = 60.0,
    max_keys: Annotated[int, typer.Option(help="Most keys in one request.")] = 4096,
    drain: Annotated[float, typer.Option(help="Longest wait for readers and writers at the end, in seconds.")] = 10.0,
    insecure_tcp: Annotated[bool, typer.Option("--insecure-tcp", help="Allow TCP without TLS.")] = False,
    tls_cert: Annotated[str | None, typer.Option(help="PEM certificate of the daemon, for TCP.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Its private key.")] = None,
    tls_client_ca: Annotated[str | None, typer.Option(help="Authority whose certificates clients must show.")] = None,
    log_format: Annotated[Literal["console", "json"], typer.Option(help="How log lines look.")] = "console",
) -> None:
    """Run the cache daemon of this node."""
    from mapflow.cache_service.config import Config, LogFormat, TlsFiles, parse_endpoint, parse_gpu_arena, parse_size
    from mapflow.cache_service.server import run

    try:
        config = Config(
            endpoint=parse_endpoint(endpoint),
            arena_bytes=parse_size(arena),
            metrics_host=metrics_host,
            metrics_port=metrics_port,
            session_timeout_s=session_timeout,
            max_lease_s=max_lease,
            reservation_timeout_s=reservation_timeout,
            max_keys=max_keys,
            drain_s=drain,
            insecure_tcp=insecure_tcp,
            tls=TlsFiles.parse(tls_cert, tls_key, tls_client_ca),
            log_format=LogFormat(log_format),
            gpu_arenas=tuple(map(parse_gpu_arena, gpu_arena or ())),
        )
    except ValueError as error:
        raise fail(error) from None
    raise typer.Exit(run(config))


@app.command()
def status(
    endpoint: Endpoint = _DEFAULT_ENDPOINT,
    tls_ca: Annotated[str | None, typer.Option(help="PEM authority of the daemon's certificate, for TCP.")] = None,
    tls_cert: Annotated[str | None, typer.Option(help="Certificate to show to it.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Its private key.")] = None,
    tls_server_name: Annotated[str, typer.Option(help="Name in the daemon's certificate, if not the host.")] = "",
) -> None:
    """Show what the daemon of this node holds."""
    from mapflow.cli.status import StatusError, print_status
    from mapflow.connector.tls import ClientTls

    try:
        print_status(endpoint, ClientTls.parse(tls_ca, tls_cert, tls_key, tls_server_name))
    except ValueError as error:
        raise fail(error) from None
    except StatusError as error:
        raise fail(error) from None


@app.command()
def calibrate(
    sender: Annotated[Path, typer.Option(help="Directory of the model whose maps are published.")],
    receiver: Annotated[Path, typer.Option(help="Directory of the model that reuses them.")],
    texts: Annotated[Path, typer.Option(help="Calibration texts: .jsonl with text or messages, or one .txt.")],
    out: Annotated[Path, typer.Option(help="Plan to write, NAME.safetensors.")],
    mode: Annotated[Literal["guide", "translate"], typer.Option(help="How layers reuse maps.")] = "guide",
    first_layer: Annotated[int | None, typer.Option(help="First receiver layer that reuses.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Share kept in each block row: of root masses (guide, 0.6), of masses (translate, 0.9)."),
    ] = None,
    sink_blocks: Annotated[int, typer.Option(help="Leading blocks that guide always keeps.")] = 1,
    local_blocks: Annotated[int, typer.Option(help="Blocks up to the diagonal that guide always keeps.")] = 2,
    heads_per_head: Annotated[int | None, typer.Option(help="Sender heads per receiver head (translate).")] = None,
    tune_steps: Annotated[int, typer.Option(help="Steps that tune head weights end to end (translate).")] = 0,
    tune_tokens: Annotated[int, typer.Option(help="Tokens of the pieces that they are tuned on.")] = 1024,
    tile_dtype: Annotated[Literal["e4m3", "bf16"], typer.Option(help="Storage of translate's tiles.")] = "e4m3",
    chunk_tokens: Annotated[int, typer.Option(help="Tokens a chunk.")] = 512,
    block: Annotated[int, typer.Option(help="Tokens along one side of a block: 64 or 128.")] = 64,
    max_tokens: Annotated[int, typer.Option(help="Tokens beyond these are cut off each document.")] = 2048,
    row_fraction: Annotated[float, typer.Option(help="Share of token rows that enter the fit.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the choice of rows.")] = 0,
    max_kl: Annotated[
        float | None, typer.Option(help="Choose each layer's mode: the fastest plan within this prefix KL, in nats.")
    ] = None,
    target_ttft: Annotated[
        float | None, typer.Option(help="Choose each layer's mode: the best plan within this share of a full prefill.")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of the prefill that is to be fast.")] = 16384,
    device: Annotated[str, typer.Option(help="Torch device that runs both models.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    one_at_a_time: Annotated[
        bool, typer.Option("--one-at-a-time", help="Hold one model in memory at a time; slower.")
    ] = False,
) -> None:
    """Fit a plan for a pair of models. An interrupted run goes on where it stopped."""
    from mapflow.calibration.config import CalibrationConfig, CalibrationError
    from mapflow.cli.calibrate import run_calibration
    from mapflow.connector.plan import Mode

    try:
        config = CalibrationConfig(
            sender=sender,
            receiver=receiver,
            texts=texts,
            out=out,
            mode=Mode(mode),
            first_layer=first_layer,
            top_p=top_p,
            sink_blocks=sink_blocks,
            local_blocks=local_blocks,
            heads_per_head=heads_per_head,
            tune_steps=tune_steps,
            tune_tokens=tune_tokens,
            tile_dtype=tile_dtype,
            chunk_tokens=chunk_tokens,
            block=block,
            max_tokens=max_tokens,
            row_fraction=row_fraction,
            seed=seed,
            max_kl=max_kl,
            target_ttft=target_ttft,
            context=context,
            device=device,
            dtype=dtype,
            one_at_a_time=one_at_a_time,
        )
        run_calibration(config)
    except (CalibrationError, ValueError) as error:
        raise fail(error) from None


@app.command()
def evaluate(
    plans: Annotated[list[Path], typer.Argument(metavar="PLAN...", help="Plan files, NAME.safetensors.")],
    sender: Annotated[Path, typer.Option(help="Directory of the model whose maps are published.")],
    receiver: Annotated[Path, typer.Option(help="Directory of the model that reuses them.")],
    texts: Annotated[Path, typer.Option(help="Held-out texts: .jsonl with text or messages, or one .txt.")],
    top_p: Annotated[list[float] | None, typer.Option(help="In place of the plan's own; may be repeated.")] = None,
    first_layer: Annotated[list[int] | None, typer.Option(help="Layers below it compute; may be repeated.")] = None,
    retrieval: Annotated[int, typer.Option(help="Samples of each retrieval task.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="Tokens beyond these are cut off each document.")] = 2048,
    max_documents: Annotated[int, typer.Option(help="Documents used at most.")] = 16,
    suffix_tokens: Annotated[int, typer.Option(help="Least number of tokens behind the reused ones.")] = 64,
    context: Annotated[int, typer.Option(help="Tokens of the prefill whose time is estimated.")] = 16384,
    out: Annotated[Path | None, typer.Option(help="JSON file to write the figures to.")] = None,
    device: Annotated[str, typer.Option(help="Torch device that runs both models.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    one_at_a_time: Annotated[
        bool, typer.Option("--one-at-a-time", help="Hold one model in memory at a time; slower.")
    ] = False,
) -> None:
    """Judge plans on held-out texts, beside the receiver's own masks and static ones of the same density."""
    from mapflow.calibration.config import CalibrationError
    from mapflow.calibration.evaluation_config import EvaluationConfig
    from mapflow.cli.evaluate import run_evaluation
    from mapflow.connector.plan import PlanError

    try:
        config = EvaluationConfig(
            sender=sender,
            receiver=receiver,
            texts=texts,
            max_tokens=max_tokens,
            max_documents=max_documents,
            suffix_tokens=suffix_tokens,
            samples_per_task=retrieval,
            context=context,
            device=device,
            dtype=dtype,
            one_at_a_time=one_at_a_time,
        )
        run_evaluation(config, plans, top_p or (), first_layer or (), out)
    except (CalibrationError, PlanError, ValueError) as error:
        raise fail(error) from None


@app.command()
def report(
    plan: Annotated[Path, typer.Argument(help="Plan file, NAME.safetensors.")],
    out: Annotated[Path, typer.Option(help="HTML file to write.")],
    quality: Annotated[Path | None, typer.Option(help="What evaluate --out wrote.")] = None,
    sender: Annotated[Path | None, typer.Option(help="The sender's directory, to show maps of a text.")] = None,
    receiver: Annotated[Path | None, typer.Option(help="The receiver's directory, likewise.")] = None,
    texts: Annotated[Path | None, typer.Option(help="Texts, the longest of which is shown.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of it that are shown at most.")] = 4096,
    device: Annotated[str, typer.Option(help="Torch device that runs both models.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Write one HTML page about a plan: quality against time, layers, head maps, and maps of a text."""
    from mapflow.calibration.config import CalibrationError
    from mapflow.cli.report import ExampleSource, write_report
    from mapflow.connector.plan import PlanError

    try:
        source = None
        if sender is not None and receiver is not None and texts is not None:
            source = ExampleSource(
                sender=sender, receiver=receiver, texts=texts, max_tokens=max_tokens, device=device, dtype=dtype
            )
        elif (sender, receiver, texts) != (None, None, None):
            raise CalibrationError("maps of a text need --sender, --receiver and --texts; give all three or none")
        write_report(plan, out, quality=quality, source=source)
    except (CalibrationError, PlanError) as error:
        raise fail(error) from None


@app.command()
def inspect(plan: Annotated[Path, typer.Argument(help="Plan file, NAME.safetensors.")]) -> None:
    """Print a plan: which layer reuses what, and how well it fitted."""
    from rich.console import Console

    from mapflow.calibration.inspect import plan_table
    from mapflow.connector.plan import PlanError, load_plan

    try:
        Console().print(plan_table(load_plan(plan)))
    except PlanError as error:
        raise fail(error) from None


@app.command()
def demo(
    pair: Annotated[Path, typer.Option(help="Directory with sender, receiver and plans.")] = Path("examples/pair"),
    conversations: Annotated[Path, typer.Option(help="Conversations to play.")] = Path("examples/conversations.jsonl"),
    out: Annotated[Path, typer.Option(help="Report to write.")] = Path("demo-report.json"),
    logs: Annotated[Path, typer.Option(help="Folder for the logs of daemon and servers.")] = Path("demo-logs"),
    max_conversations: Annotated[int, typer.Option(help="Conversations to play at most.")] = 3,
    turns: Annotated[int, typer.Option(help="Turns of each conversation to play at most.")] = 4,
) -> None:
    """Play conversations that alternate between two vLLM servers, and show what was reused and what it cost."""
    from mapflow.cli.demo.play import DemoError, run_demo

    try:
        run_demo(pair, conversations, out, logs, max_conversations=max_conversations, max_turns=turns)
    except DemoError as error:
        raise fail(error) from None


if __name__ == "__main__":
    main()
