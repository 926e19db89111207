"""`python -m jaxpipe.checkpoint import | export | inspect`: Hugging Face checkpoints in and out.

  import HF_DIR CONFIG [section.key=value ...] [--out DIR]   parameters a run can start from
  import HF_DIR --write-config CONFIG [...]                  the same, and the TOML file of a run
  export STEP_DIR OUT_DIR [--config CONFIG]                  parameters transformers can load
  inspect DIR                                                what a checkpoint holds

Exit codes: 0 success; 2 bad input; 7 storage did not answer; 70 an unexpected error; 130 Ctrl-C.
Output gets its final name only when it is complete, and nothing is overwritten.
"""

import argparse
import contextlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxpipe import config as configs
from jaxpipe.checkpoint.compatibility import check_same_settings
from jaxpipe.checkpoint.hf.adapters import SETTINGS as ADAPTER_CONFIG
from jaxpipe.checkpoint.hf.adapters import export_adapters
from jaxpipe.checkpoint.hf.parameters import (
    export_huggingface,
    ignored_tensors,
    import_huggingface,
    read_config,
    training_settings,
)
from jaxpipe.checkpoint.hf.serving import ServingFiles
from jaxpipe.checkpoint.hf.streaming import StoredCheckpoint
from jaxpipe.checkpoint.hf.write_config import write_config
from jaxpipe.checkpoint.inspection import describe_checkpoint
from jaxpipe.checkpoint.listing import find_newest
from jaxpipe.checkpoint.orbax_port.errors import suppress_orbax_errors
from jaxpipe.config import mask_secrets
from jaxpipe.config.arguments import SETTINGS, Parser, parse_commands
from jaxpipe.config.paths import any_path
from jaxpipe.config.units import parse_bytes
from jaxpipe.model import FAMILIES
from jaxpipe.runtime import command
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.storage.directory import locked
from jaxpipe.runtime.storage.files import local_copy, open_path, written
from jaxpipe.runtime.storage.spool import local_folder
from jaxpipe.tokenizer.files import VOCABULARIES

DTYPES = ("float32", "bfloat16", "float16")  # dtypes of exported weights


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""

    def run() -> None:
        arguments = _parse_arguments(argv)
        suppress_orbax_errors()
        arguments.run(arguments)

    return command.run(
        run,
        interrupted="interrupted: nothing was written under its final name",
    )


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m jaxpipe.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    incoming = commands.add_parser("import", help="Hugging Face to jaxpipe")
    incoming.add_argument(
        "source", type=any_path, metavar="HF_DIR", help="config.json, safetensors"
    )
    incoming.add_argument(
        "words", nargs="*", metavar="CONFIG section.key=value",
        help=f"the run's TOML file, whose [model] must be the same model; {SETTINGS}",
    )  # fmt: skip
    incoming.add_argument(
        "--write-config", type=Path, metavar="CONFIG",
        help="write this TOML file for a run from config.json; then no other is given",
    )  # fmt: skip
    incoming.add_argument("--out", type=any_path, help="default: <run.dir>/imported")
    incoming.set_defaults(run=_import)

    _add_export(commands)
    looking = commands.add_parser("inspect", help="show what a checkpoint holds")
    looking.add_argument(
        "checkpoint",
        type=any_path,
        metavar="DIR",
        help="a checkpoint, or a run's directory for its newest",
    )
    looking.set_defaults(run=_inspect)

    arguments = parse_commands(parser, argv, "words")
    if arguments.command == "import" and not (arguments.write_config or arguments.words):
        parser.error("import needs CONFIG, or --write-config CONFIG")
    return arguments


def _add_export(commands: Any) -> None:
    outgoing = commands.add_parser("export", help="jaxpipe to Hugging Face")
    outgoing.add_argument(
        "checkpoint", type=any_path, metavar="DIR",
        help="a checkpoint, or a run's directory for its newest",
    )  # fmt: skip
    outgoing.add_argument(
        "out", type=any_path, metavar="OUT_DIR", help="must not exist, or be empty"
    )
    outgoing.add_argument("--config", help="a TOML file; default: the one in the checkpoint")
    outgoing.add_argument(
        "--dtype", choices=DTYPES, help="default: that of the imported weights, or else float32"
    )
    outgoing.add_argument(
        "--tokenizer", type=any_path, metavar="DIR",
        help="the tokenizer's files to copy, and its ids; default: what import or the data knew",
    )  # fmt: skip
    outgoing.add_argument(
        "--adapters", action="store_true", help="low-rank adapters alone, in PEFT's format"
    )
    outgoing.add_argument("--max-shard-size", type=parse_bytes, default="5GB", metavar="SIZE")
    outgoing.add_argument(
        "--max-positions",
        type=int,
        help="longest context in config.json; default: model.max_seq_len, or else the larger of "
        "the imported model's and train.seq_len",
    )
    outgoing.set_defaults(run=_export)


