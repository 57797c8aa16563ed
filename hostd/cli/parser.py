"""The argument parser of every verb. Not imported for a plain `pve-gpu-release 129` (`quick`)."""

from __future__ import annotations

import argparse
import sys
from typing import Any


class Parser(argparse.ArgumentParser):
    """Errors are one clear line and exit status 2; no abbreviations, so that a typo never becomes another option."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> Any:
        from hostd.terminal import escape

        print(f"{self.prog}: {escape(message)} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)
