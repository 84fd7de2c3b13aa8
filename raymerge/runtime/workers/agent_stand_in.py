"""Stands where an embedded Ray expects an agent of its own: waits until the raylet that started it is gone.

A program and no module: it is run by its path, with nothing imported."""

import os
import time

_LOOK_SECONDS = 1.0

if __name__ == "__main__":
    raylet = os.getppid()
    while os.getppid() == raylet:
        time.sleep(_LOOK_SECONDS)
