"""Every block of README.md and docs/ runs, or says why not; every command names programs, options and files that are."""

from __future__ import annotations

import io
import json
import re
import shlex
from contextlib import redirect_stdout

import pytest

from megatron_fp8.commands import main as command_line
from megatron_fp8.files.user_paths import example_configs
from megatron_fp8.train.config import run_config
from tests.support.command import ROOT, empty_cache, environment, run
from tests.support.docs_blocks import blocks
from tests.support.pages import PAGES, SMALL, name

WITH_PYTHON = [page for page in PAGES if any(b.language == "python" and not b.reason for b in blocks(page))]
WITH_COMMANDS = [page for page in PAGES if any(b.commands and not b.reason for b in blocks(page))]
LANGUAGES = {"", "python", "bash", "json", "yaml"}
# What stands for something of the reader's own.
CONFIG_OF_THEIR_OWN = r"^--config=(CONFIG|FILE|my\.yaml|runs/.*/config\.yaml)$"


def test_there_are_blocks_of_both_kinds():
    assert len(WITH_PYTHON) > 4 and len(WITH_COMMANDS) > 12


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_is_one_that_is_known_and_every_reason_says_something(page):
    for block in blocks(page):
        where = f"{name(page)}:{block.line}"
        assert block.language in LANGUAGES, where
        assert not block.reason or len(block.reason.split()) >= 4, where
    written = re.findall(r"^<!-- (?:not run|before):", page.read_text(), re.M)
    assert len(written) == sum(bool(block.reason or block.before) for block in blocks(page)), (
        "a comment without its block"
    )


def test_records_are_shown_as_files_have_them():
    """An object a line."""
    shown = [block for page in PAGES for block in blocks(page) if block.language == "json"]
    assert shown and all(isinstance(json.loads(line), dict) for b in shown for line in b.text.splitlines())


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_python_runs(page, tmp_path):
    """In a process of its own, since some of it sets Megatron-Core's hooks."""
    parts = [
        f"{block.before}\n# line {block.line}\n{block.text}"
        for block in blocks(page)
        if block.language == "python" and not block.reason
    ]
    (tmp_path / "page.py").write_text("\n".join(parts))
    done = run(tmp_path / "page.py", cwd=tmp_path)
    assert done.returncode == 0, f"{name(page)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def helps() -> dict[str, str]:
    """Command -> what its --help says."""
    found = {}
    for command in command_line.COMMANDS:
        said = io.StringIO()
        with redirect_stdout(said):
            try:
                command_line.main([command, "--help"])
            except SystemExit as end:
                assert not end.code
        found[command] = said.getvalue()
    return found


@pytest.fixture(scope="module")
def help_of() -> dict[str, str]:
    return helps()


def check(words: list[str], help_of: dict[str, str]) -> None:
    """AssertionError or ValueError if a command line names what is not there."""
    program, rest = words[0], words[1:]
    if program == "torchrun" or words[:3] == ["srun", "python", "-m"] or words[:2] == ["python", "-m"]:
        if "megatron_fp8" not in rest:
            (script,) = [word for word in rest if word.endswith(".py")] or [None]
            if script:
                assert (ROOT / script).is_file(), script
            return
        program, rest = "megatron-fp8", rest[rest.index("megatron_fp8") + 1 :]
    if program == "megatron-fp8":
        check_our_own(rest, help_of)
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text()
        for word in rest:
            if "=" not in word:
                assert re.search(rf"^{word}:", makefile, re.M), f"make {word}"
            elif word.startswith("ARGS=--") and rest[0] == "train":
                run_config.parse([*word.removeprefix("ARGS=").split(), "--config=tiny_gpt_cpu"])
    elif program in ("bash", "sbatch", "python", "jupyter", "kubectl"):
        for word in rest:
            if word.startswith("examples/"):
                assert (ROOT / word).is_file(), word
    elif program == "pip":
        for extra in re.findall(r"\[(\w+)\]", " ".join(rest)):
            assert re.search(rf'^    "{extra}": \[', (ROOT / "setup.py").read_text(), re.M), extra
    else:
        assert program in ("source", "cat", "export", "srun"), words


