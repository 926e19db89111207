"""The pages: what they name exists, their commands are understood, their pictures are fresh."""

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest
from test_imports import ROW_OF

from jaxpipe import config as configs
from jaxpipe.bench import pages
from jaxpipe.config import Config

HOME = Path(__file__).parents[1]
HOUSE = HOME / "jaxpipe"
PAGES = sorted(
    [HOME / "README.md", *HOUSE.rglob("*.md"), *(HOME / "tests").rglob("*.md")],
    key=lambda path: (len(path.parts), path),
)
ROOMS = sorted(path.parent for path in HOUSE.glob("*/__init__.py"))
SUFFIXES = "py|toml|sh|sbatch|yaml|md|svg|txtpb|txt"
MADE = {"plan.svg", "orders.csv", "compare.svg", "config.toml"}  # by a command of the page
OF_OTHERS = ("--nodes", "--timeout", "--dry-run")  # options of other programs
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
def test_files_that_are_named_exist(page):
    """From the page's folder, the top or the house, or beside another that its paragraph names."""
    missing = []
    for paragraph in re.split(r"\n\n(?!\|)", page.read_text()):
        code = " ".join(spans(paragraph))
        files = re.findall(rf"(?<![\w/.*<-])((?:\./)?[\w/.-]*\w\.(?:{SUFFIXES}))(?![\w/-])", code)
        rooms = [page.parent / link for link in links(paragraph)]
        rooms = [path if path.is_dir() else path.parent for path in rooms]
        beside = [(HOME / file).parent for file in files if (HOME / file).exists()]
        within = [page.parent, HOME, HOUSE, HOME / "configs", *rooms, *beside]
        missing += [f for f in files if f not in MADE and not any((d / f).exists() for d in within)]
    assert not missing


@pytest.mark.parametrize("room", ROOMS, ids=name)
def test_every_module_is_on_the_page_of_its_room(room):
    code = " ".join(spans((room / "README.md").read_text()))
    modules = [path.name for path in room.glob("*.py") if not path.name.startswith("_")]
    assert not [file for file in modules if not re.search(rf"\b{file}", code)]


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
def test_options_that_are_named_exist(page):
    sources = [*HOUSE.rglob("*.py"), *(HOME / "launch").iterdir(), *(HOME / "tests").glob("*.py")]
    code = "\n".join(path.read_text() for path in sources)
    for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", " ".join(spans(page.read_text()))):
        assert re.search(rf"[\"'=\s]{option}\b", code) or option in OF_OTHERS, option


def test_the_front_page_is_short_and_says_first_what_matters():
    text = (HOME / "README.md").read_text()
    assert len(text.encode()) <= 12_000
    first = " ".join(text.splitlines()[:40])
    for words in ("trains decoder language models", "**For whom.**", "No GPU has run it."):
        assert words in first
    assert all(f"({name(room)}/README.md)" in text for room in ROOMS)


def test_every_room_is_on_the_map_and_says_how_to_change_it():
    there = (HOUSE / "README.md").read_text()
    for folder in [*ROOMS, HOME / "tests"]:
        text = (folder / "README.md").read_text()
        heading, first, second, *_ = text.split("\n\n")
        link = f"({folder.name}/README.md)"
        assert heading == f"# {folder.name}"
        assert first.startswith(("This room ", "This folder ")), name(folder)
        assert second.startswith("**To "), name(folder)
        if folder in ROOMS:
            row = next(line for line in there.splitlines() if line[0:1] == "|" and link in line)
            assert int(row.split("|")[1]) == 1 + ROW_OF[folder.name]


@pytest.mark.parametrize("page", pages.pages(), ids=name)
def test_timelines_are_those_of_the_code(page):
    assert pages.filled(page.read_text()) == page.read_text()


def test_pictures_say_what_the_code_draws(tmp_path, monkeypatch):
    """Every word in them; shapes and fonts are matplotlib's."""
    kept = {attribute: getattr(pages, attribute) for attribute in ("SCHEDULE", "STEP", "CURVE")}
    for attribute, path in kept.items():
        monkeypatch.setattr(pages, attribute, tmp_path / path.name)
    monkeypatch.setattr(pages, "pages", list)
    pages.run(argparse.Namespace(log=None))
    for path in kept.values():
        drawn = (tmp_path / path.name).read_text()
        assert words_of(drawn) == words_of(path.read_text()), path.name
        assert words_of(drawn)


def words_of(svg):
    """Those written as text, and those drawn as outlines, which stand in comments."""
    return re.findall(r"<text[^>]*>(.*?)</text>|<!-- (.*?) -->", svg, re.DOTALL)


FIGURES = HOUSE / "bench" / "FIGURES.md"
FIGURE = r"\d (?:%|per cent|[GM]iB|[GM]B|GB/s|m?s|seconds|minutes|GFLOP/s|tokens/s)(?![\w-])"


def sections(page):
    """The text under every heading, without code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.split(r"^#+ (.*)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(headings[::2], headings[1::2]))


def test_figures_have_a_command():
    rows = re.findall(
        r"^\| \[.*?\]\((.*?)\) \| (.*?) \| (.+) \|$", FIGURES.read_text(), re.MULTILINE
    )
    listed = {((FIGURES.parent / link).resolve(), section) for link, section, _ in rows}
    assert {page for page, _ in listed} <= set(PAGES)
    for page in set(PAGES) - {FIGURES}:
        there = sections(page)
        named = {section for of_page, section in listed if of_page == page} - {"all"}
        assert not named - set(there), name(page)
        with_figures = {section for section, text in there.items() if re.search(FIGURE, text)}
        if (page, "all") not in listed:
            assert not with_figures - named, name(page)
