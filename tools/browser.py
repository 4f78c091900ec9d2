"""A page in a real browser, over Chromium's DevTools protocol: opened at a width, asked, typed at, drawn."""

from __future__ import annotations

import asyncio
import base64
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
PATIENCE = 60  # seconds for one answer


class Page:
    """A tab. `complaints` are the errors and warnings of its console since it was opened."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, loop: asyncio.AbstractEventLoop):
        self._socket, self._loop = socket, loop
        self._asked = 0
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """What Chromium answers to a method of the protocol. Raises RuntimeError if it refuses."""
        self._asked += 1
        message = {"id": self._asked, "method": method, "params": params}
        return self._loop.run_until_complete(asyncio.wait_for(self._answer(message), PATIENCE))

    async def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        await self._socket.send_json(message)
        while True:
            got = await self._socket.receive_json()
            self._note(got)
            if got.get("id") == message["id"]:
                if "error" in got:
                    raise RuntimeError(f"{message['method']}: {got['error']}")
                return got["result"]

    def _note(self, event: dict[str, Any]) -> None:
        params, kind = event.get("params", {}), event.get("method")
        if kind == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        if kind == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))
        if kind == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(params["entry"]))

    def open(
        self, address: str, width: int = 1280, height: int = 900, dark: bool = False, **media: Any
    ) -> None:
        """Loads an address at a size. Returns when it and its scripts are through."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=address)
        self.run(
            "new Promise(done => document.readyState == 'complete' ? done() : addEventListener('load', done))"
        )

    def run(self, script: str) -> Any:
        """The JSON value of an expression in the page, a promise's when it has one."""
        answer = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Presses and releases a key, such as `ArrowLeft` or `Tab`."""
        codes = {"Tab": 9, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
        for kind in ("rawKeyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def picture(self, height: int | None = None) -> bytes:
        """The page as PNG, from its top to `height` pixels; None: what the window shows."""
        clip = {}
        if height:
            width = self.run("innerWidth")
            clip = {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}}
            clip["captureBeyondViewport"] = True
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png", **clip)["data"])


@contextmanager
def browser() -> Iterator[Page]:
    """A tab of a browser of its own, which ends with the block."""
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory(prefix="browser_", ignore_cleanup_errors=True) as folder:
        command = [BROWSER, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            yield from _tab(loop, _port(Path(folder, "DevToolsActivePort"), process))
        finally:
            process.kill()
            process.wait()
            loop.close()


def _port(file: Path, process: subprocess.Popen) -> str:
    """The port at which the browser listens, as soon as it has written it."""
    ends = time.monotonic() + PATIENCE
    while not (file.exists() and "\n" in file.read_text()):
        if process.poll() is not None or time.monotonic() > ends:
            raise RuntimeError(f"{BROWSER} does not start: exit code {process.poll()}")
        time.sleep(0.05)
    return file.read_text().splitlines()[0]


def _tab(loop: asyncio.AbstractEventLoop, port: str) -> Iterator[Page]:
    async def connect() -> tuple[aiohttp.ClientSession, aiohttp.ClientWebSocketResponse]:
        session = aiohttp.ClientSession()
        async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            tabs = await answer.json()
        (tab,) = [tab for tab in tabs if tab["type"] == "page"]
        return session, await session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=1 << 28)

    session, socket = loop.run_until_complete(connect())
    try:
        yield Page(socket, loop)
    finally:
        loop.run_until_complete(socket.close())
        loop.run_until_complete(session.close())
