"""`python -m jaxpipe.score MODEL TOKENS --out OUT [section.key=value ...]`: log-probabilities.

Writes the logarithm of the probability of every token after those before it. MODEL is a run's
directory, one of its checkpoints, or a model's directory from Hugging Face. TOKENS is a .npy of
integers [N, L], or a .jsonl with a list of token ids on each line. OUT is a .npz with `logprobs`
and `greedy` (whether no other token was more likely) [N, L - 1], or a .jsonl with a list per line.

It computes in float32 on one device; settings choose a mesh, devices and another dtype:
parallel.pp=2 runtime.cpu_devices=2 train.compute_dtype=bfloat16.

Exit codes: 0 done; 2 bad input.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxpipe.config import ConfigError
from jaxpipe.config.arguments import MODEL, parse, parser_of
from jaxpipe.config.paths import local_path
from jaxpipe.inference.settings import inference_config, start_devices
from jaxpipe.inference.token_sequences import check_ids, check_out, read_sequences, write_scores
from jaxpipe.schedule import ScheduleError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    paths = {"model": MODEL, "tokens": "a .npy or .jsonl"}
    parser = parser_of("score", __doc__ or "", paths=paths)
    parser.add_argument("--out", type=local_path, required=True, help="a .npz or .jsonl")
    try:
        arguments = parse(parser, argv)
        count = score(arguments.model, arguments.tokens, arguments.out, arguments.overrides)
    except (ConfigError, ScheduleError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"scored {count:,} tokens; their log-probabilities are in {arguments.out}")
    return 0


def score(model: Path, tokens: Path, out: Path, overrides: Sequence[str] = ()) -> int:
    """Score the sequences of a file, write their scores, and return the number of scored tokens.

    Raises:
        ConfigError: the model, the tokens, a setting or `out` cannot be used.
    """
    sequences = read_sequences(tokens)
    check_out(out, sequences)
    start_devices(overrides)
    # jax must not be imported earlier: it reads the environment set above when it starts.
    from jaxpipe.inference.loaded_model import LoadedModel
    from jaxpipe.inference.saved_model import SavedModel
    from jaxpipe.inference.scoring import Scorer

    saved = SavedModel.open(model)
    check_ids(sequences, tokens, saved.model.vocab_size, saved.longest)
    longest = max(len(row) - 1 for row in sequences)
    config = inference_config(saved.model, overrides, rows=len(sequences), longest=longest)
    write_scores(out, Scorer(LoadedModel.load(saved, config)).score(sequences))
    return sum(len(row) - 1 for row in sequences)


if __name__ == "__main__":
    sys.exit(main())
