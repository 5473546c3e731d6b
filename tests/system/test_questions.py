"""`docs/questions.md`: each command there answers its question, on small studies that really ran on
the processors.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.report.json_forms import form_of
from tests.helpers.next_commands import stranger
from tests.system.test_end_to_end import autotune, command

pytestmark = pytest.mark.probe

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "questions.md").read_text(encoding="utf-8")
SECTIONS = re.findall(
    r"^## (.+?)\n\n```\n(.+?)```\n(.*?)(?=^## |\Z)", DOCUMENT, re.DOTALL | re.MULTILINE
)
COMMANDS = [
    (question, line)
    for question, block, _ in SECTIONS
    for line in block.splitlines()
    if "--live" not in line
]
SAYS = {  # what a reader looks for in the answer
    "What does an hour of a GPU cost?": "is the cheapest GPU: $",
    "What can my card train?": "trains models of up to",
    "What does my run cost on each card?": "trains Llama-3.1-8B cheapest: ",
    "Which card should I buy?": "is the GPU to buy for at most $2,000",
    "Which node of my study is apart?": "apart from the others in memory",
    "Where does the time of a micro batch go?": "Most of the time goes to: ",
    "Which of two studies is better?": "The comparison has the weaker evidence of the two winners:",
}
# pages that are written beside a study
BESIDE = {"explain": "profile.html", "report": "against-another.html"}
# tests/unit/report/test_json_forms.py validates the JSON of these commands, which take seconds.
UNIT_TESTED = ("plan", "compare", "longest")
FORMS = {"plan": "plan --gpu", "explain": "explain --profile", "status": "status --nodes"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two studies: one by two processes, and one of all weights."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from pictures import DEMO, SPACE, STUDY

    sys.path.remove(str(ROOT / "benchmarks"))
    folder = tmp_path_factory.mktemp("questions with a space")
    (folder / "space.yaml").write_text(SPACE)
    # The second process waits for the study, so that it misses none of the few trials.
    joins = command("worker", "--study", "study", "--wait", "5m")
    with subprocess.Popen(joins, cwd=folder, env=stranger()) as second:
        studies = (
            (*STUDY, "--study", "study"),
            (*DEMO, "--study", "another", "--trials", "2", "--budget", "5m"),
        )
        for arguments in studies:
            ended = autotune(folder, *arguments)
            assert ended.code == 0, ended.err
    assert second.returncode == 0
    return folder


def test_every_question_has_a_command_and_a_picture() -> None:
    assert {question for question, _, _ in SECTIONS} == SAYS.keys()
    assert len(SECTIONS) == len(re.findall(r"^## ", DOCUMENT, re.MULTILINE))
    for question, _, text in SECTIONS:
        assert "images/question-" in text or question == "What does an hour of a GPU cost?", (
            question
        )


@pytest.mark.parametrize(("question", "line"), COMMANDS, ids=[line for _, line in COMMANDS])
def test_the_command_answers_the_question(question: str, line: str, folder: Path) -> None:
    words = {"STUDY": "study", "ANOTHER": "another", "12": "0"}
    program, *arguments = [words.get(word, word) for word in shlex.split(line)]
    assert program == "autotune"
    ended = autotune(folder, *arguments)
    assert ended.code == 0, ended.err
    if "--json" not in arguments:
        assert SAYS[question] in ended.out
        is_asked = any(other == question and "--json" in words for other, words in COMMANDS)
        if is_asked or arguments[0] in UNIT_TESTED:
            return
        ended = autotune(folder, *arguments, "--json")
        assert ended.code == 0, ended.err
    form_of(FORMS.get(arguments[0], arguments[0])).validate_json(ended.out)
    if name := BESIDE.get(arguments[0]):
        assert "data-figure=" in (folder / "runs" / "study" / name).read_text(encoding="utf-8")
    if "--html" in arguments:
        page = (folder / arguments[arguments.index("--html") + 1]).read_text(encoding="utf-8")
        assert "<h1" in page and "data-figure=" in page
