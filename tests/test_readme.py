"""The pages: what they name exists, their commands are understood, their pictures are fresh."""

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest
from timelines import pages, redrawn

from jaxpipe import config as configs
from jaxpipe.config import Config

HOME = Path(__file__).parents[1]
HOUSE = HOME / "jaxpipe"
PAGES = pages()
STANDS_FOR = {"CONFIG": "configs/quickstart.toml"}
SCRIPTS = {"train.sh": "train", "plan.sh": "plan", "bench.sh": "bench", "data.sh": "data"}


def name(path):
    return str(path.relative_to(HOME))


every_page = pytest.mark.parametrize("page", PAGES, ids=name)


def links(text):
    """Where the relative links and pictures of a text lead."""
    return [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]


def spans(text):
    """What stands in code, inline or in a block."""
    inline = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [*re.findall(r"`([^`]+)`", inline), *blocks]


def commands(text):
    """The commands of a text: words, with what stands for others filled in and options given."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [span for span in re.findall(r"`([^`\n]+)`", text) if is_command(span)]
    for line in lines:
        line = line.replace("[section.key=value ...]", "train.steps=7")
        line = re.sub(r"\[(--[^]]+)\]", r"\1", line)
        if words := shlex.split(line, comments=True):
            yield [STANDS_FOR.get(word, word) for word in words]


def is_command(span):
    return re.match(r"\./launch/\S+ |python -m jaxpipe\.\S+ [A-Z]", span)


@every_page
def test_links_lead_somewhere(page):
    missing = [link for link in links(page.read_text()) if not (page.parent / link).exists()]
    assert not missing


@every_page
def test_settings_that_are_named_exist(page):
    sections = dict(Config.__annotations__)
    defaults = configs.load(HOME / STANDS_FOR["CONFIG"], [])
    for span in spans(page.read_text()):
        for section, key in re.findall(rf"\b({'|'.join(sections)})\.([a-z]\w*)(?![\w./(])", span):
            if key not in ("key", "py", "sh"):
                assert hasattr(getattr(defaults, section), key), f"{section}.{key}"


class Understood(BaseException):
    """A command line was parsed."""


def parse(monkeypatch, module, words):
    """What `python -m jaxpipe.<module>` makes of these words, without doing it."""
    for method in ("parse_args", "parse_intermixed_args"):
        original = getattr(argparse.ArgumentParser, method)

        def stop(*args, original=original):
            raise Understood(original(*args))

        monkeypatch.setattr(argparse.ArgumentParser, method, stop)
    package = (HOUSE / module).is_dir()
    command = importlib.import_module(f"jaxpipe.{module}{'.__main__' * package}")
    if hasattr(command, "_parsed"):
        return command._parsed(words)
    with pytest.raises(Understood) as understood:
        command.main(words)
    return understood.value.args[0]


def module_and_words(words):
    """Which of our commands a line runs, and with what words; None where it is another's."""
    first, *rest = words
    if Path(first).name.startswith("python") and rest[:1] == ["-m"]:
        return rest[1].removeprefix("jaxpipe."), rest[2:]
    if first.startswith("./launch/") and (script := Path(first).name) in SCRIPTS:
        return SCRIPTS[script], rest
    if first == "./launch/local_multiprocess.sh":
        assert rest[0].isdecimal()
        return "train", rest[1:]
    if first == "sbatch":
        script = next(i for i, word in enumerate(rest) if word.startswith("launch/"))
        return "train", rest[script + 1 :]
    return None


@every_page
def test_commands_are_understood(page, monkeypatch):
    for words in commands(page.read_text()):
        for word in words:
            if re.match(r"(\./)?(launch|configs)/", word):
                assert (HOME / word).is_file(), " ".join(words)
        if (run := module_and_words(words)) is None:
            continue
        with monkeypatch.context() as patch:
            patch.chdir(HOME)
            arguments = parse(patch, *run)
            if hasattr(arguments, "overrides"):
                configs.load(arguments.config, arguments.overrides)


@every_page
def test_timelines_are_those_of_the_code(page):
    assert redrawn(page.read_text()) == page.read_text()
