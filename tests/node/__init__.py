"""The virtual Proxmox-like node: built from Debian packages, booted with systemd-nspawn, real LXC inside."""
