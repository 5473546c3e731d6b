"""A headless Chromium that tests control through its debugging pipe, without further packages."""

import base64
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

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--remote-debugging-pipe",
)
TIMEOUT_S = 60.0


class Page:
    """One tab."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._number, self._rest, self._session = 0, b"", ""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]

    def _ask(self, method: str, **params: Any) -> Any:
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        os.write(
            self._commands,
            json.dumps(command | ({"sessionId": self._session} if self._session else {})).encode(),
        )
        os.write(self._commands, b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            chunk = os.read(self._answers, 1 << 16)
            assert chunk, "the browser ended"
            self._rest += chunk
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def open(self, url: str) -> None:
        self._ask("Page.navigate", url=url)

    def screen(self, width: int, height: int, *, dark: bool = False, scale: float = 1.0) -> None:
        """Show what follows on a screen of so many CSS pixels, in light or dark colours, without
        scroll bars.
        """
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self._ask("Emulation.setDeviceMetricsOverride", **size)
        self._ask("Emulation.setScrollbarsHidden", hidden=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, file: Path, *, of: str | None = None) -> None:
        """Write what the screen shows, or the whole element that a selector finds, as a PNG."""
        clip: dict[str, Any] = {}
        if of is not None:
            box = (
                f"(({{x, y, width, height}}) => ({{x, y: y + scrollY, width, height}}))({_box(of)})"
            )
            clip = {"clip": {**self.run(box), "scale": 1}, "captureBeyondViewport": True}
        file.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot", **clip)["data"]))

    def run(self, script: str) -> Any:
        """Evaluate a JavaScript expression, await it, and return its value."""
        answer = self._ask(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self.run(condition):
            assert time.monotonic() < deadline, condition
            time.sleep(0.05)

    def text(self, *expected: str) -> str:
        """Wait until the page shows all expected strings and return its text."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            shown: str = self.run("document.body ? document.body.innerText : ''")
            if all(part in shown for part in expected):
                return shown
            assert time.monotonic() < deadline, (expected, shown)
            time.sleep(0.1)


def _box(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """Start a browser with its own profile and yield its only tab."""
    command_reader, commands = os.pipe()
    answers, answer_writer = os.pipe()
    # the file descriptors that Chromium uses
    redirect = f'exec "$@" 3<&{command_reader} 4>&{answer_writer}'
    process = subprocess.Popen(
        ["bash", "-c", redirect, "bash", str(CHROMIUM), *OPTIONS, f"--user-data-dir={profile}"],
        pass_fds=(command_reader, answer_writer),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(command_reader)
    os.close(answer_writer)
    try:
        yield Page(commands, answers)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        os.close(commands)
        os.close(answers)
