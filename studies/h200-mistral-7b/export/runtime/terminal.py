# -*- coding: utf-8 -*-
"""Handles a terminal that is closed while a program runs."""

import os
import stat
from contextlib import suppress


def leave_terminal(*, if_closed: bool = False) -> None:
    """Discard all later output to a terminal.

    When a terminal is closed, its programs receive SIGHUP, and each later write to it fails. With
    `if_closed`, output to a terminal that is still open is kept.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    for handle in (1, 2):
        # Output to a file or a pipe is kept. The descriptor of a closed terminal still names a
        # device, but `isatty` is false for it.
        with suppress(OSError):  # the program was started without this descriptor
            is_device = stat.S_ISCHR(os.fstat(handle).st_mode)
            if is_device and not (if_closed and os.isatty(handle)):
                os.dup2(null, handle)
    os.close(null)
