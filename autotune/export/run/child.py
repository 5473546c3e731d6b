"""Runs a script or a module as the main program of this process, which ends when its parent ends.

`process.command` starts this file by its path, so autotune need not be installed for the
interpreter.
"""

import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run the target with its arguments.

    The command line has four parts: the signal that ends this process when its parent dies, the
    parent's process id, a script or a module, and the target's arguments.
    """
    number, parent, target, *arguments = sys.argv[1:]
    sys.path[0] = str(Path(__file__).absolute().parents[3])
    from autotune.core.process import die_with_parent

    die_with_parent(int(parent), number=int(number))

    sys.argv = [target, *arguments]
    if target.endswith(".py"):
        sys.path[0] = os.path.dirname(os.path.abspath(target))
        runpy.run_path(target, run_name="__main__")
    else:
        sys.path[0] = ""
        runpy.run_module(target, run_name="__main__")


if __name__ == "__main__":
    main()
