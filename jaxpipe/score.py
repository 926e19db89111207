"""`python -m jaxpipe.score MODEL TOKENS [--out OUT] [section.key=value ...]`: log-probabilities.

Writes the logarithm of the probability of every token after those before it. MODEL is a run's
directory, one of its checkpoints, or a model's directory from Hugging Face. TOKENS is a .npy of
integers [N, L], or a .jsonl with a list of token ids on each line. OUT is a .npz with `logprobs`
and `greedy` (whether no other token was more likely) [N, L - 1], or a .jsonl with a list per line.
TOKENS may also be a folder of `python -m jaxpipe.data prepare`: its scores are written beside its
tokens, where training on pairs (train.loss=dpo) reads those of the reference model.

Experts take every token that chooses them, whatever capacity the model was trained with. Only the
scores of a folder are with this capacity, since they are compared with a step's: if the run on
pairs has another model.capacity_factor, give it here too.

It computes in float32 on one device; settings choose a mesh, devices and another dtype:
parallel.pp=2 runtime.cpu_devices=2 train.compute_dtype=bfloat16. With several processes the first
writes the scores.

Exit codes: 0 done; 2 bad input; 3 another process is missing; 7 storage did not
answer; 70 an unexpected error; 130 Ctrl-C.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxpipe.config import ConfigError
from jaxpipe.config.arguments import MODEL, parse, parser_of
from jaxpipe.config.paths import is_address, local_path
from jaxpipe.inference.command import start_devices
from jaxpipe.inference.prepared import REFERENCE, PreparedFolder
from jaxpipe.inference.settings import inference_config
from jaxpipe.inference.token_sequences import check_ids, check_out, read_sequences, write_scores
from jaxpipe.runtime import command, processes
from jaxpipe.runtime.storage.files import local_copy


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    paths = {"model": MODEL, "tokens": "a .npy, a .jsonl, or a prepared folder"}
    parser = parser_of("score", __doc__ or "", paths=paths)
    parser.add_argument(
        "--out", type=local_path, help="output file, .npz or .jsonl; not for a folder"
    )

    def run() -> None:
        arguments = parse(parser, argv)
        tokens = local_copy(arguments.tokens)
        out = _out(tokens, arguments.out)
        if out is None and is_address(arguments.tokens):
            raise ConfigError(
                f"{arguments.tokens}: scores of a folder are written into it, on a disk only: copy "
                f"it to one."
            )
        count = score(arguments.model, tokens, out, arguments.overrides)
        if processes.first():
            where = out or arguments.tokens
            print(f"scored {count:,} tokens; their log-probabilities are in {where}")

    return command.run(run)


def _out(tokens: Path, out: Path | None) -> Path | None:
    """Where scores are written; None: beside the tokens of a folder."""
    if tokens.is_dir() == (out is None):
        return out
    raise ConfigError(
        f"--out {out}: scores of the folder {tokens} are written into it; leave --out out."
        if out
        else f"--out is missing: name a .npz or .jsonl for the scores of {tokens}."
    )


def score(model: str | Path, tokens: Path, out: Path | None, overrides: Sequence[str] = ()) -> int:
    """Score the sequences of a file, write their scores, and return the number of scored tokens.

    With `out` None `tokens` is a prepared folder, and scores are written beside its tokens; experts
    then drop what a training step drops. With several processes the first writes.

    Raises:
        ConfigError: the model, the tokens, a setting or `out` cannot be used.
    """
    folder = PreparedFolder.open(tokens) if out is None else None
    sequences = folder.sequences if folder else read_sequences(tokens)
    if out is not None:
        check_out(out, sequences)
    start_devices(overrides)
    # jax must not be imported earlier: it reads the environment set above when it starts.
    from jaxpipe.inference.loaded_model import LoadedModel
    from jaxpipe.inference.saved_model import SavedModel
    from jaxpipe.inference.scoring import Scorer

    saved = SavedModel.open(model)
    check_ids(sequences, tokens, saved.model.vocab_size, saved.longest)
    longest = max(len(row) - 1 for row in sequences)
    config = inference_config(
        saved.model, overrides, rows=len(sequences), longest=longest, dropless=folder is None
    )
    if processes.first() and (capacity := getattr(config.model, "capacity_factor", 0)):
        print(f"experts drop tokens as a step with model.capacity_factor={capacity} does")
    scores = Scorer(LoadedModel.load(saved, config)).score(sequences)
    if processes.first():
        if folder:
            folder.write(REFERENCE, [one.logprobs for one in scores])
        else:
            write_scores(out, scores)
    return sum(len(row) - 1 for row in sequences)


if __name__ == "__main__":
    sys.exit(main())
