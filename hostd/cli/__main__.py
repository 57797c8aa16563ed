"""`python3 -m hostd.cli` = `pve-gpu-release`."""

from hostd.cli.main import entry

entry()
