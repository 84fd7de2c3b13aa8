"""Stands where an embedded Ray expects an agent of its own: waits until the raylet that started it is gone,
or the driver whose number it is given, since a raylet may be gone before this has begun.

A program and no module: it is run by its path, with nothing imported."""

import os
import sys
import time

_LOOK_SECONDS = 1.0


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    raylet, driver = os.getppid(), int(sys.argv[1])
    while os.getppid() == raylet and _is_alive(driver):
        time.sleep(_LOOK_SECONDS)
