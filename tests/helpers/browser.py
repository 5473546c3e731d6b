"""A headless Chromium that tests drive, over the pipe that it is told its orders through; nothing else is needed."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")
ALWAYS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")
PATIENCE_S = 60.0


class Page:
    """One tab."""

    def __init__(self, orders: int, answers: int) -> None:
        self._orders, self._answers = orders, answers
        self._number, self._rest, self._session = 0, b"", ""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def _ask(self, method: str, **params: Any) -> Any:
        self._number += 1
        order = {"id": self._number, "method": method, "params": params}
        os.write(self._orders, json.dumps(order | ({"sessionId": self._session} if self._session else {})).encode())
        os.write(self._orders, b"\0")
        while True:
            told = self._message()
            if told.get("id") == self._number:
                assert "error" not in told, told
                return told["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            got = os.read(self._answers, 1 << 16)
            assert got, "the browser is gone"
            self._rest += got
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def open(self, url: str) -> None:
        self._ask("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        answer = self._ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, *expected: str) -> str:
        """What is to be read on the page, once all of this is."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            shown: str = self.run("document.body ? document.body.innerText : ''")
            if all(part in shown for part in expected):
                return shown
            assert time.monotonic() < deadline, (expected, shown)
            time.sleep(0.1)


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A browser of one's own, with one tab."""
    theirs, orders = os.pipe()
    answers, said = os.pipe()
    ends = f'exec "$@" 3<&{theirs} 4>&{said}'  # where it looks for its orders, and answers
    process = subprocess.Popen(
        ["bash", "-c", ends, "bash", str(CHROMIUM), *ALWAYS, f"--user-data-dir={profile}"],
        pass_fds=(theirs, said),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs)
    os.close(said)
    try:
        yield Page(orders, answers)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        os.close(orders)
        os.close(answers)
