"""`python -m jaxpipe.evaluate MODEL --tasks NAMES [section.key=value ...]`: tasks of lm-eval.

MODEL is a run's directory, one of its checkpoints, or a model's directory from Hugging Face. Prints
the harness's table. Settings choose a mesh, devices and a dtype: parallel.pp=2
runtime.cpu_devices=2 train.compute_dtype=bfloat16; tasks that generate text are slow on a mesh
other than parallel.tp. With several processes the first prints and writes.

Exit codes: 0 done; 2 bad input; 3 another process is missing; 7 storage did not
answer; 70 an unexpected error; 130 Ctrl-C.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from jaxpipe.config import ConfigError
from jaxpipe.config.arguments import MODEL, parse, parser_of
from jaxpipe.config.paths import local_path
from jaxpipe.data.optional import import_optional
from jaxpipe.inference.command import start_devices
from jaxpipe.inference.settings import inference_config
from jaxpipe.inference.token_sequences import write_out
from jaxpipe.runtime import command, processes

_ROWS = 2**20  # more sequences than a batch has


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = parser_of("evaluate", __doc__ or "", paths={"model": MODEL})
    add = parser.add_argument
    add("--tasks", required=True, metavar="NAMES", help="names of tasks, separated by commas")
    add("--include-path", type=local_path, metavar="DIR", help="a folder of tasks of your own")
    add("--limit", type=int, metavar="N", help="examples per task; default: all")
    add("--num-fewshot", type=int, metavar="N", help="examples in the context; default: the task's")
    add("--apply-chat-template", action="store_true", help="write contexts as conversations")
    add("--tokenizer", default="", metavar="PATH", help="a tokenizer.json, or 'bytes'")
    add("--out", type=local_path, metavar="JSON", help="a file for all results")

    def run() -> None:
        arguments = parse(parser, argv)
        if arguments.limit is not None and arguments.limit < 1:
            raise ConfigError(f"--limit {arguments.limit}: give 1 or more, or leave it out.")
        if not _names(arguments.tasks):
            raise ConfigError(f"--tasks {arguments.tasks!r}: `lm-eval ls tasks` lists their names.")
        results = evaluate(arguments)
        if not processes.first():
            return
        if arguments.out:
            text = json.dumps(results, indent=2, default=str) + "\n"
            write_out(arguments.out, lambda file: file.write(text.encode()))
        print(import_optional("lm_eval.utils", "the table", "eval").make_table(results))

    return command.run(run)


def _names(tasks: str) -> list[str]:
    return [name for name in tasks.split(",") if name]


def evaluate(arguments: argparse.Namespace) -> dict[str, Any]:
    """Evaluate tasks and return the harness's results; the arguments are those of `main`.

    Raises:
        ConfigError: the model, its tokenizer, a task or a setting cannot be used.
    """
    import_optional("lm_eval", "`python -m jaxpipe.evaluate`", "eval")
    start_devices(arguments.overrides)
    # jax must not be imported earlier: it reads the environment set above when it starts.
    from jaxpipe.inference.harness import harness_model
    from jaxpipe.inference.loaded_model import LoadedModel
    from jaxpipe.inference.saved_model import SavedModel
    from jaxpipe.inference.tasks import LONGEST, Tasks
    from jaxpipe.inference.text import tokenizer_of, with_tokenizer

    saved = with_tokenizer(SavedModel.open(arguments.model), arguments.tokenizer)
    tokenizer = tokenizer_of(saved)
    longest = saved.longest or LONGEST
    config = inference_config(saved.model, arguments.overrides, rows=_ROWS, longest=longest)
    names = _names(arguments.tasks)
    tasks = Tasks.find(names, str(arguments.include_path or ""), arguments.limit)
    return tasks.evaluate(
        harness_model(LoadedModel.load(saved, config), tokenizer, longest),
        num_fewshot=arguments.num_fewshot,
        apply_chat_template=arguments.apply_chat_template,
    )


if __name__ == "__main__":
    sys.exit(main())
