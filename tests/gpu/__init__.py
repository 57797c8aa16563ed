"""The real-GPU suite (NODE section 3): real driver, real namespaces, the product unchanged. See README.md here."""
