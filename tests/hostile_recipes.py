"""A process that reads recipes and fails on some of them, as a fault in a library would make it fail."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from gptworks.confined.child import serve
from gptworks.studio import recipes


def _values(question: Any) -> Any:
    name = Path(question["path"]).name
    if name == "slow":
        while True:
            pass
    if name == "hungry":
        return len(bytearray(1 << 30))
    if name == "kills":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "sleeps":
        time.sleep(1000)
    return recipes._values(question) | {"seed": os.getpid()}


def main() -> None:
    serve(lambda setup: _values)
