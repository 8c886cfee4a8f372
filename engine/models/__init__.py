"""Model families, one file each. A model owns its weights and the order of operations, never a kernel."""
