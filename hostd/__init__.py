"""pve-gpu-release: free the GPUs that an LXC container holds, from the Proxmox host, and prove it."""

__version__ = "0.1.0"