def check_our_own(words: list[str], help_of: dict[str, str]) -> None:
    if words[0].startswith("--"):
        assert words in (["--version"], ["--help"])
        return
    command, rest = words[0], words[1:]
    assert command in help_of, command
    if command == "launch":
        first = next(n for n, word in enumerate(rest) if word in help_of or word.endswith(".py"))
        if rest[first] in help_of:
            check_our_own(rest[first:], help_of)
        else:
            assert (ROOT / rest[first]).is_file(), rest[first]
        rest = rest[:first]
    if command == "train" and not {"--help", "--keys"} & set(rest):
        joined = re.sub(r"--config (\S+)", r"--config=\1", "\n".join(rest).replace("--config\n", "--config "))
        options = [word for word in joined.split("\n") if word not in ("...", "--debug") and "$(" not in word]
        options = [re.sub(CONFIG_OF_THEIR_OWN, "--config=tiny_gpt_cpu", word) for word in options]
        assert any(word.startswith("--config=") for word in options), words
        options = [word.replace("=examples/configs/", f"={ROOT}/examples/configs/") for word in options]
        run_config.parse(options)
    for option in rest if command != "train" else ():
        if option.startswith("--model."):  # of the run whose checkpoint is read
            run_config.parse([option, "--config=tiny_gpt_cpu"])
        elif option.startswith("--"):
            assert option.partition("=")[0] in help_of[command], f"{command} {option}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name)
def test_commands_name_what_there_is(page, help_of):
    for block in blocks(page):
        for words in block.commands if not block.reason else ():
            try:
                check(words, help_of)
            except (AssertionError, ValueError) as error:
                raise AssertionError(f"{name(page)}:{block.line}: {' '.join(words)}: {error}") from error


@pytest.mark.parametrize(
    "wrong",
    [
        "megatron-fp8 trian",
        "megatron-fp8 train --config no_such",
        "megatron-fp8 train --config tiny_gpt_cpu --model.fp8_recepi=mxfp8",
        "megatron-fp8 report RUN --htlm=a",
        "make all-of-it",
        "python examples/none.py",
        "pip install '.[no]'",
    ],
)
def test_a_wrong_command_is_found(wrong, help_of):
    with pytest.raises((AssertionError, ValueError)):
        check(shlex.split(wrong), help_of)


def test_the_commands_of_the_first_page_run(tmp_path):
    """docs/start.md's, as written but for the model's size, one after the other in one folder."""
    (tmp_path / "words.txt").write_text("every step of a small model is one line of text\n" * 300)
    variables = environment(XDG_CACHE_HOME=empty_cache(tmp_path))
    ran = []
    for block in blocks(ROOT / "docs" / "start.md"):
        for words in block.commands:
            if words[0] == "megatron-fp8" and words[1] != "launch":
                small = SMALL if words[1] == "train" else []
                done = run("-m", "megatron_fp8", *words[1:], *small, cwd=tmp_path, **variables)
            elif words[0] == "python":
                done = run(ROOT / words[1], cwd=tmp_path, **variables)
                assert "2 x decoder.layers.#.mlp.linear_fc1" in done.stdout, (
                    "the plan, alike layers in one line"
                )
                assert "24 GEMMs in FP8" in done.stdout
            else:
                continue  # several processes: tests/functional starts them
            assert done.returncode == 0, f"{' '.join(words)}\n{done.stderr[-4000:]}"
            ran.append(words[0] + " " + words[1])
    assert ran == ["python examples/megatron_gpt.py", "megatron-fp8 train", "megatron-fp8 report"]
    assert "tiny_gpt_cpu" in example_configs()
