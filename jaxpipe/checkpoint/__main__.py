"""`python -m jaxpipe.checkpoint import | export | inspect`: Hugging Face checkpoints in and out.

  import HF_DIR CONFIG [section.key=value ...] [--out DIR]   parameters a run can start from
  export STEP_DIR OUT_DIR [--config CONFIG]                  parameters transformers can load
  inspect DIR                                                what a checkpoint holds

Exit codes: 0 done; 2 bad input; 130 Ctrl-C. What is not complete never has its final name, and
nothing is overwritten.
"""

import argparse
import shlex
import signal
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import jax
import msgspec
from rich.console import Console

from jaxpipe import config as configs
from jaxpipe.checkpoint.compatibility import check_same_settings
from jaxpipe.checkpoint.huggingface import export_huggingface, import_huggingface
from jaxpipe.checkpoint.inspection import inspected
from jaxpipe.checkpoint.quiet import quiet_threads
from jaxpipe.checkpoint.streaming import StoredCheckpoint
from jaxpipe.config import Config, ConfigError, from_builtins
from jaxpipe.config.units import parse_bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    arguments = _parsed(argv)
    try:
        with quiet_threads():
            arguments.run(arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing was written under its final name", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jaxpipe.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    incoming = commands.add_parser("import", help="Hugging Face to jaxpipe")
    incoming.add_argument("source", type=Path, metavar="HF_DIR", help="config.json, safetensors")
    incoming.add_argument("config", help="the run's TOML file: its [model] must be the same model")
    incoming.add_argument("overrides", nargs="*", metavar="section.key=value")
    incoming.add_argument("--out", type=Path, help="default: <run.dir>/imported")
    incoming.set_defaults(run=_import)

    outgoing = commands.add_parser("export", help="jaxpipe to Hugging Face")
    outgoing.add_argument("checkpoint", type=Path, metavar="STEP_DIR")
    outgoing.add_argument("out", type=Path, metavar="OUT_DIR", help="must not exist, or be empty")
    outgoing.add_argument("--config", help="a TOML file; default: the one in the checkpoint")
    outgoing.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    outgoing.add_argument("--max-shard-size", type=parse_bytes, default="5GB", metavar="SIZE")
    outgoing.add_argument(
        "--max-positions",
        type=int,
        help="longest context in config.json; default: model.max_seq_len, or else train.seq_len",
    )
    outgoing.set_defaults(run=_export)

    looking = commands.add_parser("inspect", help="show what a checkpoint holds")
    looking.add_argument("checkpoint", type=Path, metavar="DIR", help="of a step, or of all")
    looking.set_defaults(run=_inspect)

    # argparse gives a starred positional nothing once an option stands before it.
    arguments, left = parser.parse_known_args(argv)
    if left and (arguments.command != "import" or any(word.startswith("-") for word in left)):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if left:
        arguments.overrides += left
    return arguments


def _import(arguments: argparse.Namespace) -> None:
    config = configs.load(arguments.config, arguments.overrides)
    directory = arguments.out or Path(config.run.dir) / "imported"
    meta = {"config": configs.to_toml(config)}
    step = import_huggingface(arguments.source, config.model, directory, meta)
    start = [f"checkpoint.resume={step}", "checkpoint.parameters_only=true"]
    words = ["python", "-m", "jaxpipe.train", arguments.config, *arguments.overrides, *start]
    print(
        f"imported {config.model.parameter_count():,} parameters into {step}; this starts a run "
        f"from them:\n{shlex.join(words)}"
    )


def _export(arguments: argparse.Namespace) -> None:
    checkpoint = StoredCheckpoint(arguments.checkpoint)
    if arguments.config:
        config = configs.load(arguments.config)
        check_same_settings(checkpoint.directory, checkpoint.meta, config, with_moments=False)
    else:
        config = _stored_config(checkpoint)
    if not checkpoint.compared:
        print(
            f"checkpoint {checkpoint.directory} was saved by a version that wrote no checksums: "
            f"nothing proves that its arrays are undamaged",
            file=sys.stderr,
        )
    export_huggingface(
        checkpoint,
        config.model,
        arguments.out,
        dtype=arguments.dtype,
        max_positions=(arguments.max_positions or config.model.max_seq_len or config.train.seq_len),
        max_shard_bytes=arguments.max_shard_size,
    )
    print(
        f"exported {config.model.parameter_count():,} parameters to {arguments.out}; the tokenizer "
        f"is not part of a checkpoint: copy its files there"
    )


def _inspect(arguments: argparse.Namespace) -> None:
    Console(highlight=False, markup=False, soft_wrap=True).print(inspected(arguments.checkpoint))


def _stored_config(checkpoint: StoredCheckpoint) -> Config:
    try:
        return from_builtins(tomllib.loads(checkpoint.meta["config"]))
    except (KeyError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"checkpoint {checkpoint.directory} holds no configuration that this version reads: "
            f"give --config."
        ) from error


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # nothing is computed: leave accelerators alone
    sys.exit(main())
