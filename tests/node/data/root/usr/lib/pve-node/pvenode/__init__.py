"""Stand-ins for the parts of Proxmox VE that a test node needs, written from measured behaviour (PCT_FLOWS.md)."""
