"""`python -m jaxpipe.generate MODEL --prompt TEXT [section.key=value ...]`: continue a text.

MODEL is a run's directory, one of its checkpoints, or a model's directory from Hugging Face.
Without --temperature the most likely token is taken. The text ends at the model's end-of-text
token, or after --max-tokens. With --chat TEXT is a user's message and the reply is printed, by the
chat template of the model or of --tokenizer. The model is put on one device, or on several with
parallel.tp, whatever mesh trained it. On any other mesh, which may span several processes, there is
no cache: every token costs a pass over the whole text.

Exit codes: 0 done; 2 bad input; 3 another process is missing; 7 storage did not
answer; 70 an unexpected error; 130 Ctrl-C.
"""

import argparse
import sys
from collections.abc import Sequence

from jaxpipe.config import ConfigError
from jaxpipe.config.arguments import MODEL, parse, parser_of
from jaxpipe.inference.command import start_devices
from jaxpipe.inference.settings import inference_config
from jaxpipe.runtime import command, processes

_COLDEST, _HOTTEST = 1e-6, 1e6  # as for `train.loss_temperature`


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = parser_of("generate", __doc__ or "", paths={"model": MODEL})
    add = parser.add_argument
    add("--prompt", required=True, metavar="TEXT")
    add("--chat", action="store_true", help="TEXT is a message; print the reply")
    add("--max-tokens", type=int, default=200, metavar="N", help="the most new tokens (200)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0: the most likely token (0)")
    add("--top-p", type=float, default=1.0, metavar="P", help="share of probability to draw from")
    add("--seed", type=int, default=0, help="seed of the sampled tokens (0)")
    add("--tokenizer", default="", metavar="PATH", help="a tokenizer.json, its folder, or 'bytes'")

    def run() -> None:
        arguments = parse(parser, argv)
        _check_numbers(arguments)
        generate(arguments)

    return command.run(run)


def _check_numbers(arguments: argparse.Namespace) -> None:
    if arguments.max_tokens < 1:
        raise ConfigError(f"--max-tokens {arguments.max_tokens}: give 1 or more.")
    if not (arguments.temperature == 0 or _COLDEST <= arguments.temperature <= _HOTTEST):
        raise ConfigError(
            f"--temperature {arguments.temperature}: give 0, or a number from {_COLDEST:g} to "
            f"{_HOTTEST:g}."
        )
    if not -(2**63) <= arguments.seed < 2**63:
        raise ConfigError(f"--seed {arguments.seed}: give an integer of 64 bits.")
    if not 0 < arguments.top_p <= 1:
        raise ConfigError(f"--top-p {arguments.top_p}: give a share above 0 and at most 1.")
    if arguments.top_p < 1 and not arguments.temperature:
        raise ConfigError(
            f"--top-p {arguments.top_p} with --temperature 0, which takes the most likely token: "
            f"give a --temperature above 0, or leave --top-p out."
        )


def generate(arguments: argparse.Namespace) -> None:
    """Print a text as it is generated, after its prompt; the arguments are those of `main`.

    Raises:
        ConfigError: the model, its tokenizer, the prompt or a setting cannot be used.
    """
    start_devices(arguments.overrides)
    # jax must not be imported earlier: it reads the environment set above when it starts.
    from jaxpipe.inference.generation import Generator
    from jaxpipe.inference.loaded_model import LoadedModel
    from jaxpipe.inference.sampling import Sampling
    from jaxpipe.inference.saved_model import SavedModel
    from jaxpipe.inference.text import chat_prompt, encode_prompt, tokenizer_of, with_tokenizer

    saved = with_tokenizer(SavedModel.open(arguments.model), arguments.tokenizer)
    tokenizer = tokenizer_of(saved)
    text, chat = arguments.prompt, arguments.chat
    text = chat_prompt(saved, text) if chat else text
    prompt = encode_prompt(saved, tokenizer, text, special=not chat)
    room = saved.longest - len(prompt) if saved.longest else arguments.max_tokens
    tokens = min(arguments.max_tokens, room)
    longest = len(prompt) + tokens
    config = inference_config(saved.model, arguments.overrides, rows=1, longest=longest)
    sampling = Sampling(arguments.temperature, arguments.top_p)
    shown, ends = tokenizer.decode(prompt) if chat else "", saved.serving.eos_token_ids

    def show(made: list[int], *, complete: bool) -> None:
        """Print what is new; a last character that is not complete only if the text is."""
        nonlocal shown
        text = tokenizer.decode(prompt + [token for token in made if token not in ends])
        if processes.first() and (complete or not text.endswith("\N{REPLACEMENT CHARACTER}")):
            print(text[len(shown) :], end="", flush=True)
            shown = text

    def is_finished(_: int, made: list[int]) -> bool:
        show(made, complete=False)
        return made[-1] in ends

    show([], complete=True)
    generator = Generator(LoadedModel.load(saved, config), sampling)
    (made,) = generator.generate([prompt], tokens, is_finished, seed=arguments.seed)
    show(made.tokens, complete=True)
    if processes.first():
        print()


if __name__ == "__main__":
    sys.exit(main())
