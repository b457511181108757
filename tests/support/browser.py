"""Chromium without a window, driven as a reader would: Debian's chromium and chromium-driver, through Selenium.

    with Browser(folder) as browser:
        browser.open(path, width=400, dark=True)
        browser.text("h1")

It fetches nothing: what a page asks of the network is refused, and can be listed. As a program
(`python -m tests.support.browser`): is it here?
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromedriver")
READY = "return document.documentElement.dataset.ready === 'yes'"
"""How the report of runs says that it is drawn."""
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip


def missing() -> list[str]:
    """Programs that are not on the path."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


class Browser:
    """One Chromium; `open` shows a page in it. A context manager.

    Args:
        folder: an empty one for its profile.
    """

    def __init__(self, folder: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        for flag in (*_FLAGS, f"--user-data-dir={folder}"):
            options.add_argument(flag)
        options.binary_location = str(shutil.which(PROGRAMS[0]))
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(shutil.which(PROGRAMS[1])))
        self.driver.set_script_timeout(20)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exception: object) -> None:
        self.driver.quit()

    def open(self, path: Path, *, width: int = 1600, dark: bool = False, ready: str = READY) -> float:
        """Show a file and wait until ``ready`` says that its script is done; the seconds that this took."""
        media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.command("Emulation.setEmulatedMedia", features=media)
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=False
        )
        self.errors(), self.requests()  # of the page before
        start = time.perf_counter()
        self.driver.get(path.as_uri())
        self.until(ready)
        return time.perf_counter() - start

    def command(self, name: str, **values: Any) -> Any:
        """A command of Chromium's DevTools protocol."""
        return self.driver.execute_cdp_cmd(name, values)

    def script(self, code: str, *arguments: Any) -> Any:
        """What a function with this body returns."""
        return self.driver.execute_script(code, *arguments)

    def until(self, code: str, *arguments: Any, timeout: float = 15) -> None:
        """Wait until ``script`` returns something true; TimeoutError with what the page complained of."""
        deadline = time.monotonic() + timeout
        while not self.script(code, *arguments):
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout} s for {code}\n{self.errors()}")
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        """The text of the first element of a CSS selector."""
        return self.script("return document.querySelector(arguments[0]).textContent.trim()", selector)

    def keys(self, *keys: str) -> None:
        """Press keys, wherever the focus is."""
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def point(self, selector: str, right: float, down: float, *, click: bool = False) -> None:
        """Move the pointer to a place inside an element, in parts of its width and height."""
        code = (
            "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]"
        )
        left, top, width, height = self.script(code, selector)
        place = {"x": left + right * width, "y": top + down * height}
        self.command("Input.dispatchMouseEvent", type="mouseMoved", **place)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.command("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def errors(self) -> list[str]:
        """What the page complained of since it was last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def requests(self) -> list[str]:
        """Addresses that pages asked for since it was last asked, but for what a page carries itself."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return [address for address in found if not address.startswith(("data:", "blob:"))]


if __name__ == "__main__":
    raise SystemExit(bool(missing()))
