"""The pages: their links and names exist, their commands parse, their pictures are up to date."""

import argparse
import importlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import metrics, start
from timelines import pages, redrawn

from jaxpipe import config as configs
from jaxpipe.config import Config
from jaxpipe.model import FAMILIES

HOME = Path(__file__).parents[1]
HOUSE = HOME / "jaxpipe"
PAGES = pages()
STANDS_FOR = {"CONFIG": "configs/quickstart.toml"}
SCRIPTS = {
    "train.sh": "train",
    "plan.sh": "plan",
    "bench.sh": "bench",
    "data.sh": "data",
    "generate.sh": "generate",
    "verify.sh": "verify",
}


def name(path):
    return str(path.relative_to(HOME))


every_page = pytest.mark.parametrize("page", PAGES, ids=name)


def links(text):
    """Return the relative links and pictures of a text: the file and the section of each."""
    found = re.findall(r"\]\(([^)\s]*?)(?:#([^)\s]+))?\)", text)
    return [(file, section) for file, section in found if "://" not in file]


def sections(text):
    """Return the anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def spans(text):
    """Return the text in code, inline or in blocks."""
    inline = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [*re.findall(r"`([^`]+)`", inline), *blocks]


def commands(text):
    """Yield the commands of a text as words, with placeholders filled in and options added."""
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
    for file, section in links(page.read_text()):
        target = page.parent / file if file else page
        assert target.exists(), file
        assert not section or section in sections(target.read_text()), f"{file}#{section}"


@every_page
def test_settings_that_are_named_exist(page):
    sections = dict(Config.__annotations__)
    defaults = configs.load(HOME / STANDS_FOR["CONFIG"], [])
    for span in spans(page.read_text()):
        for section, key in re.findall(
            rf"(?<![\w.])({'|'.join(sections)})\.([a-z]\w*)(?![\w./(])", span
        ):
            if key not in ("key", "py", "sh"):
                records = [getattr(defaults, section)]
                if section == "model":
                    records = [family.config for family in FAMILIES.values()]
                assert any(hasattr(record, key) for record in records), f"{section}.{key}"


@pytest.fixture
def checkout(tmp_path):
    """Return a copy of the checkout, whose .venv is this Python with the packages that it has."""
    for name in ("configs", "jaxpipe", "pyproject.toml"):
        (tmp_path / name).symlink_to(HOME / name)
    shutil.copytree(HOME / "launch", tmp_path / "launch")
    environment = tmp_path / ".venv"
    python = environment / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (environment / "made-for").write_text(f"{platform.python_version()} {tmp_path}\n")
    checksum = subprocess.check_output(["cksum"], input=(HOME / "pyproject.toml").read_bytes())
    (environment / "installed").write_text(f"{checksum.decode()}cuda13\ndata\n")
    return tmp_path


@pytest.mark.slow
def test_the_five_commands_lead_to_an_exported_model(checkout):
    page = (HOME / "README.md").read_text()
    (block,) = re.findall(
        r"^```bash\n(.*?)^```$",
        page[page.index("## Five commands") : page.index("The first trains")],
        re.MULTILINE | re.DOTALL,
    )
    assert len(block.replace("\\\n", " ").splitlines()) == 5
    made = start(["bash", "-ec", block], cwd=checkout)
    output, _ = made.communicate()
    assert made.returncode == 0, output
    logged = metrics(checkout / "runs" / "tuned")
    assert logged[60]["eval_loss"] < logged[20]["eval_loss"]
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkout / "runs" / "exported")
    prompt = torch.tensor([list(b"def ")])
    made = model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert made.shape == (1, 12)


class Understood(BaseException):
    """A command line was parsed."""


def parse(monkeypatch, module, words):
    """Parse the arguments of `python -m jaxpipe.<module>` without running it."""
    for method in ("parse_args", "parse_intermixed_args", "parse_known_intermixed_args"):
        original = getattr(argparse.ArgumentParser, method)

        def stop(*args, original=original, known="known" in method):
            found = original(*args)
            raise Understood(found[0] if known else found)

        monkeypatch.setattr(argparse.ArgumentParser, method, stop)
    package = (HOUSE / module / "__main__.py").exists()
    command = importlib.import_module(f"jaxpipe.{module}{'.__main__' * package}")
    try:
        arguments = getattr(command, "_parse_arguments", command.main)(words)
    except Understood as understood:
        (arguments,) = understood.args
    assert isinstance(arguments, argparse.Namespace)
    return arguments


def module_and_words(words):
    """Return the module and arguments that a line runs, or None if it is no jaxpipe command."""
    first, *rest = words
    if Path(first).name.startswith("python") and rest[:1] == ["-m"] and "jaxpipe" in rest[1]:
        return rest[1].removeprefix("jaxpipe."), rest[2:]
    if first.startswith("./launch/") and (script := Path(first).name) in SCRIPTS:
        return SCRIPTS[script], rest
    if first == "./launch/local_multiprocess.sh":
        rest = rest[rest[0] == "--restart" :]
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
                path = getattr(arguments, "config", STANDS_FOR["CONFIG"])
                configs.load(path, arguments.overrides)


@every_page
def test_timelines_are_those_of_the_code(page):
    assert redrawn(page.read_text()) == page.read_text()