def _import(arguments: argparse.Namespace) -> None:
    arguments.source = local_copy(arguments.source)
    if not arguments.write_config:
        path, *overrides = arguments.words
        return _import_for(arguments, path, overrides)
    write_config(arguments.source, arguments.write_config)
    try:
        _import_for(arguments, str(arguments.write_config), arguments.words)
    except BaseException:
        arguments.write_config.unlink()  # so that the same command can be run again
        raise


def _import_for(arguments: argparse.Namespace, path: str, overrides: list[str]) -> None:
    config = configs.load(path, overrides)
    meta = {"config": configs.to_toml(config)}
    folder = local_folder(config.run.dir)
    with contextlib.nullcontext() if arguments.out else locked(folder, print, Group()):
        directory = open_path(arguments.out or f"{config.run.dir}/imported")
        step = import_huggingface(arguments.source, config.model, directory, meta)
    hf_config = read_config(arguments.source)
    if not hf_config.get("architectures"):
        taken = FAMILIES[config.model.family].format_named(hf_config).MODELS
        print(f"its config.json names no architecture: by its model_type it is taken for {taken}")
    start = [f"checkpoint.resume={step}", "checkpoint.parameters_only=true"]
    command = ["python", "-m", "jaxpipe.train", path, *overrides, *start]
    print(
        f"imported {config.model.parameter_count():,} parameters into {step}; a run starts from "
        f"them with:\n{mask_secrets(shlex.join(command))}"
    )
    if ignored := ignored_tensors(arguments.source, config.model):
        print(f"left out {len(ignored)} tensors that are not of this model ({ignored[0]} first)")
    for name, value in training_settings(arguments.source, config.model).items():
        settings = getattr(config.model, name)
        print(f"its config.json asks for model.{name}={value:.6g}; the run's is {settings:.6g}")


def _export(arguments: argparse.Namespace) -> None:
    checkpoint = StoredCheckpoint(find_newest(open_path(arguments.checkpoint), "DIR"))
    if arguments.config:
        config = configs.load(arguments.config)
        check_same_settings(checkpoint.directory, checkpoint.meta, config, with_moments=False)
    else:
        config = checkpoint.config
    if not checkpoint.checked_files:
        print(
            f"checkpoint {checkpoint.directory} was saved by a version that wrote no checksums: "
            f"nothing proves that its arrays are undamaged",
            file=sys.stderr,
        )
    model, serving = config.model, ServingFiles.from_meta(checkpoint.meta)
    if arguments.adapters:
        read, has = checkpoint.unmerged, checkpoint.has
        with written(arguments.out, last=ADAPTER_CONFIG) as out:
            count = export_adapters(read, has, model, config.lora, out)
        architecture = FAMILIES[model.family].format_of(model).ARCHITECTURES[0]
        print(
            f"exported {count} adapters of rank {config.lora.rank} to {arguments.out}; PEFT adds "
            f"them to a {architecture} of transformers"
        )
        return
    if arguments.tokenizer:
        known = serving.tokenizer.chat_templates
        serving = serving.with_tokenizer(arguments.tokenizer, model.vocab_size)
        if known and known != serving.tokenizer.chat_templates:
            print(
                f"the chat template is that of {arguments.tokenizer}; the run's is another one",
                file=sys.stderr,
            )
    longest = model.max_seq_len or max(serving.max_positions, config.train.seq_len)
    with written(arguments.out, last="config.json") as out:
        export_huggingface(
            checkpoint,
            model,
            out,
            dtype=arguments.dtype or (serving.dtype if serving.dtype in DTYPES else "float32"),
            max_positions=arguments.max_positions or longest,
            max_shard_bytes=arguments.max_shard_size,
            serving=serving,
        )
    missing = [] if {*VOCABULARIES} & serving.files.keys() else ["the tokenizer's files"]
    if not serving.eos_token_ids and not serving.tokenizer.is_bytes:
        missing.append("a token that ends text, without which generation does not stop")
    unknown = f"; not known: {' and '.join(missing)} (give --tokenizer DIR)" if missing else ""
    count, step = model.parameter_count(), checkpoint.meta["step"]
    use = "; its tokenizer gives the bytes of UTF-8 as ids" * serving.tokenizer.is_bytes
    print(f"exported {count:,} parameters of step {step} to {arguments.out}{use}{unknown}")


def _inspect(arguments: argparse.Namespace) -> None:
    Console(highlight=False, markup=False, soft_wrap=True).print(
        describe_checkpoint(open_path(arguments.checkpoint))
    )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # nothing is computed: do not claim accelerators
    sys.exit(main())
