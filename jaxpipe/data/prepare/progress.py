"""The progress bar of `prepare`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from jaxpipe.data.prepare.input_pieces import InputPiece


@contextmanager
def show_progress(
    pieces: list[InputPiece], remaining: list[InputPiece], console: Console
) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar; yields the function that adds input bytes and tokens to it."""
    columns = (
        TextColumn("preparing"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %  {task.fields[rate]:,.0f} tokens/s  ETA"),
        TimeRemainingColumn(),
    )
    tokens, before = 0, sum(piece.size for piece in pieces) - sum(piece.size for piece in remaining)
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=sum(piece.size for piece in pieces), completed=before, rate=0)

        def show(size: int, more: int) -> None:
            nonlocal tokens
            tokens += more
            seconds = bar.tasks[task].elapsed or 1
            bar.update(task, advance=size, rate=tokens / seconds)

        yield show
